"""Listing and comparing runs: `python -m grpo.runs [ROOT] [filters]` and `python -m grpo.runs diff A B`.

Only small files are read (status.json, summary.json, evals.jsonl and Hydra's), so thousands of runs take seconds. No
torch, no colours, plain text; `--json` for programs.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from grpo.report.jobs import natural
from grpo.report.metrics import Eval, collect_evals
from grpo.report.overview import Overview, before_and_after, is_run, read_overview
from grpo.report.page import printable
from grpo.report.read import flatten, read_config

STALE_S = 600  # "running" without a sign of life for so long is doubted
SORTS = ("age", "eval", "name", "state")


@dataclass(slots=True)
class Listed:
    """One run of the list. `silent_s`: since its records last changed."""

    overview: Overview
    name: str
    before: Eval | None
    after: Eval | None
    silent_s: float

    @property
    def state(self) -> str:
        return "running?" if self.overview.state == "running" and self.silent_s > STALE_S else self.overview.state

    @property
    def age_s(self) -> float:
        started = self.overview.started
        return (datetime.now(UTC) - started).total_seconds() if started else self.silent_s

    def value(self) -> float | None:
        last = self.after or self.before
        return None if last is None else last.value


def find_runs(root: Path) -> list[Path]:
    """Run folders below a folder, at any depth; nothing inside a run is looked at."""
    found: list[Path] = []
    for place, folders, _ in os.walk(root):
        folder = Path(place)
        if is_run(folder):
            found.append(folder)
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def read_listed(folder: Path, root: Path) -> Listed:
    overview = read_overview(folder, [])
    before, after = before_and_after(overview, collect_evals(folder, [], []))
    times = [path.stat().st_mtime for name in ("status.json", "metrics.jsonl") if (path := folder / name).exists()]
    silent = datetime.now(UTC).timestamp() - max(times) if times else 0.0
    name = folder.relative_to(root).as_posix() if folder != root else folder.resolve().name
    return Listed(overview, name, before, after, silent)


def matches(run: Listed, words: Sequence[str], state: str | None) -> bool:
    """Every word must occur in the name, the overrides or the config groups ("loss=gspo"); words are joined by and."""
    if state is not None and run.state.rstrip("?") != state:
        return False
    pairs = {**run.overview.choices, **run.overview.overrides}
    haystack = " ".join([run.name, *(f"{key}={value}" for key, value in pairs.items())]).lower()
    return all(word.lower() in haystack for word in words)


def sort_key(run: Listed, by: str) -> Any:
    if by == "eval":
        value = run.value()
        return (value is None, -(value or 0.0))
    if by == "state":
        return (run.state, run.age_s)
    return natural(run.name) if by == "name" else run.age_s


def age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def rate(before: Eval | None, after: Eval | None) -> str:
    return " -> ".join(f"{e.value:.3f}" for e in (before, after) if e) or "-"


def rows(runs: Sequence[Listed]) -> list[list[str]]:
    table = [["state", "age", "step", "model", "loss", "evaluation", "run", "overrides"]]
    for run in runs:
        overview = run.overview
        steps = f"{_or_dash(overview.step)}/{_or_dash(overview.steps)}"
        given = " ".join(f"{k}={v}" for k, v in overview.overrides.items() if k not in ("model", "loss"))
        groups = [overview.choices.get(key) or overview.overrides.get(key) or "-" for key in ("model", "loss")]
        table.append([run.state, age(run.age_s), steps, *groups, rate(run.before, run.after), run.name, given])
    return [[printable(cell) for cell in row] for row in table]


def print_columns(table: Sequence[Sequence[str]], width: int | None) -> None:
    """Left-aligned columns; lines are cut at `width` characters."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        line = "  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        print(line if width is None or len(line) <= width else line[: width - 1] + "…")


def as_json(run: Listed) -> dict[str, Any]:
    overview = run.overview
    return {
        "folder": str(overview.folder),
        "state": run.state,
        "started": overview.status.get("started"),
        "step": overview.step,
        "steps": overview.steps,
        "choices": overview.choices,
        "overrides": overview.overrides,
        "before": run.before and run.before.value,
        "after": run.after and run.after.value,
    }


# ---- diff ----


def facts(folder: Path) -> dict[str, dict[str, str]]:
    """{"config": ..., "environment": ..., "result": ...}, flat, as text."""
    overview = read_overview(folder, [])
    environment = {key: overview.status.get(key) for key in ("git", "python", "packages", "hardware")}
    summary = {k: v for k, v in overview.summary.items() if k not in ("eval", "time", "state", "step", "steps")}
    result: dict[str, Any] = {
        "state": overview.state,
        "step": f"{_or_dash(overview.step)}/{_or_dash(overview.steps)}",
        "seconds": overview.seconds,
        **flatten(summary),
    }
    for name, list_ in (collect_evals(folder, [], []) or _pairs(overview)).items():
        for when, e in (("first", list_[0]), ("last", list_[-1])):
            interval = "" if e.low is None or e.high is None else f" [{e.low:.3f}, {e.high:.3f}]"
            result[f"evaluation {name}, {when}"] = f"{e.value:.3f}{interval} at step {_or_dash(e.step)}"
    config = {key: value for key, value in flatten(read_config(folder, [])).items() if not key.startswith("hydra.")}
    return {
        "config": {key: _show(value) for key, value in {**overview.choices, **config}.items()},
        "environment": {key: _show(value) for key, value in flatten(environment).items()},
        "result": {key: _show(value) for key, value in result.items()},
    }


def _pairs(overview: Overview) -> dict[str, list[Eval]]:
    return {name: [e for e in pair if e] for name, pair in overview.evals().items() if any(pair)}


def diff(a: Path, b: Path) -> list[tuple[str, list[list[str]]]]:
    """Sections of (key, value in A, value in B); config and environment hold only what differs."""
    left, right = facts(a), facts(b)
    sections = []
    for name in left:
        keys = list(dict.fromkeys([*left[name], *right[name]]))
        pairs = [[key, left[name].get(key, "-"), right[name].get(key, "-")] for key in keys]
        sections.append((name, [pair for pair in pairs if name == "result" or pair[1] != pair[2]]))
    return sections


def print_diff(a: Path, b: Path) -> None:
    print(f"A  {a}\nB  {b}")
    for name, pairs in diff(a, b):
        print(f"\n{name}" if pairs else f"\n{name}: no difference")
        if pairs:
            print_columns([["", "A", "B"], *([printable(cell) for cell in pair] for pair in pairs)], None)


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value, default=str)


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# ---- command line ----


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _diff_command(arguments[1:]) if arguments[:1] == ["diff"] else _list_command(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        return 0


def _diff_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.runs diff", description="Config, environment and results.")
    parser.add_argument("a", type=Path, metavar="A")
    parser.add_argument("b", type=Path, metavar="B")
    options = parser.parse_args(arguments)
    for folder in (options.a, options.b):
        if not is_run(folder):
            raise ValueError(f"{folder}: not a run folder (no status.json, metrics.jsonl or .hydra/)")
    print_diff(options.a, options.b)
    return 0


def _list_command(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.runs", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path("outputs"), help="default: outputs")
    parser.add_argument("--match", nargs="+", default=[], metavar="WORD", help="in the name, an override or a group")
    parser.add_argument("--state", choices=("running", "finished", "failed", "interrupted", "unknown"))
    parser.add_argument("--sort", choices=SORTS, default="age", help="age: newest first; eval: best first")
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if not options.root.is_dir():
        raise ValueError(f"{options.root}: no such folder")
    runs = [read_listed(folder, options.root) for folder in find_runs(options.root)]
    found = [run for run in runs if matches(run, options.match, options.state)]
    found.sort(key=lambda run: sort_key(run, options.sort))
    shown = found[: options.limit]
    if options.json:
        for run in shown:
            print(json.dumps(as_json(run)))
        return 0
    if shown:
        print_columns(rows(shown), shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    print(f"{len(shown)} of {len(runs)} runs in {options.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
