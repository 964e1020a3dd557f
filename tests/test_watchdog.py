"""The watchdog speaks when nothing moves, and only then; SIGUSR1 and SIGTERM on a run that hangs."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from command import finish, load, small, start
from fake_faults import Fault
from fake_server import FakeServer

from grpo.watchdog import Watchdog, stacks


def test_it_speaks_when_nothing_moves_and_again_but_not_while_something_does(caplog: pytest.LogCaptureFixture) -> None:
    state, spoke = [0], threading.Event()

    def where() -> str:
        if len(said) == 2:
            spoke.set()
        said.append("in the sync")
        return said[-1]

    said: list[str] = []
    with caplog.at_level("DEBUG"), Watchdog(0.2, progress=lambda: state[0], where=where):
        for _ in range(20):  # it moves
            time.sleep(0.02)
            state[0] += 1
        assert spoke.wait(30)
    assert "no progress for" in caplog.text
    assert "in the sync" in caplog.text
    assert "test_it_speaks" in caplog.text, "the stack of this thread, at debug level"
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_0_turns_it_off() -> None:
    with Watchdog(0, progress=lambda: 0, where=lambda: ""):
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_every_thread_has_a_stack() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="waiter")
    thread.start()
    text = stacks()
    over.set()
    thread.join()
    assert "thread waiter:" in text
    assert "test_every_thread_has_a_stack" in text


@pytest.mark.slow
def test_a_run_that_hangs_says_where_and_dumps_stacks_and_ends_by_sigterm(tiny_dir: Path, tmp_path: Path) -> None:
    """What a job under SLURM goes through: SIGTERM before the limit, then the same command with resume."""
    folder = tmp_path / "run"
    log = folder / "run.log"

    def until(text: str) -> None:
        deadline = time.monotonic() + 60
        while not log.exists() or text not in log.read_text():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    with FakeServer(tiny_dir) as server:
        server.add_fault(Fault("generate", hang=True, after=100))
        overrides = [*small(server), "train.steps=50", "train.watchdog=1", "rollout.max_staleness=0"]
        process = start(*overrides, f"hydra.run.dir={folder}", folder=tmp_path)
        until("no progress for")
        os.kill(process.pid, signal.SIGUSR1)
        until("Current thread")
        assert process.poll() is None
        process.terminate()
        ended = finish(process)
        server.clear_faults()
        assert ended.returncode == 143, ended.stderr
        assert load(folder / "status.json")["state"] == "interrupted"
        text = log.read_text()
        assert "the trainer is at: waiting for groups (sync: none)" in text
        assert "requests open" in text
        step = load(folder / "status.json")["step"]
        assert (folder / "checkpoints" / f"step_{step:06d}").is_dir()
        again = finish(start(f"resume={folder}", f"train.steps={step + 1}", folder=tmp_path))
    assert again.returncode == 0, again.stderr
    assert load(folder / "status.json")["state"] == "finished"
