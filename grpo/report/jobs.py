"""The jobs of a sweep, one record each: what was varied, how it ended, its numbers and its curves."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.report.metrics import Eval, Metrics, collect_evals, collect_metrics
from grpo.report.overview import Overview, before_and_after, idle_shares, is_run, read_overview
from grpo.report.read import Note, lookup, read_config

# Not knobs: what tells repetitions of one arm apart, or only names things.
REPLICATE = "seed"
NOT_KNOBS = {REPLICATE, "name", "resume"}
CURVE_POINTS = 200  # of one job
MAX_DEPTH = 3


@dataclass(slots=True, eq=False)
class Job:
    folder: Path
    path: str  # below the sweep's folder
    overview: Overview
    config: dict[str, Any]
    metrics: Metrics
    evals: dict[str, list[Eval]]
    notes: list[Note]
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.overview.state == "finished"

    @property
    def seconds(self) -> float | None:
        """From the beginning of the first step to the end of the last one, evaluations between them included.

        Not from the start of the run: the first job of a sweep may start the server that the others find running.
        """
        return self.metrics.elapsed_s and self.metrics.elapsed_s - self.metrics.started_s

    @property
    def wall_clock(self) -> float | None:
        """From the start of the run to its end."""
        return self.overview.seconds or self.metrics.elapsed_s

    def clock(self, seconds: float | None) -> float | None:
        """A moment of the run's clock on the clock of `seconds`; 0 for the evaluation before the first step."""
        return None if seconds is None else max(0.0, seconds - self.metrics.started_s)

    def flags(self) -> list[str]:
        """Reasons why the numbers of this job say nothing about its knobs."""
        series = self.metrics.series
        found = []
        if not series.lines:
            return ["no step"]
        if 0 in (series.highest("grad_norm"), series.highest("lr"), series.highest("update_size")):
            found.append("parameters did not move")
        if series.last("tokens/trained") == 0:
            found.append("nothing trained")
        elif series.highest("reward/std") == 0:
            found.append("all rewards equal")
        return found


def find_jobs(folder: Path) -> list[Path]:
    """Folders of runs below a folder, in the order of their numbers (2 before 10)."""
    found: list[Path] = []

    def search(parent: Path, depth: int) -> None:
        try:
            children = [child for child in parent.iterdir() if child.is_dir() and not child.name.startswith(".")]
        except OSError:
            return
        for child in children:
            if is_run(child):
                found.append(child)
            elif depth < MAX_DEPTH:
                search(child, depth + 1)

    search(folder, 1)
    return sorted(found, key=lambda path: natural(path.relative_to(folder).as_posix()))


def read_jobs(folder: Path) -> list[Job]:
    jobs = []
    for path in find_jobs(folder):
        notes: list[Note] = []
        overview = read_overview(path, notes)
        metrics = collect_metrics(path, notes, limit=CURVE_POINTS)
        jobs.append(
            Job(
                folder=path,
                path=path.relative_to(folder).as_posix(),
                overview=overview,
                config=read_config(path, notes),
                metrics=metrics,
                evals=collect_evals(path, notes, metrics.restarts),
                notes=notes,
                overrides={key.lstrip("+~"): value for key, value in overview.overrides.items()},
            )
        )
    return jobs


def knobs_of(jobs: list[Job]) -> tuple[list[str], dict[str, str]]:
    """(keys whose value differs between jobs, in the order they were given; the overrides that all jobs share).

    A job without an override has the config's value, so `loss.clip_low=0.2` beside the default 0.2 is no difference.
    """
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    values = {key: {setting(job, key) for job in jobs} for key in keys}
    knobs = [key for key in keys if len(values[key]) > 1 and key not in NOT_KNOBS and not key.startswith("hydra.")]
    shared = {key: next(iter(values[key])) for key in keys if len(values[key]) == 1}
    return knobs, shared


def setting(job: Job, key: str) -> str:
    """A job's value of a key, as text."""
    if key in job.overrides:
        return job.overrides[key]
    chosen: Any = job.overview.choices.get(key)
    found = lookup(job.config, key)
    if chosen is None and found is not None and not isinstance(found, Mapping):
        chosen = found
    return "default" if chosen is None else str(chosen).lower() if isinstance(chosen, bool) else str(chosen)


def natural(value: str) -> list[tuple[int, float, str]]:
    """Sort key: numbers by size, also with exponents, before text."""
    pieces = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", value)
    return [(0, float(piece), "") if i % 2 else (1, 0.0, piece) for i, piece in enumerate(pieces) if piece]


def evaluation(job: Job, name: str | None) -> tuple[Eval | None, Eval | None]:
    """(before, after) of the evaluation that the sweep compares."""
    return before_and_after(job.overview, job.evals, name) if name is not None else (None, None)


def main_evaluation(jobs: list[Job]) -> str | None:
    """The evaluation to compare by: the first one of the first job that has any."""
    for job in jobs:
        names = job.evals or job.overview.evals()
        if names and any(before_and_after(job.overview, job.evals)):
            return next(iter(names))
    return None


def idle(job: Job) -> dict[str, float]:
    return idle_shares(job.overview, job.metrics)
