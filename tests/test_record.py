"""Law 9: disk is the truth, and a mirror harms nothing."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo import record
from grpo.durable import write_atomic
from grpo.record import NoMirror, Recorder, jsonable
from grpo.types import Completion, Group, Prompt


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def recorders() -> Iterator[Callable[..., Recorder]]:
    """Makes recorders that are closed after the test, as a killed process's files are."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(contextlib.closing(Recorder(*args, **options)))


Recorders = Callable[..., Recorder]


def test_lines_are_on_disk_as_they_happen(tmp_path: Path, recorders: Recorders) -> None:
    recorder = recorders(tmp_path, steps=2)
    recorder.metrics({"step": 1, "loss": math.nan, "ess": 1.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "ess": 1.0}]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["steps"]) == ("running", 1, 2)


def test_every_completion_has_its_line_with_lag_from_its_oldest_token(tmp_path: Path, recorders: Recorders) -> None:
    c = Completion(7, 1, [4, 5, 1], [-1.0] * 3, [3, 3, 4], "stop", "ab", 1.0, {"r": 1.0}, 0.5, "trained")
    group = Group(7, Prompt(7, "train/3", "p", [3], {}), [c])
    recorders(tmp_path, steps=1).rollouts(6, [group], version=5)
    (line,) = lines(tmp_path / "rollouts.jsonl")
    assert (line["version_first"], line["version_last"], line["lag"], line["tokens"]) == (3, 4, 2, 3)
    assert (line["group"], line["index"], line["row"], line["outcome"]) == (7, 1, "train/3", "trained")


class Broken(NoMirror):
    """A mirror that always raises."""

    def metrics(self, line: Any) -> None:
        raise ConnectionError("no network")

    def close(self, state: str, summary: Any) -> None:
        raise ConnectionError("no network")


def test_a_mirror_that_raises_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path, steps=3, mirror=Broken())
    for step in (1, 2, 3):
        recorder.metrics({"step": step})
    recorder.finish("finished", {"state": "finished"})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "finished"
    assert sum("mirror failed" in r.message for r in caplog.records) == 1


def test_a_failure_is_in_the_status_with_its_traceback(tmp_path: Path, recorders: Recorders) -> None:
    recorder = recorders(tmp_path, steps=1)
    try:
        raise KeyError("gone")
    except KeyError as error:
        recorder.finish("failed", {}, error)
    failure = json.loads((tmp_path / "status.json").read_text())["error"]
    assert failure["type"] == "KeyError"
    assert "raise KeyError" in failure["traceback"]


def test_a_resumed_run_cuts_what_the_killed_one_wrote_after_its_checkpoint(
    tmp_path: Path, recorders: Recorders
) -> None:
    first = recorders(tmp_path, steps=9)
    for step in (1, 2, 3):
        first.metrics({"step": step, "time/elapsed_s": 10.0 * step})
    with (tmp_path / "metrics.jsonl").open("a", errors="surrogateescape") as file:
        file.write('7\n{}\n\udcff\n{"step": 4, "lo')  # a bad disk; killed while writing
    first.evaluation({"step": 0, "name": "held_out", "reward": 0.3}, [])
    first.evaluation({"step": 2, "name": "held_out", "reward": 0.5}, [])
    second = recorders(tmp_path, steps=9, resumed_at=2)
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 7, "nothing is cut before it is sure to go on"
    second.update_status(model="x")
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 3, "nor is anything else written"
    second.cut_back()
    assert second.first_evals["held_out"]["reward"] == 0.3
    second.metrics({"step": 3})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert second.elapsed_s >= 20.0


def test_a_resume_that_cannot_even_end_leaves_the_status_of_the_run_before(
    tmp_path: Path, recorders: Recorders, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text('{"state": "running", "step": 9}')

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    second = recorders(tmp_path, steps=9, resumed_at=2)
    monkeypatch.setattr(record, "write_atomic", full)
    second.finish("failed", {})
    assert json.loads((tmp_path / "status.json").read_text()) == {"state": "running", "step": 9}


@pytest.mark.parametrize("before", ["running", "failed"])
def test_a_second_signal_before_a_resume_goes_on(tmp_path: Path, recorders: Recorders, before: str) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": before, "step": 9}))
    recorders(tmp_path, steps=9, resumed_at=2).cut_short(KeyboardInterrupt("now"))
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"]) == ("interrupted" if before == "running" else "failed", 9)


@pytest.mark.parametrize(("steps", "left"), [(4, [0]), (5, [0, 4])])
def test_the_last_evaluation_is_made_again_after_a_resume_at_the_last_step(
    tmp_path: Path, recorders: Recorders, steps: int, left: list[int]
) -> None:
    """And is there once: it comes before the last checkpoint. Of any other checkpoint it is not made again."""
    first = recorders(tmp_path, steps=4)
    first.metrics({"step": 4})
    for step in (0, 4):
        first.evaluation({"step": step, "name": "held_out", "reward": 0.3}, [])
    first.close()
    recorders(tmp_path, steps=steps, resumed_at=4).cut_back()
    assert [line["step"] for line in lines(tmp_path / "evals.jsonl")] == left
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [4]


def test_an_atomic_write_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "half \ud800")
    assert path.read_text() == "old"


def test_what_json_cannot_hold_becomes_null() -> None:
    assert jsonable({"a": [math.inf, -math.inf, math.nan, 1.5], 2: "x"}) == {"a": [None, None, None, 1.5], "2": "x"}
