"""The one line about the whole sweep between its jobs: how many have ended, how, and how long the others may take."""

import time

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig


class SweepProgress:
    """total: jobs of the sweep, None where nobody knows beforehand."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.started = self.finished = self.failed = 0
        self.skipped = False  # the job in hand
        self._since = 0.0
        self._seconds: list[float] = []  # of the jobs that ran to their end here

    @property
    def ended(self) -> int:
        return self.finished + self.failed

    def start(self) -> None:
        """A job begins."""
        self.skipped = False
        self.started += 1
        self._since = time.monotonic()

    def end(self, *, failed: bool) -> None:
        """It has ended."""
        self.failed += failed
        self.finished += not failed
        if not failed and not self.skipped:
            self._seconds.append(time.monotonic() - self._since)

    def line(self) -> str | None:
        """None after the last job, and where nothing was done."""
        if self.skipped or self.ended == self.total:
            return None
        of = "" if self.total is None else f" of {self.total}"
        text = f"sweep: job {self.ended + 1}{of} is next; {self.finished} finished, {self.failed} failed"
        if self._seconds and self.total is not None:
            # the first job launched the servers that the others find running
            later = self._seconds[1:] or self._seconds
            mean = sum(later) / len(later)
            left = duration(mean * (self.total - self.ended))
            text += f"; about {left} left ({duration(mean)} a job)"
        return text


def count_jobs(config: DictConfig) -> int | None:
    """How many jobs Hydra will make of a multirun's configuration; None where only the sweeper knows."""
    sweeper = config.hydra.sweeper
    if "n_trials" in sweeper:  # Optuna
        return int(sweeper.n_trials)
    if not sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
        return None
    words = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
    try:
        overrides = OverridesParser.create().parse_overrides([*words, *config.hydra.overrides.task])
        return sum(map(len, BasicSweeper.split_arguments(overrides, None)))
    except Exception:  # a mistake, which Hydra will name; or glob(), which only Hydra can expand
        return None


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
