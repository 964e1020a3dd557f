"""What a run that fails leaves behind: whole steps and a checkpoint of them, servers that serve, the true reason."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import readable
from fake_faults import Fault
from fake_server import FakeServer
from loop import loop
from omegaconf import OmegaConf
from plain_http import call

from grpo import checkpoint
from grpo.checkpoint_folder import complete
from grpo.record import NoMirror
from grpo.rollout.errors import ServerError
from grpo.signals import Signals


def test_a_step_whose_sync_fails_is_recorded_and_saved(tiny_dir: Path, tmp_path: Path) -> None:
    """A dead server is mostly noticed by the sync: the optimizer has stepped by then, and hours may hang on it."""
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url], tiny_dir, tmp_path, steps=4, max_staleness=1, checkpoint_every=100, zero_variance="keep"
        ) as trainer,
    ):
        server.add_fault(Fault("update_weights", status=500, after=2))  # versions 0 and 1 arrive, 2 does not
        with pytest.raises(ServerError, match="update_weights"):
            trainer.run()
        assert trainer.weights.broken_off
        trainer.try_save()
        trained = trainer.ledger.accounts()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in steps] == [(1, 0), (2, 1)]
    assert steps[-1]["tokens/trained"] == trained["trained"]
    progress = checkpoint.load(checkpoint.find(tmp_path))["progress"]
    assert progress == {"step": 2, "version": 2, "groups": 4, "places": 4, "ledger": trained}


def test_a_failed_sync_resumes_the_server_over_a_connection_that_breaks(tiny_dir: Path, tmp_path: Path) -> None:
    """As vLLM's do after each 500."""
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=2) as trainer:
        server.add_fault(Fault("update_weights", status=500, after=1, times=1))
        server.add_fault(Fault("resume", drop=True, after=1, times=1))
        with pytest.raises(ServerError, match="update_weights"):
            trainer.run()
        assert not server.engine.paused


CALLS = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "reset_prefix_cache", "resume"]


@pytest.mark.parametrize("late", [False, True], ids=["unread", "obeyed"])
@pytest.mark.parametrize("name", [*CALLS, "weight_info"])
def test_a_connection_that_breaks_in_a_sync_costs_nothing_but_time(
    tiny_dir: Path, tmp_path: Path, name: str, late: bool
) -> None:
    """A server that stood still for some seconds closes connections with calls on them, obeyed or not."""
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=3, verify_every=1) as trainer:
        broken = server.add_fault(Fault(name, drop=True, late=late, after=2, times=1))
        trainer.run()
        assert broken.hits == 1
        assert server.engine.version == "3"
        assert not server.engine.paused
        assert not trainer.weights.broken_off
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["sync/probe_max"] < 1e-3 for line in lines)
    assert all(0 < line["sync/paused_s"] <= line["sync/total_s"] for line in lines)
    assert all(line["sync/export_s"] >= 0 for line in lines)


def test_connections_that_break_again_and_again_end_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=3) as trainer:
        broken = server.add_fault(Fault("update_weights", drop=True, after=1))
        with pytest.raises(ServerError, match="already active") as ending:  # it could not be closed either
            trainer.run()
        assert any("begun again before" in note and "update_weights: " in note for note in ending.value.__notes__)
        assert broken.hits > 2
        assert not server.engine.paused
        assert server.engine.version == "0"


@pytest.mark.parametrize(
    ("fault", "told", "hits"),
    [
        (Fault("finish_weight_update", drop=True, after=1, times=2), "finish_weight_update", 2),
        (Fault("update_weights", raw=b"<html>", after=1, times=1), "the answer is not JSON", 1),
    ],
    ids=["a second break", "an answer without sense"],
)
def test_what_ends_a_sync_all_the_same(tiny_dir: Path, tmp_path: Path, fault: Fault, told: str, hits: int) -> None:
    """It is begun again once, and an answer is an answer."""
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=3) as trainer:
        server.add_fault(fault)
        with pytest.raises(ServerError, match=told):
            trainer.run()
        assert fault.hits == hits
        assert not server.engine.paused


def test_a_pause_is_counted_from_its_first_beginning(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1) as trainer:
        server.add_fault(Fault("update_weights", drop=True, delay=0.4, after=1, times=1))
        trainer.run()
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["sync/paused_s"] > 0.4


def test_weights_that_cannot_be_sent_twice_are_sent_once(tiny_dir: Path, tmp_path: Path) -> None:
    """Half a collective waits for its other half."""
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=3) as trainer:
        trainer.weights.weights.repeatable = False  # type: ignore[attr-defined]
        server.add_fault(Fault("pause", drop=True, after=1, times=1))
        server.add_fault(Fault("finish_weight_update", drop=True, after=2, times=1))
        with pytest.raises(ServerError, match="finish_weight_update"):
            trainer.run()
        assert trainer.version == 2
        assert server.calls.count("update_weights") >= 3


def test_an_update_left_open_is_closed_over_a_connection_that_breaks(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1) as trainer:
        assert call(server.url, "/start_weight_update")[0] == 200
        server.add_fault(Fault("update_weights", drop=True, times=1))
        server.add_fault(Fault("start_weight_update", drop=True, after=1, times=1))
        trainer.run()
        assert server.engine.version == "1"
        assert not trainer.weights.broken_off


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], dict[str, Any]]:
    """Lets a run fail for "the reason" while it starts, calls the function while it closes; status.json."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import run

    def end(closing: Callable[[], Any]) -> dict[str, Any]:
        def make(*args: Any) -> Any:
            next(a for a in args if isinstance(a, contextlib.ExitStack)).callback(closing)
            raise RuntimeError("the reason")

        monkeypatch.setattr(run, "make", make)
        monkeypatch.setattr(run.HydraConfig, "get", lambda: SimpleNamespace(mode=None))
        plan: Any = SimpleNamespace(train=SimpleNamespace(steps=3), mirror=NoMirror(), evaluating=False)
        with pytest.raises(SystemExit) as exit, Signals() as signals:
            run.run(plan, OmegaConf.create({"name": "n", "seed": 0}), tmp_path, [], signals)
        assert exit.value.code == 1
        status: dict[str, Any] = json.loads((tmp_path / "status.json").read_text())
        return status

    return end


@pytest.mark.parametrize("before", ["finished", "running"])
def test_a_resume_that_fails_before_it_goes_on_has_forgotten_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """A model that cannot be loaded, a server that does not start: the steps after the checkpoint are still there."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import run

    def make(*args: Any) -> Any:
        raise RuntimeError("no server")

    monkeypatch.setattr(run, "make", make)
    monkeypatch.setattr(run.HydraConfig, "get", lambda: SimpleNamespace(mode=None))
    for step in (1, 2):
        readable(tmp_path / "checkpoints" / f"step_{step:06d}", step)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "status.json").write_text(json.dumps({"state": before, "step": 2, "name": "first"}))
    (tmp_path / "summary.json").write_text('{"objective": 0.5}')
    plan: Any = SimpleNamespace(train=SimpleNamespace(steps=3), mirror=NoMirror(), evaluating=False)
    cfg = OmegaConf.create({"name": "n", "seed": 0})
    with pytest.raises(SystemExit), Signals() as signals:
        run.run(plan, cfg, tmp_path, [], signals, tmp_path / "checkpoints" / "step_000001")
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_000001", "step_000002"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "summary.json").read_text() == '{"objective": 0.5}'
    status = json.loads((tmp_path / "status.json").read_text())
    if before == "finished":
        assert status == {"state": "finished", "step": 2, "name": "first"}
    else:  # it was killed, and would seem to run
        assert (status["state"], status["step"], status["name"]) == ("failed", 2, "first")
        assert status["error"]["message"] == "no server"


def test_a_signal_before_there_is_a_record_ends_the_run_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import run

    monkeypatch.setattr(run, "make", lambda *args: pytest.fail("it went on"))
    plan: Any = SimpleNamespace(train=SimpleNamespace(steps=3), mirror=NoMirror(), evaluating=False)
    with Signals() as signals:
        signals.deferred = True  # as run.py's main has it while the folder is claimed
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as exit:
            run.run(plan, OmegaConf.create({"name": "n", "seed": 0}), tmp_path, [], signals)
    assert exit.value.code == 128 + signal.SIGTERM
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "interrupted"


def test_a_run_that_cannot_be_closed_in_order_says_how_it_ended(ended: Any) -> None:
    status = ended(lambda: 1 / 0)
    assert (status["state"], status["error"]["message"]) == ("failed", "the reason")


@pytest.mark.parametrize("when", ["closing", "summary", "report"])
def test_a_signal_while_a_failed_run_ends_takes_nothing_from_its_ending(
    ended: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """torchrun sends one as soon as a rank is gone, and rank 0 may have noticed that by itself."""
    from grpo import report, summary

    def struck(function: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return function(*args, **options)

        return call

    if when == "summary":
        monkeypatch.setattr(summary, "summarize", struck(summary.summarize))
    if when == "report":
        monkeypatch.setattr(report, "build_run", struck(report.build_run))
    too_late: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: too_late.append(signum))
    try:
        status = ended(struck() if when == "closing" else lambda: None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert too_late == []
    assert (status["state"], status["error"]["message"]) == ("failed", "the reason")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("broken_off", [False, True])
def test_kept_servers_are_told_whether_a_sync_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_off: bool
) -> None:
    """Else the next job of a sweep gets a server that holds half of the last one's weights."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import run
    from grpo import summary

    class Trainer:
        weights = SimpleNamespace(broken_off=broken_off)
        display = SimpleNamespace(close=lambda: None)

        def run(self) -> str:
            raise FloatingPointError("the loss is NaN")  # in itself no reason to doubt a server

        def try_save(self) -> None:
            told.append("saved")

    told: list[Any] = []
    whole = summary.summarize
    monkeypatch.setattr(summary, "summarize", lambda recorder, trainer, **facts: whole(recorder, None, **facts))
    monkeypatch.setattr(run, "make", lambda *args: Trainer())
    monkeypatch.setattr(run, "watchdog_of", lambda *args: contextlib.nullcontext())
    monkeypatch.setattr(run.HydraConfig, "get", lambda: SimpleNamespace(mode=None))
    monkeypatch.setattr(run.kept.servers, "ended", lambda failure, *, synced: told.append((str(failure), synced)))
    train = SimpleNamespace(steps=3, watchdog=0.0)
    plan: Any = SimpleNamespace(train=train, mirror=NoMirror(), evaluating=False)
    with pytest.raises(SystemExit), Signals() as signals:
        run.run(plan, OmegaConf.create({"name": "n", "seed": 0}), tmp_path, [], signals)
    assert told == [("the loss is NaN", not broken_off), "saved"]


def test_a_run_that_a_second_signal_ends_has_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))
    import run

    def make(plan: Any, config: Any, folder: Path, recorder: Any, signals: Any, *rest: Any) -> Any:
        signals.deferred = True  # as in a step
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run, "make", make)
    plan: Any = SimpleNamespace(train=SimpleNamespace(steps=3), mirror=NoMirror(), evaluating=False)
    child = os.fork()
    if child == 0:
        try:
            with Signals() as signals:
                run.run(plan, OmegaConf.create({"name": "n", "seed": 0}), tmp_path, [], signals)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["error"]["message"]) == ("interrupted", "ended by SIGTERM")
