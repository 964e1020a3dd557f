"""The data behind the page of a sweep."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from grpo.report.arms import Arm, arm_curve, group_arms, over_seeds, scores
from grpo.report.jobs import Job, evaluation, find_jobs, idle, knobs_of, main_evaluation, read_jobs, setting
from grpo.report.page import built_now, clean
from grpo.report.read import Note, text
from grpo.report.stats import Interval, mean_interval, paired_difference, pareto_front

__all__ = ["find_jobs", "sweep_data"]

CURVES = {
    "eval": "evaluation",
    "reward/mean": "reward",
    "entropy": "entropy",
    "kl/sampler": "KL(sampler ‖ policy)",
    "ess": "effective sample size",
    "lag/mean": "mean lag",
    "completion/length_mean": "completion length",
    "grad_norm": "gradient norm",
}
# All pairs are compared up to here; beyond, only with the best arm.
MAX_PAIRED_ARMS = 40


def sweep_data(folder: Path) -> dict[str, Any]:
    """Everything the page shows. Never raises for what the folders hold or lack."""
    jobs = read_jobs(folder)
    knobs, shared = knobs_of(jobs)
    arms = group_arms(jobs, knobs)
    name = main_evaluation(jobs)
    results = [scores(arm, name) for arm in arms]
    means = [mean_interval(list(values.values())) for values in results]
    seconds = [over_seeds(arm, lambda job: job.seconds) for arm in arms]
    costs = [(s.mean, m.mean) if s and m else None for s, m in zip(seconds, means, strict=True)]
    front = pareto_front(costs)
    ranked = [i for i, mean in enumerate(means) if mean]
    best = max(ranked, key=lambda i: means[i].mean, default=None)  # type: ignore[union-attr]
    return {
        "kind": "sweep",
        "name": folder.resolve().name,
        "built": built_now(),
        "command": clean(next((text(job.overview.status.get("command")) for job in jobs), "")),
        "result": f"evaluation {name}" if name is not None else "training reward at the end (no evaluation recorded)",
        "knobs": knobs,
        "shared": list(clean(shared).items())[:40],
        "notes": [asdict(note) for note in _notes(jobs, arms, results)],
        "jobs": [_job(job, arms, name) for job in jobs],
        "arms": [
            {
                "name": arm.name,
                "values": arm.values,
                "seeds": list(arm.jobs),
                "missing": len(arm.others),
                "flags": arm.flags,
                "result": _dict(means[i]),
                "seconds": _dict(seconds[i]),
                "front": front[i],
                **{key: (x := over_seeds(arm, quantity)) and x.mean for key, quantity in QUANTITIES.items()},
            }
            for i, arm in enumerate(arms)
        ],
        "best": best,
        "differences": _differences(results, best),
        "curves": _curves(arms, name),
    }


def _dict(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else asdict(interval)


def _trained_share(job: Job) -> float | None:
    ledger = job.metrics.ledger()
    return ledger["trained"] / ledger["generated"] if ledger and ledger["generated"] else None


# What arms are compared by besides the result and the time; means over seeds.
QUANTITIES: dict[str, Callable[[Job], float | None]] = {
    "tokens_per_s": lambda job: job.metrics.tokens_per_s(),
    "trained_share": _trained_share,
    "idle_trainer": lambda job: idle(job).get("trainer"),
    "idle_sampler": lambda job: idle(job).get("sampler"),
    "lag_mean": lambda job: job.metrics.series.mean("lag/mean"),
    "ess": lambda job: job.metrics.series.mean("ess"),
}


def _job(job: Job, arms: Sequence[Arm], name: str | None) -> dict[str, Any]:
    before, after = evaluation(job, name)
    ledger = job.metrics.ledger()
    error = job.overview.error
    return {
        "path": job.path,
        # A relative link, so that the folder can be moved or sent as a whole.
        "href": f"{quote(job.path)}/report.html" if (job.folder / "report.html").exists() else None,
        "arm": next(i for i, arm in enumerate(arms) if job in arm.others or any(job is j for j in arm.jobs.values())),
        "seed": setting(job, "seed"),
        "overrides": clean(job.overrides),
        "state": job.overview.state,
        "error": clean(f"{error['type']}: {error['message']}")[:500] if error else None,
        "flags": job.flags(),
        "damage": [note.text for note in job.notes if note.level == "error"],
        "step": job.overview.step,
        "steps": job.overview.steps,
        "before": before and asdict(before),
        "after": after and asdict(after),
        "seconds": job.seconds,
        "wall_clock": job.wall_clock,
        "tokens": ledger and ledger["generated"],
        **{key: quantity(job) for key, quantity in QUANTITIES.items()},
    }


def _differences(results: list[dict[str, float]], best: int | None) -> list[dict[str, Any]]:
    """arm b - arm a, paired by seed; the page turns the sign where it needs a - b."""
    pairs = [(a, b) for b in range(len(results)) for a in range(b) if len(results) <= MAX_PAIRED_ARMS or best in (a, b)]
    found = []
    for a, b in pairs:
        difference = paired_difference(results[a], results[b])
        found.append({"a": a, "b": b, "separated": difference.separated, "interval": _dict(difference.interval)})
    return found


def _curves(arms: list[Arm], name: str | None) -> dict[str, Any]:
    keys = list(CURVES) if len(arms) <= 150 else ["eval", "reward/mean"]
    # 150,000 numbers are about a megabyte.
    points = max(20, min(100, 150_000 // max(1, len(arms) * len(keys) * 6)))
    curves = {
        key: {axis: [arm_curve(arm, key, axis, points, name) for arm in arms] for axis in ("step", "seconds")}
        for key in keys
    }
    return {
        key: {"title": CURVES[key], **axes} for key, axes in curves.items() if any(axes["step"]) or any(axes["seconds"])
    }


def _notes(jobs: list[Job], arms: list[Arm], results: list[dict[str, float]]) -> list[Note]:
    notes: list[Note] = []
    if not jobs:
        return [Note("warning", "there is no run in this folder")]
    states = Counter(job.overview.state for job in jobs if not job.finished)
    if states:
        listed = ", ".join(f"{n} {state}" for state, n in states.most_common())
        notes.append(
            Note(
                "warning",
                f"{sum(states.values())} of {len(jobs)} jobs are not finished ({listed}) and are in no mean. If they "
                "ended because of their settings, the means of their arms look better than the settings are.",
            )
        )
    dead = [arm for arm in arms if arm.flags]
    notes += [Note("error", f"dead arm: {arm.name}: {', '.join(arm.flags)}") for arm in dead[:10]]
    if len(dead) > 10:
        notes.append(Note("error", f"and {len(dead) - 10} more dead arms"))
    sizes = {len(values) for values in results if values}
    if len(arms) > 1 and sizes:
        if max(sizes) == 1:
            notes.append(
                Note("warning", "one seed an arm: differences between arms may be chance, and nothing here can tell")
            )
        elif len({frozenset(values) for values in results if values}) > 1:
            notes.append(
                Note(
                    "warning",
                    f"arms have not the same finished seeds ({min(sizes)} to {max(sizes)} of them): their means and "
                    "the Pareto front compare different runs; the paired differences are over common seeds alone",
                )
            )
    revisions = {job.overview.git for job in jobs if job.overview.git}
    if len(revisions) > 1:
        listed = ", ".join(sorted(revisions)[:5])
        notes.append(Note("warning", f"jobs ran from {len(revisions)} different revisions: {listed}"))
    damaged = sum(any(note.level == "error" for note in job.notes) for job in jobs)
    if damaged:
        notes.append(Note("error", f"{damaged} jobs have unreadable records; see the table of jobs"))
    return notes
