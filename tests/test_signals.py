"""A signal within a wait: an evaluation is given up, a sync that is under way is finished, then the run ends."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from fake_faults import Call, Fault
from fake_server import FakeServer
from loop import loop

from grpo.evaluate import Evaluator
from grpo.record import Recorder
from grpo.rollout import loader as loader_module
from grpo.signals import Interrupted, Signals
from grpo.trainer import Trainer
from grpo.types import Prompt


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "LOOK_EVERY", 0.02)


def terminate(trainer: Trainer) -> None:
    """What SIGTERM's handler does while the run trains."""
    trainer.signals.received = signal.SIGTERM


def test_an_evaluation_ends_with_a_signal(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, eval_every=1, verify_every=0, timeout=600.0) as trainer,
    ):
        old = trainer.evaluator
        prompt = Prompt(0, "eval/0", "", [5, 6], {})
        trainer.evaluator = Evaluator(old.loader, old.recorder, {"held_out": [prompt]}, old.sampling, 1, 600.0)
        hanging = server.add_fault(Fault("generate", hang=True, after=8))  # the first sync is proven by 8 probes

        def signal_then() -> None:
            server.wait_for(lambda s: hanging.hits > 0)
            terminate(trainer)

        waiting = threading.Thread(target=signal_then)
        waiting.start()
        with pytest.raises(Interrupted):
            trainer.run()
        waiting.join()
        server.clear_faults()
    assert (tmp_path / "evals.jsonl").read_text() == ""


def test_a_signal_within_a_sync_waits_for_its_end_and_a_checkpoint_of_the_step_follows(
    tiny_dir: Path, tmp_path: Path
) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, zero_variance="keep", verify_every=0, checkpoint_every=100) as trainer,
    ):

        def second_arrives(call: Call) -> bool:
            if server.calls.count("update_weights") == 2:
                terminate(trainer)
            return False

        server.add_fault(Fault("update_weights", when=second_arrives))
        with pytest.raises(Interrupted):
            trainer.run()
        trainer.try_save()
        assert server.engine.version == "1"
        assert server.engine.paused is None
        assert not server.engine.session_open
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_000001"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_signal_strikes_at_once_while_the_run_starts_and_waits_for_the_step_while_it_trains() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Signals() as signals, pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == signal.SIGTERM
    with Signals() as signals:
        signals.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as ending:
            signals.check()
    assert ending.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(signum: signal.Signals) -> None:
    child = os.fork()
    if child == 0:
        try:
            with Signals() as signals:
                signals.deferred = True
                os.kill(os.getpid(), signum)
                os.kill(os.getpid(), signum)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signum


def hang(_: int) -> None:
    threading.Event().wait()


@pytest.mark.parametrize("words", ["written", "hanging"])
def test_a_second_signal_leaves_a_true_state_and_waits_for_nothing(tmp_path: Path, words: str) -> None:
    recorder = Recorder(tmp_path, steps=3)
    child = os.fork()
    if child == 0:
        try:
            with Signals() as signals:
                signals.deferred = True
                signals.last_words = (lambda n: recorder.cut_short(Interrupted(n))) if words == "written" else hang
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["state"] == ("interrupted" if words == "written" else "running")
    if words == "written":
        assert status["ended"]
        assert status["error"]["message"] == "ended by SIGTERM"
    recorder.close()


def test_the_signal_and_the_handlers_that_were_there_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(signum: int, frame: object) -> None:
        raise AssertionError("not while the run has its own")

    before = [signal.signal(s, mine) for s in (signal.SIGTERM, signal.SIGINT)]
    try:
        with Signals() as signals, pytest.raises(Interrupted) as ending:
            signals._handle(signal.SIGINT, None)
        assert ending.value.signum == signal.SIGINT
        assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == [mine, mine]
    finally:
        for s, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(s, handler)


def test_what_else_ends_a_run_is_asked_at_every_look() -> None:
    signals = Signals()

    def rank_died() -> None:
        raise RuntimeError("rank 1 died")

    signals.also = rank_died
    with pytest.raises(RuntimeError, match="rank 1 died"):
        signals.check()


def test_an_echo_within_its_time_is_the_first_signal_and_later_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun hands on what a process may have got already."""
    now = [100.0]
    monkeypatch.setattr("grpo.signals.time.monotonic", lambda: now[0])

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("grpo.signals.os._exit", leave)
    signals = Signals()
    signals.deferred, signals.echo_s = True, 5.0
    signals._handle(signal.SIGTERM, None)
    now[0] += 4.9
    signals._handle(signal.SIGTERM, None)
    assert signals.received == signal.SIGTERM
    now[0] += 0.2
    with pytest.raises(SystemExit) as ending:
        signals._handle(signal.SIGTERM, None)
    assert ending.value.code == 128 + signal.SIGTERM
