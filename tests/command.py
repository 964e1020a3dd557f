"""`python run.py ...` as a process of its own, and a run that is small enough for it: a tiny model, a fake server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from composed import ROOT
from fake_server import FakeServer

TIMEOUT = 120  # seconds; a run takes five on a quiet machine


def start(*arguments: str, folder: Path, **environment: str) -> "subprocess.Popen[str]":
    """Started in `folder`, where modules of the test's own are found too."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    with start(*arguments, folder=folder, **environment) as process:
        return finish(process)


def finish(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    """Wait for the end; a process that does not end is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def small(server: FakeServer) -> list[str]:
    """Overrides of a run of some seconds: 8 completions a step, of at most 6 tokens, rewarded for their length."""
    return [
        f"model.path={server.model_dir}",
        f"rollout.urls=['{server.url}']",
        "rollout.group_size=4",
        "rollout.zero_variance=keep",
        "train.batch_size=8",
        "train.threads=1",
        "data.reward=length",
        "data.max_tokens=6",
        "data.eval_rows=4",
    ]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def load(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
