"""Server processes: ready, dead, ended; and that none outlives the run or the guard, however they die."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real import CONTEXT, STARTUP, launch
from tiny import save_tiny_model

from grpo.rollout import guard
from grpo.rollout.server import ServerDied, Servers, VLLMServer, check_port, ending, free_ports, tail

PROGRAM = Path(__file__).with_name("fake_program.py")
SECONDS = 30.0  # that a test waits before it fails
Make = Callable[..., VLLMServer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Launches the fake program with these options; ended after the test."""
    made: list[VLLMServer] = []

    def launch(*options: str, grace: float = 5.0, name: str = "server") -> VLLMServer:
        (port,) = free_ports("127.0.0.1", 1)
        server = VLLMServer(
            [sys.executable, str(PROGRAM), str(port), *options],
            host="127.0.0.1",
            port=port,
            environment=dict(os.environ),
            log=tmp_path / f"{name}.log",
            grace=grace,
        )
        made.append(server)
        server.launch()
        return server

    yield launch
    for server in made:
        server.stop()


def below(server: VLLMServer) -> list[int]:
    """The program, its engine and the one below that, once all three run."""
    assert server.process is not None
    pid = server.process.pid
    wait(lambda: len(guard.descendants(pid)) == 3)
    return guard.descendants(pid)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if guard.title(pid)]


def test_ready_and_ended(make: Make) -> None:
    server = make("--loose")
    server.wait_ready(SECONDS)
    server.check()
    assert server.url == f"http://127.0.0.1:{server.port}"
    pids = below(server)
    server.stop()
    assert alive(pids) == []
    server.stop()  # again is allowed
    server.launch()  # on the same port
    server.wait_ready(SECONDS)


def test_a_stubborn_server_is_killed_after_the_grace_time(make: Make) -> None:
    server = make("--stubborn", "--loose", grace=0.3)
    server.wait_ready(SECONDS)
    pids = below(server)
    server.stop()
    assert alive(pids) == []


@pytest.mark.parametrize(("at_once", "ended_by"), [(False, signal.SIGTERM), (True, signal.SIGKILL)])
def test_a_server_that_is_ended_at_once_gets_no_grace(make: Make, at_once: bool, ended_by: signal.Signals) -> None:
    server = make("--loose")
    server.wait_ready(SECONDS)
    process, pids = server.process, below(server)
    assert process is not None
    Servers([server]).stop(at_once=at_once)
    assert process.returncode == 128 + ended_by
    assert alive(pids) == []


HALF_DEAD = """
import ctypes, os, platform, socket, sys, threading, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if os.fork() == 0:
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
time.sleep(0.5)
os._exit(3)
"""


def test_a_port_is_free_when_the_server_has_ended_though_threads_outlived_its_engine(tmp_path: Path) -> None:
    """A killed process is a zombie before its last thread has closed its files."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-c", HALF_DEAD, str(port)]
    log = tmp_path / "server.log"
    server = VLLMServer(command, host="127.0.0.1", port=port, environment=dict(os.environ), log=log)
    server.launch()
    assert server.process is not None
    assert server.process.wait(SECONDS) == 3, log.read_text()
    check_port("127.0.0.1", port)
    server.stop()


def test_a_port_that_is_used_for_a_moment_is_waited_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^rollout.port={port}: cannot be used"):
            check_port("127.0.0.1", port, patience=0.2)
        release = threading.Timer(0.3, taken.close)
        release.start()
        check_port("127.0.0.1", port, patience=SECONDS)
        release.join()


@pytest.mark.parametrize("at_once", [False, True])
def test_the_sockets_of_a_server_end_with_it(make: Make, at_once: bool) -> None:
    server = make()
    server.wait_ready(SECONDS)
    environment = Path("/proc", str(below(server)[0]), "environ").read_bytes().split(b"\0")
    (folder,) = [Path(e.decode().partition("=")[2]) for e in environment if e.startswith(b"VLLM_RPC_BASE_PATH=")]
    (folder / "socket").touch()
    assert len(str(folder / str(uuid.uuid4()))) <= 107, "the kernel takes no longer path of a socket"
    server.stop(at_once=at_once)
    assert not folder.exists()


def test_a_folder_for_sockets_that_the_user_chose_stays(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen"
    chosen.mkdir()
    command = [sys.executable, "-I", "-S", guard.__file__, "1", "/usr/bin/env"]
    environment = {**os.environ, "VLLM_RPC_BASE_PATH": str(chosen)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert f"VLLM_RPC_BASE_PATH={chosen}\n" in process.stdout.readlines()
    assert chosen.exists()


def test_an_early_death_is_noticed_with_the_log(make: Make) -> None:
    server = make("--die", "3", "--loose")
    with pytest.raises(ServerDied, match=r"died \(exit status 3\)") as caught:
        server.wait_ready(SECONDS)
    message = str(caught.value)
    assert "EngineError: the GPU is gone" in message  # far above the end of the log
    assert "line 99" in message
    assert "line 50" not in message
    server.stop()


def test_what_a_dead_server_leaves_behind_is_killed(make: Make) -> None:
    server = make("--loose")
    server.wait_ready(SECONDS)
    pids = below(server)
    os.kill(pids[0], signal.SIGSEGV)
    wait(lambda: not alive(pids))
    with pytest.raises(ServerDied, match=r"died \(signal 11\)"):
        wait(lambda: server.check() is not None)


def test_the_death_of_the_engine_alone_is_noticed(make: Make) -> None:
    server = make()
    server.wait_ready(SECONDS)
    engine = next(pid for pid in below(server) if guard.title(pid).startswith("VLLM::EngineCore"))
    os.kill(engine, signal.SIGKILL)
    wait(lambda: not guard.title(engine))
    with pytest.raises(ServerDied, match=r"its process VLLM::EngineCore .* is gone") as death:
        server.check()
    with pytest.raises(ServerDied) as again:  # what every open request asks is found out once
        server.check()
    assert again.value is death.value
    process = server.process
    assert process is not None
    pids = guard.descendants(process.pid)
    server.stop()
    assert process.returncode == 128 + signal.SIGKILL, "a server without its engine gets no grace"
    assert alive(pids) == []
    server.launch()
    server.wait_ready(SECONDS)
    server.check()


def test_a_server_that_never_answers_runs_into_the_deadline(make: Make) -> None:
    server = make("--never")
    with pytest.raises(TimeoutError, match=r"rollout\.startup_timeout=0\.5"):
        server.wait_ready(0.5)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    server = VLLMServer(
        ["/no/such/program"], host="127.0.0.1", port=port, environment={}, log=tmp_path / "log", grace=1.0
    )
    server.launch()
    with pytest.raises(ServerDied, match=r"exit status 127(.|\n)*No such file"):
        server.wait_ready(SECONDS)
    server.stop()


RUN = """
import multiprocessing, os, sys, time
from pathlib import Path
from grpo.rollout.server import VLLMServer
port, program, log = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
server = VLLMServer([sys.executable, program, str(port), "--loose"], host="127.0.0.1", port=port,
                    environment=dict(os.environ), log=log, grace=0.5)
server.launch()
server.wait_ready(30)
if sys.argv[4] == "fork" and os.fork() == 0:  # holds the guard's pipe open, as a worker of a pool would
    time.sleep(3600)
print(server.process.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["plain", "fork"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_survives_the_run(tmp_path: Path, how: str, signum: int) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-c", RUN, str(port), str(PROGRAM), str(tmp_path / "log"), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            guarding = int(run.stdout.readline())
            wait(lambda: len(guard.descendants(guarding)) == 3)
            pids = [guarding, *guard.descendants(guarding)]
            run.send_signal(signum)
            run.wait(SECONDS)
            wait(lambda: not alive(pids))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # the forked one


def test_no_process_survives_the_guard(make: Make) -> None:
    server = make()
    server.wait_ready(SECONDS)
    pids = below(server)
    assert server.process is not None
    server.process.kill()
    wait(lambda: not alive(pids))
    with pytest.raises(ServerDied, match="guard was killed by signal 9"):
        wait(lambda: server.check() is not None)


def test_a_program_that_does_nothing_about_it_does_not_survive_the_guard(tmp_path: Path) -> None:
    """As vLLM before it has loaded our plugin, some seconds after its start."""
    (port,) = free_ports("127.0.0.1", 1)
    server = VLLMServer(["/bin/sleep", "1000"], host="127.0.0.1", port=port, environment={}, log=tmp_path / "log")
    server.launch()
    assert server.process is not None
    guarding = server.process.pid
    wait(lambda: any("sleep" in guard.title(pid) for pid in guard.descendants(guarding)))
    pids = guard.descendants(guarding)
    server.process.kill()
    wait(lambda: not alive(pids))
    server.stop()


def test_a_signal_to_the_guard_ends_in_order(make: Make) -> None:
    server = make("--loose")
    server.wait_ready(SECONDS)
    pids = below(server)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 128 + signal.SIGTERM
    assert alive(pids) == []


def test_a_taken_port_is_named(make: Make) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rollout\.port={port}: cannot be used"):
            check_port("127.0.0.1", port)


def test_free_ports_differ() -> None:
    assert len(set(free_ports("127.0.0.1", 20))) == 20


def test_several_servers(make: Make) -> None:
    servers = Servers([make(name="a"), make(name="b")])
    servers.wait_ready(SECONDS)
    pids = [pid for server in servers.launched for pid in below(server)]
    assert len(set(servers.urls)) == 2
    os.kill(pids[3], signal.SIGKILL)
    wait(lambda: not alive(pids[3:]))
    with pytest.raises(ServerDied, match=servers.urls[1]):
        servers.check()
    servers.stop()
    assert alive(pids) == []


def test_attached_servers_are_waited_for_and_left_alone(make: Make) -> None:
    server = make()
    attached = Servers([], [server.url + "/"])
    assert attached.urls == [server.url]
    attached.wait_ready(SECONDS)
    attached.check()
    attached.stop()
    server.check()
    (nobody,) = free_ports("127.0.0.1", 1)
    with pytest.raises(TimeoutError, match=r"rollout\.urls.*startup_timeout=0\.3"):
        Servers([], [f"http://127.0.0.1:{nobody}"]).wait_ready(0.3)


def test_the_guard_imports_nothing_that_is_slow() -> None:
    """It runs without site packages at all, so it cannot."""
    code = "import sys; sys.argv = ['guard', '1', '/bin/true']; sys.path.insert(0, sys.path.pop()); import runpy\n"
    code += f"try: runpy.run_path({str(guard.__file__)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
    code += "print(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'subprocess', 'grpo')))"
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], stdin=subprocess.PIPE, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_tail_names_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = ["ValueError: No available memory", *["nanobind: leaked 4 instances!"] * 5, *["x"] * 60]
    log.write_text("\n".join([*lines, "RuntimeError: Engine core initialization failed. See root cause above."]))
    shown = tail(log, lines=10).splitlines()
    assert shown[0].strip() == "ValueError: No available memory"
    assert len(shown) == 12
    assert not any("nanobind" in line for line in shown)
    assert "No such file" in tail(tmp_path / "absent")


def test_an_empty_log_is_called_empty(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n")
    assert ending(log) == f"its log, {log}, is empty"
    log.write_text("nanobind: leaked 4 instances!\n")  # noise, where there is nothing else
    assert ending(log) == f"its log is {log}\n  nanobind: leaked 4 instances!"


@pytest.mark.vllm
@pytest.mark.slow
def test_no_process_of_the_real_server_survives_its_guard(tmp_path: Path) -> None:
    server = launch(save_tiny_model(tmp_path / "model", max_length=CONTEXT), log=tmp_path / "server.log")
    try:
        server.wait_ready(STARTUP)
        assert server.process is not None
        pids = guard.descendants(server.process.pid)
        assert any(guard.title(pid).startswith("VLLM::EngineCore") for pid in pids)
        server.process.kill()
        wait(lambda: not alive(pids))
        with pytest.raises(ServerDied, match="guard was killed"):
            wait(lambda: server.check() is not None)
    finally:
        server.stop()
