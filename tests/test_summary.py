"""The table at the end of a run."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from grpo.record import Recorder
from grpo.summary import print_table, summarize


@pytest.mark.parametrize(
    ("resumed_at", "told"),
    [(None, "12 of 12 in 3.0 s"), (7, "12 of 12, 5 of them in the 3.0 s since step 7 was resumed")],
)
def test_the_seconds_are_those_of_the_steps_that_were_made_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], resumed_at: int | None, told: str
) -> None:
    with contextlib.closing(Recorder(tmp_path, steps=12, resumed_at=resumed_at)) as recorder:
        recorder.status["step"] = 12
        print_table(summarize(recorder, None, state="finished", reason="", seconds=3.0), tmp_path, None)
    assert f"\nsteps   {told}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "told"),
    [(0, "0.316 [0.263, 0.376] (one evaluation)"), (8, "0.316 [0.263, 0.376] -> 0.500 [0.400, 0.600]")],
)
def test_one_evaluation_is_no_before_and_after(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, told: str
) -> None:
    first: dict[str, Any] = {"step": 0, "reward": 0.316, "low": 0.263, "high": 0.376}
    last = first if step == 0 else {"step": step, "reward": 0.5, "low": 0.4, "high": 0.6}
    with contextlib.closing(Recorder(tmp_path, steps=12, resumed_at=None)) as recorder:
        summary = summarize(recorder, None, state="failed", reason="", seconds=3.0)
        print_table(summary | {"eval": {"held_out": {"before": first, "after": last}}}, tmp_path, None)
    assert f"\nheld_out  {told}\n" in capsys.readouterr().out
