"""The data behind the page of one run."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo import token_record
from grpo.report.findings import RULES, Facts, find
from grpo.report.metrics import Eval, collect_evals, collect_metrics
from grpo.report.overview import Overview, before_and_after, idle_shares, read_overview
from grpo.report.page import built_now, clean, to_json
from grpo.report.read import Note, lookup, number, read_config, text
from grpo.report.rollouts import collect_rollouts
from grpo.report.tokens import add_traces

# The page stays under 3 MB: these for curves and rollouts, at most 0.3 MB for the rest.
SERIES_BYTES = 1_200_000
ROLLOUT_BYTES = 1_400_000
TRACE_BYTES = 500_000  # of them for tokens, where they are recorded
LAG_FIGURES = ("tokens", "ratio_mean", "ratio_min", "ratio_max", "kl", "ess", "clip_fraction")
MAX_LAGS = 200


def run_data(folder: Path) -> dict[str, Any]:
    """Everything the page shows, ready for `page.render`. Never raises for what the folder holds or lacks."""
    notes: list[Note] = []
    overview = read_overview(folder, notes)
    config = read_config(folder, notes)
    metrics = collect_metrics(folder, notes)
    evals = collect_evals(folder, notes, metrics.restarts)
    budget = ROLLOUT_BYTES - (TRACE_BYTES if (folder / token_record.FOLDER).is_dir() else 0)
    sample = collect_rollouts(folder, notes, budget)
    traces = add_traces(folder, sample.groups, notes, TRACE_BYTES)
    files = ("status.json", "metrics.jsonl", "rollouts.jsonl")
    notes += [Note("note", f"there is no {name}") for name in files if not (folder / name).exists()]
    series = metrics.series.columns()
    while len(to_json(series)) > SERIES_BYTES and len(metrics.series.points) > 1:
        metrics.series.halve()
        series = metrics.series.columns()
    if metrics.series.width > 1:
        notes.append(
            Note(
                "note",
                f"curves of {metrics.series.lines:,} steps: a point is the mean of {metrics.series.width} steps, its "
                "band goes from their lowest to their highest value; metrics.jsonl has every step",
            )
        )
    if len(metrics.lags) > MAX_LAGS:
        notes.append(Note("note", f"{len(metrics.lags) - MAX_LAGS} of {len(metrics.lags)} lags are not shown"))
    before, after = before_and_after(overview, evals)
    ledger = metrics.ledger()
    seconds = overview.seconds or metrics.elapsed_s
    idle = idle_shares(overview, metrics)
    facts = Facts(metrics, next(iter(evals.values()), []), sample.counts, config, idle)
    return {
        "kind": "run",
        "name": folder.resolve().name,
        "built": built_now(),
        "status": _status(overview),
        "seconds": seconds,
        "overrides": [(key[:100], value[:300]) for key, value in list(overview.overrides.items())[:100]],
        "choices": [(key[:100], value[:100]) for key, value in list(overview.choices.items())[:40]],
        "environment": _environment(overview),
        "config": clean(_config_text(folder)),
        "headline": {
            "before": before and asdict(before),
            "after": after and asdict(after),
            "tokens_per_s": metrics.tokens_per_s(),
            "working_s": metrics.working_s(),
        },
        "findings": [asdict(finding) for finding in find(facts)],
        "rules": len(RULES),
        "notes": [asdict(note) for note in notes],
        "series": series,
        "evals": {name: [_unnamed(item) for item in items] for name, items in evals.items()},
        "lags": {
            lag: {name: figures[name] for name in LAG_FIGURES if name in figures}
            for lag, figures in list(metrics.lags.items())[:MAX_LAGS]
        },
        "bound": facts.max_staleness,
        "max_grad_norm": number(lookup(config, "train.max_grad_norm")),
        "timeline": list(metrics.timeline),
        "time": metrics.time_shares(),
        "whole_time": _whole_time(overview),
        "overlap_s": metrics.overlap_s if metrics.sampler_idle_s is not None else None,
        "idle": idle,
        "ledger": ledger,
        "ledger_broken": metrics.ledger_broken,
        "ledger_lines": metrics.ledger_lines,
        "counts": {
            "completions": sample.counts.completions,
            "groups": sample.counts.groups,
            "zero_variance": sample.counts.zero_variance,
            "outcomes": dict(sample.counts.outcomes.most_common(60)),
            "outcome_tokens": dict(sample.counts.outcome_tokens.most_common(60)),
        },
        "groups": sample.groups,
        "rollout_rows": sample.rows,
        "traces": traces and {"rows": traces.completions, "special": sorted(traces.special), "scale": traces.scale},
    }


def _unnamed(evaluation: Eval) -> dict[str, Any]:
    return {key: value for key, value in asdict(evaluation).items() if key != "name"}


def _status(overview: Overview) -> dict[str, Any]:
    started = overview.started
    return {
        "state": overview.state,
        "step": overview.step,
        "steps": overview.steps,
        "started": started and started.strftime("%Y-%m-%d %H:%M %Z"),
        "git": overview.git,
        "command": clean(text(overview.status.get("command")))[:4000],
        "error": clean(overview.error),
    }


def _whole_time(overview: Overview) -> dict[str, float]:
    """Seconds of the run by part, set-up and evaluation included, as summary.json has them."""
    parts = overview.summary.get("time")
    if not isinstance(parts, dict):
        return {}
    # The model loads while the server starts: it is not on the clock.
    known = {key[:40]: x for key, value in parts.items() if key != "load_model" and (x := number(value)) and x > 0}
    return dict(list(known.items())[:14])


def _environment(overview: Overview) -> list[tuple[str, str]]:
    """Flat rows: revision, Python, packages, hardware, whatever a recorder put there."""
    rows = []
    for key in ("git", "python", "packages", "hardware"):
        value = clean(overview.status.get(key))
        if isinstance(value, dict):
            rows += [(f"{key} {name}"[:100], text(item)[:200]) for name, item in list(value.items())[:60]]
        elif value is not None:
            rows.append((key, text(value)[:200]))
    return rows


def _config_text(folder: Path) -> str:
    try:
        return (folder / ".hydra" / "config.yaml").read_text("utf-8", errors="replace")
    except OSError:
        return ""
