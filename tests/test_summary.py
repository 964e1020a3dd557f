"""The table at the end of a run."""

import contextlib
from pathlib import Path

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
