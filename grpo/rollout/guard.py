"""The process between a run and the server that it launched: no server outlives its run, however the run dies.

    python -I -S guard.py GRACE COMMAND [ARGUMENT ...] < pipe

| what happens | who notices | what follows |
| --- | --- | --- |
| the run dies in any way, closes the pipe | end of file on stdin, or the kernel's signal | SIGTERM to the command; |
| the guard gets SIGTERM, SIGINT or SIGHUP | its handler | after GRACE seconds SIGKILL to all below |
| the run has failed, writes AT_ONCE | AT_ONCE on stdin | SIGKILL to all below |
| the command ends by itself | SIGCHLD | SIGKILL to what it left behind |
| the guard gets SIGKILL | the kernel | SIGKILL to the command and its children (`die_with_parent`) |

Two ways for the run's death, since a forked child of the run may hold the pipe open. The exit status is the command's,
128 + N after signal N, as in a shell. We are the subreaper of everything below: an orphan becomes our child and cannot
hide. Only the standard library, so that it starts in 0.05 s and stays small. Linux only, as is vLLM.

vLLM leaves the sockets between its processes behind when it is killed, and some when it is not: they get a folder that
is removed with the last of them.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AT_ONCE = b"k"  # on the pipe
NOBODY = -1
SOCKETS = "VLLM_RPC_BASE_PATH"  # one that the user has set is used as it is
GUARDED = "GRPO_GUARDED"  # in the environment of whatever runs below a guard: the process that started it


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """The kernel sends us `signum` when the thread that started us ends; at once, if it has ended already."""
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died between the two lines
        os.kill(os.getpid(), signum)


def die_with_parents() -> None:
    """The same for this process and what it starts, where they call this too or fork from one that did.

    (A fork does not inherit the wish, a new program keeps it.) Does nothing where no guard is above.
    """
    above = os.environ.get(GUARDED)
    if above is None:
        return
    os.register_at_fork(after_in_child=_die_with_parent_too)
    _die_with_parent_too()
    if not title(int(above)):  # it died before we came so far, and somebody adopted us
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_parent_too() -> None:
    die_with_parent()
    os.environ[GUARDED] = str(os.getpid())


def descendants(pid: int) -> list[int]:
    """Every living process below `pid`, parents before children.

    A zombie is left out once its last thread has ended: until then its files are open, and a port is taken.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
                state, parent = stat.rpartition(b")")[2].split()[:2]
                ended = state in (b"Z", b"X") and len([*(entry / "task").iterdir()]) <= 1
            except OSError:  # gone meanwhile
                continue
            if not ended:
                children.setdefault(int(parent), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def title(pid: int) -> str:
    """The command line of a process, "" when it has ended (a zombie has none)."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def main(arguments: list[str]) -> int:
    if SOCKETS in os.environ:
        return watch_over(arguments)
    os.environ[SOCKETS] = tempfile.mkdtemp(prefix="grpo-")  # short: a socket's whole path has 107 characters at most
    try:
        return watch_over(arguments)
    finally:
        shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)


def watch_over(arguments: list[str]) -> int:
    """Run the command until it ends or is to end; its exit status, when nothing is left below us."""
    grace, command = float(arguments[0]), arguments[1:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    wake, bell = os.pipe()
    os.set_blocking(bell, False)
    signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
    for signum in (*ENDINGS, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)  # the bell rings, nothing else
    die_with_parent(signal.SIGTERM)
    # Blocked over the fork: an ending that comes before the child has default handlers would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    child = os.fork()
    if child == 0:
        _become(command, wake, bell)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
    status = _watch(child, wake)
    if status is None and not _at_once:
        _send(child, signal.SIGTERM)
        status = _wait(child, grace)
    while left := descendants(os.getpid()):  # again and again: they may fork meanwhile
        for pid in left:
            _send(pid, signal.SIGKILL)
        ended = _wait(NOBODY, 0.05)
        status = ended if status is None else status
    while status is None:  # SIGKILL was sent, so it is a matter of time
        status = _wait(child, 1.0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _become(command: list[str], *pipes: int) -> None:
    """In the child: turn into the command. It reads nothing, has default signals, and dies with the guard."""
    try:
        signal.set_wakeup_fd(-1)
        for signum in (*ENDINGS, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)
        die_with_parent(signal.SIGKILL)
        os.environ[GUARDED] = str(os.getppid())
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        for fd in (nothing, *pipes):
            os.close(fd)
        os.execvp(command[0], command)
    except BaseException as error:
        os.write(2, f"guard: {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


_statuses: dict[int, int] = {}
_at_once: list[bytes] = []  # not empty: the run wants no grace


def _reap() -> None:
    """Collect every child that has ended: the command, and orphans that came to us."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _statuses[pid] = status


def _watch(child: int, wake: int) -> int | None:
    """Until the command ends (its wait status) or it is to end (None)."""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        signals = os.read(wake, 4096) if wake in ready else b""
        _reap()
        if child in _statuses:
            return _statuses[child]
        told = os.read(0, 4096) if 0 in ready else None
        if told:
            _at_once.append(told)
        if told is not None or any(signum in signals for signum in ENDINGS):
            return None


def _wait(child: int, seconds: float) -> int | None:
    """Reap for so long, or until the child has ended; its status, None if it has not."""
    deadline = time.monotonic() + seconds
    while True:
        _reap()
        if child in _statuses:
            return _statuses[child]
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
