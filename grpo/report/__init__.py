"""Reports: run folder or sweep folder -> one self-contained report.html.

    python -m grpo.report outputs/<run or sweep>

Only the files of DESIGN section 5 are read; no torch, no config objects, no network. Both functions report what is
there: missing, half-written or damaged files end up as notes on the page, never as an exception. What they do raise
is OSError, when the page itself cannot be written.
"""

from pathlib import Path

from grpo.report.overview import is_run
from grpo.report.page import render, write
from grpo.report.run import run_data
from grpo.report.sweep import find_jobs, sweep_data

__all__ = ["build", "build_run", "build_sweep"]


def build_run(folder: Path) -> Path:
    """Write `report.html` of one run and return its path."""
    data = run_data(folder)
    return write(folder / "report.html", render(data, f"{data['name']} · run"))


def build_sweep(folder: Path) -> Path:
    """Write `report.html` over the jobs below a folder and return its path."""
    data = sweep_data(folder)
    return write(folder / "report.html", render(data, f"{data['name']} · sweep"))


def build(folder: Path) -> Path:
    """The right one of the two. ValueError for a folder that holds neither a run nor runs."""
    if is_run(folder):
        return build_run(folder)
    if find_jobs(folder):
        return build_sweep(folder)
    raise ValueError(f"{folder}: no run (status.json, metrics.jsonl, .hydra/) and no folders of runs in it")
