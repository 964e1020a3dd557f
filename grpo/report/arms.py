"""Arms: the jobs of a sweep that differ in the seed alone, and what their seeds say together.

Only finished jobs enter an arm's numbers. A mean over the jobs that survived is not the mean over all of them, so the
page says how many are missing. Pure functions of `Job`s, no files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.report.jobs import REPLICATE, Job, evaluation, natural, setting
from grpo.report.stats import Interval, mean_interval


@dataclass(slots=True)
class Arm:
    """`values`: knob -> text. `jobs`: replicate (the seed) -> finished job; `others`: jobs in any other state."""

    values: dict[str, str]
    jobs: dict[str, Job]
    others: list[Job]

    @property
    def name(self) -> str:
        return ", ".join(f"{knob}={value}" for knob, value in self.values.items()) or "all jobs"

    @property
    def flags(self) -> list[str]:
        """What is wrong with every one of its finished jobs."""
        flags = [set(job.flags()) for job in self.jobs.values()]
        return sorted(set.intersection(*flags)) if flags else ["no job finished"]


def group_arms(jobs: Sequence[Job], knobs: Sequence[str]) -> list[Arm]:
    """In the order of the knobs' values. Repetitions of one seed stay apart: "0", "0 (2)"."""
    arms: dict[tuple[str, ...], Arm] = {}
    for job in jobs:
        values = {knob: setting(job, knob) for knob in knobs}
        arm = arms.setdefault(tuple(values.values()), Arm(values, {}, []))
        if not job.finished:
            arm.others.append(job)
            continue
        seed = setting(job, REPLICATE)
        again = sum(replicate.partition(" (")[0] == seed for replicate in arm.jobs)
        arm.jobs[f"{seed} ({again + 1})" if again else seed] = job
    return [arms[key] for key in sorted(arms, key=lambda key: [natural(value) for value in key])]


def scores(arm: Arm, name: str | None) -> dict[str, float]:
    """Final result by seed: the last evaluation `name`, or, without evaluations, the reward at the end of training."""
    found = {}
    for seed, job in arm.jobs.items():
        if name is None:
            value = job.metrics.series.mean("reward/mean", 0.9, 1.0)
        else:
            _, after = evaluation(job, name)
            value = None if after is None else after.value
        if value is not None:
            found[seed] = value
    return found


def over_seeds(arm: Arm, quantity: Callable[[Job], float | None]) -> Interval | None:
    return mean_interval([x for job in arm.jobs.values() if (x := quantity(job)) is not None])


Curve = tuple[list[float | None], list[float | None]]


def mean_curve(curves: Sequence[Curve], points: int) -> dict[str, Any] | None:
    """Mean, lowest and highest of several curves over the range that all of them cover; nothing is extrapolated.

    Where all have the same few x the mean is taken there, else at `points` places between, by linear interpolation.
    """
    known = [[(x, y) for x, y in zip(*curve, strict=True) if x is not None and y is not None] for curve in curves]
    known = [sorted(dict(pairs).items()) for pairs in known if pairs]
    if not known:
        return None
    xs = [x for x, _ in known[0]]
    if len(xs) > points or any([x for x, _ in pairs] != xs for pairs in known[1:]):
        start = max(pairs[0][0] for pairs in known)
        stop = min(pairs[-1][0] for pairs in known)
        if start > stop:
            return None
        xs = np.linspace(start, stop, points).tolist() if stop > start else [start]
    ys = np.array([np.interp(xs, [x for x, _ in pairs], [y for _, y in pairs]) for pairs in known])
    mean, low, high = ys.mean(axis=0), ys.min(axis=0), ys.max(axis=0)
    bands = {"lo": _short(low), "hi": _short(high)} if len(known) > 1 else {"lo": None, "hi": None}
    return {"x": _short(xs), "y": _short(mean), "n": len(known), **bands}


def arm_curve(arm: Arm, key: str, axis: str, points: int, eval_name: str | None) -> dict[str, Any] | None:
    """key: "eval" or a key of metrics.jsonl. axis: "step" or "seconds"."""
    curves: list[Curve] = []
    for job in arm.jobs.values():
        if key == "eval":
            evals = job.evals.get(eval_name or "", [])
            xs = [e.step if axis == "step" else job.clock(e.seconds) for e in evals]
            curves.append((xs, [e.value for e in evals]))
        else:
            series = job.metrics.series
            seconds = [job.clock(x) for x in series.values("time/elapsed_s")]
            curves.append((series.values("step") if axis == "step" else seconds, series.values(key)))
    return mean_curve(curves, points)


def _short(values: Any) -> list[float]:
    return [float(f"{x:.5g}") for x in values]
