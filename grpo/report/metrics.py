"""What metrics.jsonl and evals.jsonl say, as the pages need it: one pass, constant memory.

Along the way the lines are checked: steps increase, the token ledger adds up (law 6), no lag is above the bound
(law 1; in `findings`).
"""

import re
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo.report.read import Note, number, read_lines, text
from grpo.report.series import Series

LAG_KEY = re.compile(r"lag_(\d{1,6})/([\w.]+)")
# Kept by step, for as many lags as a chart can hold; all other figures by lag are kept over the whole run.
LAG_CURVES = {"tokens", "kl", "ess", "clip_fraction"}
MAX_LAG_CURVES = 10
TIMELINE_STEPS = 200
TIMELINE_KEYS = (
    "time/elapsed_s",
    "time/step_s",
    "time/wait_rollouts_s",
    "time/train_s",
    "time/sync_s",
    "sampler/open_requests_mean",
    "tokens/generated",
)
ACCOUNTS = ("trained", "masked", "discarded", "in_flight")
# Evaluations are few; this only guards the page's size.
MAX_EVALS = 2000
MAX_EVAL_NAMES = 12


@dataclass(slots=True)
class Metrics:
    series: Series
    lags: dict[int, dict[str, float]] = field(default_factory=dict)  # lag: {"tokens": sum, "kl": token-weighted mean}
    ledger_lines: int = 0  # lines that have all accounts
    ledger_broken: int = 0  # those of them that do not add up
    ledger_broken_step: float | None = None
    timeline: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=TIMELINE_STEPS))
    elapsed_s: float | None = None  # of all parts of a resumed run
    started_s: float = 0.0  # the clock when the first step began: model and server were there
    restarts: list[tuple[float, float]] = field(default_factory=list)  # (first step, seconds before it) of each resume
    sampler_idle_s: float | None = None
    overlap_s: float = 0.0  # generation during training, at least

    def ledger(self) -> dict[str, int] | None:
        """The accounts after the last step, with `missing` = generated - all of them."""
        generated = self.series.last("tokens/generated")
        if generated is None:
            return None
        ledger = {account: int(self.series.last(f"tokens/{account}") or 0) for account in ACCOUNTS}
        return {"generated": int(generated), **ledger, "missing": int(generated) - sum(ledger.values())}

    def time_shares(self) -> dict[str, float]:
        """Seconds of all steps: waiting, training, syncing, other. Empty without time/step_s."""
        total = self.series.total("time/step_s")
        if not total or total < 0:
            return {}
        names = ("wait_rollouts", "train", "sync")
        parts = {name: max(0.0, self.series.total(f"time/{name}_s") or 0.0) for name in names}
        return {**parts, "other": max(0.0, total - sum(parts.values()))}

    def working_s(self) -> float:
        """Waiting, training and syncing: the time that throughput is measured over (no start-up, no evaluation)."""
        return sum(seconds for part, seconds in self.time_shares().items() if part != "other")

    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of `working_s`, over all parts of a resumed run."""
        generated, seconds = self.series.last("tokens/generated"), self.working_s()
        return generated / seconds if generated is not None and seconds else None


def collect_metrics(folder: Path, notes: list[Note], limit: int = 1000) -> Metrics:
    """limit: the most points a curve may have; see `Series`."""
    metrics = Metrics(Series(limit=limit))
    weighted: dict[int, dict[str, list[float]]] = {}  # lag: name: [sum of tokens * value, tokens]
    offset = last_elapsed = 0.0
    last_step: float | None = None
    back: list[float] = []
    for line in read_lines(folder / "metrics.jsonl", notes):
        step = number(line.get("step"))
        if step is not None:
            if last_step is not None and step <= last_step:
                back.append(step)
            last_step = step
        elapsed = number(line.get("time/elapsed_s"))
        if elapsed is not None:
            if elapsed + offset < last_elapsed:
                offset = last_elapsed
                metrics.restarts.append((step if step is not None else -1.0, offset))
            last_elapsed = elapsed + offset
            line["time/elapsed_s"] = last_elapsed
            if not metrics.series.lines:
                metrics.started_s = last_elapsed - (number(line.get("time/step_s")) or 0.0)
        line = _take_lags(line, weighted)
        _check_ledger(line, step, metrics)
        _add_idle(line, metrics)
        metrics.timeline.append([step, *(number(line.get(key)) for key in TIMELINE_KEYS)])
        metrics.series.add(line)
    metrics.elapsed_s = last_elapsed or None
    metrics.lags = {
        lag: {name: total if name == "tokens" else total / tokens for name, (total, tokens) in names.items() if tokens}
        for lag, names in sorted(weighted.items())
    }
    if back:
        notes.append(
            Note(
                "error",
                f"metrics.jsonl: the step does not increase on {len(back):,} line{'s' * (len(back) > 1)} "
                f"(the first is step {back[0]:g}); sums over steps count such steps twice",
            )
        )
    if metrics.restarts:
        steps = ", ".join(f"{step:g}" for step, _ in metrics.restarts[:5])
        notes.append(
            Note("note", f"the clock started again at step {steps} (resumed): wall-clock axes add up the parts")
        )
    for key, (count, first) in list(metrics.series.non_finite.items())[:10]:
        if key in metrics.series.keys or key in ("loss", "grad_norm"):  # a key that is always null is no number at all
            lines = f"{count:,} line" + "s" * (count > 1)
            notes.append(Note("warning", f"{key} is no finite number on {lines}, first at step {text(first)}"))
    if left_out := len(metrics.series.keys_left_out):
        notes.append(Note("note", f"metrics.jsonl has {left_out:,} further keys that are not shown"))
    return metrics


def _take_lags(line: dict[str, Any], weighted: dict[int, dict[str, list[float]]]) -> dict[str, Any]:
    """Add figures by lag to their sums; the line without those that are not kept by step."""
    kept = {}
    for key, value in line.items():
        match = LAG_KEY.fullmatch(key) if key.startswith("lag_") else None
        if not match:
            kept[key] = value
            continue
        lag, name = int(match[1]), match[2]
        tokens, x = number(line.get(f"lag_{lag}/tokens")), number(value)
        if tokens and tokens > 0 and x is not None:
            names = weighted.setdefault(lag, {})
            if name.endswith(("_min", "_max")):
                extreme = min if name.endswith("_min") else max
                names[name] = [extreme(x, names.get(name, [x])[0]), 1.0]
            else:
                sums = names.setdefault(name, [0.0, 0.0])
                sums[0] += x if name == "tokens" else tokens * x
                sums[1] += tokens
        if name in LAG_CURVES and lag in list(weighted)[:MAX_LAG_CURVES]:
            kept[key] = value
    return kept


def _add_idle(line: dict[str, Any], metrics: Metrics) -> None:
    idle, step_s = number(line.get("sampler/idle_fraction")), number(line.get("time/step_s"))
    if idle is None or step_s is None:
        return
    metrics.sampler_idle_s = (metrics.sampler_idle_s or 0.0) + idle * step_s
    # Two intervals of a step overlap by at least what their lengths exceed it.
    busy, train = (1 - idle) * step_s, number(line.get("time/train_s")) or 0.0
    metrics.overlap_s += max(0.0, busy + train - step_s)


def _check_ledger(line: dict[str, Any], step: float | None, metrics: Metrics) -> None:
    values = [number(line.get(f"tokens/{name}")) for name in ("generated", *ACCOUNTS)]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return
    metrics.ledger_lines += 1
    if known[0] != sum(known[1:]):
        metrics.ledger_broken += 1
        if metrics.ledger_broken == 1:
            metrics.ledger_broken_step = step


@dataclass(slots=True, frozen=True)
class Eval:
    """One evaluation: accuracy or mean reward, with its 95 % interval where the run recorded one."""

    name: str
    step: float | None
    seconds: float | None
    value: float
    low: float | None
    high: float | None
    n: int | None


def to_eval(line: dict[str, Any]) -> Eval | None:
    """None for a line without a value."""
    keys = ("accuracy", "reward", "mean_reward", "reward/mean")
    value = next((x for key in keys if (x := number(line.get(key))) is not None), None)
    if value is None:
        return None
    n = number(line.get("n"))
    return Eval(
        name=text(line.get("name"))[:200] or "eval",
        step=number(line.get("step")),
        seconds=number(line.get("time/elapsed_s")),
        value=value,
        low=number(line.get("low")),
        high=number(line.get("high")),
        n=None if n is None else int(n),
    )


def collect_evals(folder: Path, notes: list[Note], restarts: list[tuple[float, float]]) -> dict[str, list[Eval]]:
    """Evaluations by name, in file order. restarts: `Metrics.restarts`, to continue the clock of a resumed run."""
    evals: dict[str, list[Eval]] = {}
    part, last_seconds = 0, 0.0
    for line in read_lines(folder / "evals.jsonl", notes):
        found = to_eval(line)
        if not found:
            continue
        if found.seconds is not None and restarts:
            # The first evaluation after a resume may be at the step that was saved, before the first line of metrics.
            part += found.seconds < last_seconds
            part = min(len(restarts), max(part, sum(step <= (found.step or 0) for step, _ in restarts)))
            last_seconds = found.seconds
            found = replace(found, seconds=found.seconds + (restarts[part - 1][1] if part else 0.0))
        evals.setdefault(found.name, []).append(found)
    if len(evals) > MAX_EVAL_NAMES:
        notes.append(Note("note", f"{len(evals) - MAX_EVAL_NAMES} of {len(evals)} evaluation sets are not shown"))
        evals = dict(list(evals.items())[:MAX_EVAL_NAMES])
    for name, list_ in evals.items():
        most = MAX_EVALS // len(evals)
        if len(list_) > most:
            stride = -(-len(list_) // most)
            notes.append(Note("note", f"of {len(list_):,} evaluations {name!r} each {stride}th is shown, and the last"))
            evals[name] = [*list_[:-1:stride], list_[-1]]
    return evals
