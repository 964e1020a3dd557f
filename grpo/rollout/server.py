"""vLLM servers as processes: launch, wait until ready, notice their death, end. And servers that run elsewhere: wait.

A launched server stands below a guard (`grpo.rollout.guard`), so that it cannot outlive the run. It gets its own
session, so that a Ctrl-C in the terminal reaches the run alone, which ends it in order. `launch` returns at once: the
trainer loads while the server starts.

Left out: when to start one again (`grpo.rollout.revival`; launch may be called again after stop) and every call but
/health, which is plain http.client since it is asked before an event loop exists. Flags: `grpo.rollout.flags`.

| waits for | deadline | unblocked by |
| --- | --- | --- |
| /health (`wait_ready`) | `timeout` | the answer, or the process's death |
| the process's end (`stop`) | `grace` + 10 s | SIGTERM, then SIGKILL |
"""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from grpo.rollout import guard
from grpo.rollout.errors import ServerError
from grpo.rollout.flags import gpus_of_servers, server_threads, visible_gpus, vllm_arguments, vllm_environment
from grpo.settings import Rollout

GRACE = 5.0  # seconds between SIGTERM and SIGKILL
POLL = 0.1
TAIL = 25  # lines of a log shown in an error


class ServerDied(ServerError):  # noqa: N818
    """A launched server is not running any more. The message carries the end of its log."""


class VLLMServer:
    """One launched server. Launch it from a thread that lives as long as the run: its death ends the server.

    command: a program that serves on host and port. environment: the whole environment. log: appended to.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str,
        port: int,
        environment: dict[str, str],
        log: Path,
        grace: float = GRACE,
    ) -> None:
        self.command = list(command)
        self.host, self.port = host, port
        self.environment = environment
        self.log = log
        self.grace = grace
        self.process: subprocess.Popen[bytes] | None = None
        self._program = 0  # the process of the command, below its guard
        self._engines: dict[int, str] = {}
        self._death: ServerDied | None = None

    @property
    def url(self) -> str:
        # a server that listens on every address is reached by us on this machine
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    def launch(self, *, patience: float = 0.0) -> None:
        """Start and return. Raises ValueError when the port is taken, and still is after `patience` seconds."""
        assert self.process is None, f"{self.url} was launched already"
        check_port(self.host, self.port, patience)
        prefix = [sys.executable, "-I", "-S", guard.__file__, str(self.grace)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float) -> None:
        """Return once /health answers 200. Raises ServerDied if the process ends first, TimeoutError if time is up."""
        deadline = time.monotonic() + timeout
        while not healthy(self.url):
            self.check()
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.url} did not answer /health within rollout.startup_timeout={timeout:g} s; "
                    + ending(self.log)
                )
            time.sleep(POLL)
        self.check()  # whoever answered may be another process: ours ends when it finds its port taken
        assert self.process is not None
        below = {pid: guard.title(pid) for pid in guard.descendants(self.process.pid)}
        self._program = next(iter(below), 0)
        self._engines = {pid: title for pid, title in below.items() if title.startswith("VLLM::")}

    def check(self) -> None:
        """Raises ServerDied unless the server's processes run, since `wait_ready` those of its engine too.

        (vLLM's API server notices the death of its engine, and ends 5 s later.)
        """
        assert self.process is not None, f"{self.url} was not launched"
        if self._death is None and (why := self._gone()):
            self._death = ServerDied(f"the vLLM server {self.url} died ({why}); {ending(self.log)}")
        if self._death is not None:  # every open request asks
            raise self._death

    def _gone(self) -> str | None:
        assert self.process is not None
        status = self.process.poll()
        gone = [title for pid, title in self._engines.items() if guard.title(pid) != title]
        if status is None and gone:
            if guard.title(self._program):
                return f"its process {gone[0]} is gone"
            with contextlib.suppress(subprocess.TimeoutExpired):  # the whole server is: its exit status says more
                status = self.process.wait(1.0)
        if status is None:
            return f"its process {gone[0]} is gone" if gone else None
        if status < 0:
            return f"its guard was killed by signal {-status}"
        return f"signal {status - 128}" if status > 128 else f"exit status {status}"

    def begin_stop(self, *, at_once: bool = False) -> None:
        """What `stop` begins with."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # the guard is gone; closed already
                if at_once:
                    self.process.stdin.write(guard.AT_ONCE)
                self.process.stdin.close()  # the guard reads the end of file

    def stop(self, *, at_once: bool = False) -> None:
        """End it: SIGTERM, after `grace` seconds SIGKILL; `at_once`, or when a process of it is gone, SIGKILL.
        No process of it is left. May be called at any time."""
        self.begin_stop(at_once=at_once or self._death is not None)
        process, self.process, self._engines, self._death = self.process, None, {}, None
        if process is None:
            return
        try:
            process.wait(self.grace + 10.0)
        except subprocess.TimeoutExpired:
            below = guard.descendants(process.pid)
            process.kill()
            for pid in below:  # the kernel does this too; not left to it alone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


class Servers:
    """All servers of a run, launched ones or attached ones (`urls`)."""

    def __init__(self, launched: Sequence[VLLMServer], urls: Sequence[str] = ()) -> None:
        self.launched = list(launched)
        self.urls = [url.rstrip("/") for url in urls] or [server.url for server in self.launched]

    def launch(self) -> None:
        """Start the launched ones and return; all or none. Raises ValueError when a port is taken."""
        try:
            for server in self.launched:
                server.launch()
        except BaseException:
            self.stop()
            raise

    def wait_ready(self, timeout: float) -> None:
        """Return once every server answers /health."""
        deadline = time.monotonic() + timeout
        for server in self.launched:
            server.wait_ready(max(1.0, deadline - time.monotonic()))
        for url in self.urls:
            while not healthy(url):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{url} (rollout.urls) did not answer /health within rollout.startup_timeout={timeout:g} s"
                    )
                time.sleep(POLL)

    def check(self) -> None:
        """Raises ServerDied when a launched server has died."""
        for server in self.launched:
            server.check()

    def look(self, url: str) -> Callable[[], None]:
        """What raises ServerDied when the server of this url has died; nothing for an attached one."""
        return next((server.check for server in self.launched if server.url == url), lambda: None)

    def stop(self, *, at_once: bool = False) -> None:
        """End the launched servers, all together, `at_once` without a grace; attached ones are left as they are."""
        for server in self.launched:
            server.begin_stop(at_once=at_once)
        for server in self.launched:
            server.stop(at_once=at_once)


def plan_servers(
    rollout: Rollout,
    *,
    model: str,
    dtype: str,
    device: str,
    max_model_len: int,
    backend: str,
    memory: float,
    folder: Path,
    inherited: dict[str, str],
) -> Servers:
    """What `rollout` asks for, not launched yet (`Servers.launch`); of `rollout.urls` nothing will be.

    backend: disk, ipc or nccl. memory: the server's share of a GPU that it shares with the trainer. folder: gets the
    logs, server.log, or server-0.log, server-1.log, ... inherited: the environment that the servers' own is made from.
    Raises ValueError when GPUs are too few.
    """
    if rollout.urls:
        return Servers([], rollout.urls)
    threads = rollout.cpu_threads or server_threads(len(os.sched_getaffinity(0)), rollout.servers)
    gpus: list[list[int]] = [[] for _ in range(rollout.servers)]
    shared = False
    if device != "cpu":
        gpus, shared = gpus_of_servers(
            device=device,
            available=visible_gpus(),
            backend=backend,
            servers=rollout.servers,
            tensor_parallel=rollout.tensor_parallel,
            trainers=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
    ports = free_ports(rollout.host, rollout.servers)
    if rollout.port is not None:
        ports = [rollout.port + i for i in range(rollout.servers)]
    servers = []
    for i, port in enumerate(ports):
        arguments = vllm_arguments(
            model=model,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            backend=backend,
            host=rollout.host,
            port=port,
            max_num_seqs=rollout.max_inflight,
            gpu_memory=rollout.gpu_memory or (memory if shared else 0.9),
            tensor_parallel=rollout.tensor_parallel,
            eager=rollout.eager,
            cpu_kv_gb=rollout.cpu_kv_gb,
            extra=rollout.extra_args,
        )
        environment = vllm_environment(
            inherited,
            device=device,
            backend=backend,
            threads=threads,
            gpus=gpus[i],
            tensor_parallel=rollout.tensor_parallel,
            api_key=rollout.api_key,
            compile_cache=rollout.compile_cache,
        )
        log = folder / ("server.log" if rollout.servers == 1 else f"server-{i}.log")
        command = [sys.executable, "-P", "-m", "grpo.rollout.vllm_main", *arguments]
        servers.append(VLLMServer(command, host=rollout.host, port=port, environment=environment, log=log))
    return Servers(servers)


def healthy(url: str, timeout: float = 2.0) -> bool:
    """Whether GET /health answers 200 by now."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request("GET", f"{parts.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def check_port(host: str, port: int, patience: float = 0.0) -> None:
    """Raises ValueError when nothing can listen there, nor after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended server's connections do not matter
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise ValueError(
                        f"rollout.port={port}: cannot be used on rollout.host={host} ({error.strerror}); null takes a "
                        "free port"
                    ) from error
        time.sleep(POLL)


def free_ports(host: str, count: int) -> list[int]:
    """So many ports that nothing listens on, all different. (If somebody takes one before we do, `launch` says so.)"""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]


def ending(log: Path) -> str:
    """The last part of an error: a line that also stands alone, and below it the end of a log."""
    end = tail(log)
    return f"its log is {log}\n{end}" if end else f"its log, {log}, is empty"


def tail(log: Path, lines: int = TAIL) -> str:
    """The end of a log; before it the last line that names an error, where the end does not show one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            text = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        return f"({error})"
    written = [line for line in text if line.strip()]
    shown = [line for line in written if not _NOISE.search(line)] or written
    end = shown[-lines:]
    causes = [line for line in shown if _CAUSE.search(line)]
    head = [causes[-1], "[...]"] if causes and causes[-1] not in end else []
    return "\n".join(f"  {line[:400]}" for line in [*head, *end])


_NOISE = re.compile(r"nanobind|^ - (leaked|\.\.\. skipped)|Route: |resource_tracker|warnings\.warn\(")
_CAUSE = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: (?!Engine core initialization failed)")
