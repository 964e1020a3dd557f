"""What a run is and how it ended, in a few fields: for the head of its page, a row of a sweep, and `grpo.runs`.

Cheap on purpose (status.json, summary.json, two small YAML files; no .jsonl file), so that thousands can be listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.report.metrics import Eval, Metrics, to_eval
from grpo.report.read import Note, number, read_choices, read_json, read_overrides, text

MARKS = ("status.json", "metrics.jsonl", ".hydra")


@dataclass(slots=True)
class Overview:
    """`state` is "unknown" where status.json is absent or unreadable."""

    folder: Path
    state: str
    status: dict[str, Any]
    summary: dict[str, Any]
    overrides: dict[str, str]
    choices: dict[str, str]

    @property
    def step(self) -> int | None:
        return _whole(self.status.get("step"))

    @property
    def steps(self) -> int | None:
        return _whole(self.status.get("steps"))

    @property
    def started(self) -> datetime | None:
        return _moment(self.status.get("started"))

    @property
    def seconds(self) -> float | None:
        """From start to end as status.json has them, set-up included."""
        ended = _moment(self.status.get("ended"))
        return (ended - self.started).total_seconds() if ended and self.started else None

    @property
    def git(self) -> str:
        """ "807452b", or "807452b + local changes"."""
        git = self.status.get("git")
        if not isinstance(git, Mapping):
            return text(git)[:60]
        return text(git.get("revision"))[:7] + (" + local changes" if git.get("dirty") else "")

    @property
    def error(self) -> dict[str, str] | None:
        error = self.status.get("error")
        if not error:
            return None
        if not isinstance(error, Mapping):
            return {"type": "error", "message": text(error), "traceback": ""}
        return {key: text(error.get(key)) for key in ("type", "message", "traceback")}

    def evals(self) -> dict[str, tuple[Eval | None, Eval | None]]:
        """(before, after) by name, from summary.json."""
        found = self.summary.get("eval")
        pairs = {}
        for name, lines in found.items() if isinstance(found, Mapping) else ():
            if isinstance(lines, Mapping):
                pairs[str(name)] = (_eval(name, lines.get("before")), _eval(name, lines.get("after")))
        return pairs


def read_overview(folder: Path, notes: list[Note]) -> Overview:
    status = read_json(folder / "status.json", notes)
    return Overview(
        folder=folder,
        state=text(status.get("state"))[:40] or "unknown",
        status=status,
        summary=read_json(folder / "summary.json", notes),
        overrides=read_overrides(folder, notes) or _overrides(status),
        choices=read_choices(folder),
    )


def _overrides(status: Mapping[str, Any]) -> dict[str, str]:
    """The recorder's copy, for a job that was refused before Hydra's files were there."""
    items = status.get("overrides")
    texts = [text(item) for item in items] if isinstance(items, list) else []
    return {key: value for key, _, value in (item.partition("=") for item in texts)}


def is_run(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


def before_and_after(
    overview: Overview, evals: Mapping[str, list[Eval]], name: str | None = None
) -> tuple[Eval | None, Eval | None]:
    """The first and the last evaluation of one name (default: the first there is); the last is None where it is the
    only one. evals.jsonl has them all, also those before a resume; summary.json stands in for it.
    """
    pairs = {key: (list_[0], list_[-1]) for key, list_ in evals.items()} or overview.evals()
    before, after = pairs.get(name, (None, None)) if name is not None else next(iter(pairs.values()), (None, None))
    return before, None if before == after else after


def idle_shares(overview: Overview, metrics: Metrics) -> dict[str, float]:
    """Share of the steps' time that the trainer waited for rollouts, and of all time since the first step that the
    sampler had no open request (without a summary: of the steps' time)."""
    recorded = overview.summary.get("idle")
    shares = {}
    if isinstance(recorded, Mapping):
        shares = {who: x for who in ("trainer", "sampler") if (x := number(recorded.get(who))) is not None}
    time = metrics.time_shares()
    if time and metrics.working_s():
        shares["trainer"] = time["wait_rollouts"] / metrics.working_s()
        # The summary's is exact, evaluations between the steps included, but it is of the part since the last resume.
        whole = "sampler" in shares and overview.summary.get("resumed_at") is None
        if metrics.sampler_idle_s is not None and not whole:
            shares["sampler"] = metrics.sampler_idle_s / sum(time.values())
    return shares


def _eval(name: str, line: Any) -> Eval | None:
    return to_eval({"name": name, **line}) if isinstance(line, Mapping) else None


def _whole(value: Any) -> int | None:
    x = number(value)
    return None if x is None else int(x)


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
