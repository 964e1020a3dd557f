"""The wandb mirror against the real client, offline."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from grpo.record import Recorder
from grpo.track import WandbMirror

wandb = pytest.importorskip("wandb")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_offline_run_holds_every_metric_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    mirror = WandbMirror(project="grpo-test", entity=None, group="sweep", mode="offline")
    recorder = Recorder(tmp_path, steps=2, mirror=mirror, facts={"name": "test"}, config={"seed": 3})
    recorder.metrics({"step": 1, "loss": 0.25, "drift": None})
    recorder.evaluation({"step": 1, "name": "held_out", "accuracy": 0.5, "reward": 0.5, "low": 0.4, "high": 0.6}, [])
    recorder.finish("finished", {"objective": 0.5})
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    wanted = (b"loss", b"0.25", b"eval/held_out/accuracy", b"objective", b"finished", b"seed")
    deadline = time.monotonic() + 60  # wandb's own process writes the file, and may be behind
    while (left := [text for text in wanted if text not in files[0].read_bytes()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    assert not recorder._mirror_failed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_goes_on_as_the_same_wandb_run_and_every_ending_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    exits: list[int | None] = []
    finish = wandb.Run.finish

    def noted(self: Any, exit_code: int | None = None, **options: Any) -> None:
        exits.append(exit_code)
        finish(self, exit_code, **options)

    monkeypatch.setattr(wandb.Run, "finish", noted)
    ids = []
    for step, (state, error) in enumerate(
        [("failed", RuntimeError("a loss")), ("interrupted", KeyboardInterrupt()), ("finished", None)]
    ):
        mirror = WandbMirror(project="grpo-test", entity=None, group=None, mode="offline")
        recorder = Recorder(tmp_path, steps=3, mirror=mirror, facts={"name": "test"}, resumed_at=step or None)
        recorder.metrics({"step": step + 1, "loss": 0.25})
        ids.append(mirror._run.id)
        recorder.finish(state, {"objective": None}, error)
        assert wandb.run is None
        assert not recorder._mirror_failed
    assert len(set(ids)) == 1
    assert exits == [1, 1, 0]
    parts = list(tmp_path.glob(f"wandb/offline-run-*-{ids[0]}*"))  # one a part
    assert len(parts) == 3
    other = tmp_path / "other"
    other.mkdir()
    mirror = WandbMirror(project="grpo-test", entity=None, group=None, mode="offline")
    Recorder(other, steps=1, mirror=mirror).finish("finished", {})
    assert mirror._run.id != ids[0]


@pytest.mark.parametrize(("group", "seen"), [(None, "a-sweep"), ("mine", "mine")])
def test_jobs_of_a_sweep_share_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str | None, seen: str
) -> None:
    asked: dict[str, Any] = {}

    class Run:
        def define_metric(self, *args: Any, **options: Any) -> None: ...

    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or Run())
    job = tmp_path / "a-sweep" / "3"
    job.mkdir(parents=True)
    mirror = WandbMirror(project="p", entity=None, group=group, mode="offline")
    mirror.start(job, "run", {})
    assert asked["group"] == group  # a run alone is in no group but the one that is asked for
    (job.parent / "multirun.yaml").touch()
    mirror.start(job, "run", {})
    assert asked["group"] == seen


def test_a_wandb_that_cannot_be_reached_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(**options: Any) -> Any:
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setattr(wandb, "init", unreachable)
    recorder = Recorder(tmp_path, steps=2, mirror=WandbMirror(project="p", entity=None, group=None, mode="online"))
    for step in (1, 2):
        recorder.metrics({"step": step, "loss": 0.5})
        recorder.rollouts(step, [], version=step - 1)
    recorder.evaluation({"step": 2, "name": "held_out", "reward": 0.5}, [])
    recorder.finish("finished", {"objective": 0.5})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    assert len((tmp_path / "evals.jsonl").read_text().splitlines()) == 1
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    assert sum("mirror failed" in record.getMessage() for record in caplog.records) == 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"track.mode='on'.*online"):
        WandbMirror(project="p", entity=None, group=None, mode="on")
