"""The line between the jobs of a sweep."""

import pytest
from composed import composed, composed_sweep
from omegaconf import open_dict

from grpo import sweep_progress
from grpo.sweep_progress import SweepProgress, count_jobs, duration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only entry is the time."""
    now = [0.0]
    monkeypatch.setattr(sweep_progress.time, "monotonic", lambda: now[0])
    return now


def job(progress: SweepProgress, clock: list[float], seconds: float, *, failed: bool = False) -> str | None:
    progress.start()
    clock[0] += seconds
    progress.end(failed=failed)
    return progress.line()


def test_the_time_left_is_that_of_finished_jobs_and_the_first_had_to_launch(clock: list[float]) -> None:
    progress = SweepProgress(5)
    assert job(progress, clock, 3.0, failed=True) == "sweep: job 2 of 5 is next; 0 finished, 1 failed"
    assert job(progress, clock, 60.0) == (
        "sweep: job 3 of 5 is next; 1 finished, 1 failed; about 3 min left (60 s a job)"
    )
    assert job(progress, clock, 20.0) == (
        "sweep: job 4 of 5 is next; 2 finished, 1 failed; about 40 s left (20 s a job)"
    )
    progress.start()
    progress.skipped = True
    progress.end(failed=False)
    assert progress.line() is None
    assert (progress.ended, progress.started) == (4, 4)
    assert job(progress, clock, 30.0) is None  # the last one


def test_without_a_total_nothing_is_foretold(clock: list[float]) -> None:
    assert job(SweepProgress(None), clock, 60.0) == "sweep: job 2 is next; 1 finished, 0 failed"


def test_jobs_are_counted_as_hydra_makes_them() -> None:
    assert count_jobs(composed_sweep("staleness")) == 15
    overrides = ["seed=0,1", "loss=choice(grpo,gspo,dapo)", "train.steps=3", "rollout.max_staleness=range(0,4)"]
    config = composed(hydra=True)
    with open_dict(config.hydra):
        config.hydra.overrides.task = overrides
    assert count_jobs(config) == 2 * 3 * 4
    sweep = composed_sweep("staleness")
    with open_dict(sweep.hydra):
        sweep.hydra.overrides.task = ["seed=7"]  # replaces that key's sweep
    assert count_jobs(sweep) == 5
    with open_dict(config.hydra):
        config.hydra.overrides.task = ["loss=glob(*)"]
    assert count_jobs(config) is None


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 99, 100, 5990, 7200)] == ["0 s", "99 s", "2 min", "100 min", "2.0 h"]
