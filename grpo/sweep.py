"""What a multirun needs around its jobs: skip what is finished, each failure in its own folder, a table at the end.

Hydra runs the jobs in one process and raises the first failure after the last job; `on_multirun_end` is not called
then. So the sweep's folder is noted at its start, and `summary()` reads the job folders when everything is over.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

_folder: list[Path] = []


class NoteFolder(Callback):
    """Hydra's callback (conf/config.yaml): remembers where the sweep of this process is."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _folder.append(Path(config.hydra.sweep.dir).resolve())


def finished(folder: Path, overrides: list[str]) -> dict[str, Any] | None:
    """The summary of a job that has finished before in this folder, with these overrides; None if it is to be run.

    Raises ValueError when the folder holds a job with other overrides: its numbers would be taken for this one's.
    """
    status = _read(folder / "status.json")
    if not status or status.get("state") == "running":
        return None
    if status.get("overrides") != overrides:
        raise ValueError(
            f"{folder}: holds a job with other overrides ({status.get('overrides')}); choose another hydra.sweep.dir"
        )
    return _read(folder / "summary.json") if status["state"] == "finished" else None


def refuse(folder: Path, overrides: list[str], error: Exception) -> None:
    """Leave a job's mistake in its own folder."""
    from grpo.record import Recorder

    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, steps=0, facts={"overrides": overrides})
    recorder.finish("failed", {"state": "failed", "reason": str(error), "eval": {}}, error)


@contextlib.contextmanager
def summary() -> Iterator[None]:
    """After the jobs: a table of all of them and the sweep's report; exit status 1 if one has failed."""
    try:
        yield
    except Exception as error:
        if not _folder:
            raise
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
    if _folder:
        failed = print_table(_folder[-1])
        if failed:
            sys.exit(1)


def print_table(folder: Path) -> int:
    """One line a job; returns how many did not finish."""
    table = Table(box=None, pad_edge=False)
    for column in ("job", "state", "before", "after", "seconds", "overrides"):
        table.add_column(column)
    bad = 0
    jobs = sorted((p for p in folder.iterdir() if p.is_dir() and (p / "status.json").exists()), key=_number)
    for job in jobs:
        status, result = _read(job / "status.json"), _read(job / "summary.json")
        state = status.get("state", "unknown")
        bad += state != "finished"
        first: dict[str, Any] = next(iter(result.get("eval", {}).values()), {})
        table.add_row(
            job.name,
            state,
            *(f"{first[when]['reward']:.3f}" if when in first else "-" for when in ("before", "after")),
            f"{result['seconds']:.0f}" if "seconds" in result else "-",
            " ".join(status.get("overrides", [])),
        )
    if not jobs:
        return 0
    console = Console()
    console.print(table, highlight=False, soft_wrap=True)
    from grpo import report

    console.print(f"report  {report.build_sweep(folder)}", highlight=False, soft_wrap=True)
    return bad


def _number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdigit() else 1 << 30, path.name)


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content
