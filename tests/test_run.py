"""`python run.py` with the real vLLM, from the command line to the last process: what a user gets."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]
pytest.importorskip("vllm")

ROOT = Path(__file__).parent.parent


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """`python run.py` in a session of its own, with its run folder at `folder`."""
    command = [sys.executable, "run.py", f"hydra.run.dir={folder}", *overrides]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def status(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "status.json").read_text())  # type: ignore[no-any-return]


def mentions(folder: Path) -> list[int]:
    """Living processes that were started for this run folder: its name is in the environment of every server."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"GRPO_TEST_RUN={folder}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
    return found


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "run"
    monkeypatch.setenv("GRPO_TEST_RUN", str(folder))
    yield folder
    for pid in mentions(folder):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


def left_alone(folder: Path, seconds: float = 20.0) -> list[int]:
    """Processes of the run that are still there after so long."""
    deadline = time.monotonic() + seconds
    while (left := mentions(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def wait_for_steps(process: subprocess.Popen[str], folder: Path, steps: int) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, "no step within 200 s"
        time.sleep(0.05)


def test_the_default_run_learns_and_leaves_a_complete_folder(run_folder: Path) -> None:
    process = start(run_folder, "train.steps=25", "train.eval_every=25", "train.checkpoint_every=10")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    metrics, evals = lines(run_folder / "metrics.jsonl"), lines(run_folder / "evals.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, 26))
    before, after = evals[0], evals[-1]
    assert (before["step"], after["step"], before["n"], after["n"]) == (0, 25, 256, 256)
    assert before["accuracy"] <= 0.45
    assert after["low"] > before["high"], "it must have learned beyond both intervals"
    for line in metrics:
        parts = [line[f"tokens/{account}"] for account in ("trained", "masked", "discarded", "in_flight")]
        assert line["tokens/generated"] == sum(parts)
        assert line["lag/max"] <= 1
        if "lag_0/ratio_max" in line:  # law 4, on the real server: equal weights, equal probabilities
            assert max(line["lag_0/ratio_max"] - 1, 1 - line["lag_0/ratio_min"]) < 1e-4
    rollouts = lines(run_folder / "rollouts.jsonl")
    assert max(r["lag"] for r in rollouts) == 1, "generation must have run ahead"
    assert sum(r["tokens"] for r in rollouts if r["outcome"] == "trained") == metrics[-1]["tokens/trained"]
    state = status(run_folder)
    assert (state["state"], state["step"], state["error"]) == ("finished", 25, None)
    for name in ("summary.json", "report.html", "run.log", "server.log", ".hydra/config.yaml", "eval_rollouts.jsonl"):
        assert (run_folder / name).stat().st_size > 0, name
    assert (run_folder / "checkpoints" / "step_000025" / "model.safetensors").exists()
    assert str(run_folder / "report.html") in out
    assert left_alone(run_folder) == []


def test_a_killed_run_leaves_no_process_and_goes_on_where_it_stopped(run_folder: Path) -> None:
    process = start(run_folder, "train.steps=40", "train.eval_every=0", "train.checkpoint_every=2")
    wait_for_steps(process, run_folder, 5)
    process.kill()
    process.communicate()
    assert left_alone(run_folder) == [], "no server may outlive its run"
    assert status(run_folder)["state"] == "running"  # a SIGKILL leaves no time to say otherwise
    again = subprocess.Popen(
        [sys.executable, "run.py", f"resume={run_folder}", "train.steps=10"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    out, _ = again.communicate(timeout=300)
    assert again.returncode == 0, out
    assert [m["step"] for m in lines(run_folder / "metrics.jsonl")] == list(range(1, 11))
    rollouts = lines(run_folder / "rollouts.jsonl")
    places = [(r["group"], r["index"]) for r in rollouts]
    assert len(set(places)) == len(places), "no completion is consumed twice"
    assert {g for g, _ in places} == set(range(10 * 8)), "no group is left out"
    assert max(r["lag"] for r in rollouts) <= 1
    assert status(run_folder)["state"] == "finished"
    assert left_alone(run_folder) == []


def test_sigterm_ends_in_order(run_folder: Path) -> None:
    process = start(run_folder, "train.steps=1000", "train.eval_every=0", "train.checkpoint_every=1000")
    wait_for_steps(process, run_folder, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    state = status(run_folder)
    assert state["state"] == "interrupted"
    assert state["step"] >= 2
    assert (run_folder / "checkpoints" / f"step_{state['step']:06d}" / "trainer.pt").exists()
    assert left_alone(run_folder) == []


def test_a_server_that_dies_ends_the_run_with_its_log(run_folder: Path) -> None:
    process = start(run_folder, "train.steps=1000", "train.eval_every=0", "rollout.retries=1")
    wait_for_steps(process, run_folder, 2)
    engines = [
        pid for pid in mentions(run_folder) if b"EngineCore" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
    ]
    assert engines
    killed = time.monotonic()
    os.kill(engines[0], signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert time.monotonic() - killed < 30
    state = status(run_folder)
    assert state["state"] == "failed"
    assert "server.log" in state["error"]["message"] or "died" in state["error"]["message"]
    assert "Traceback" in (run_folder / "run.log").read_text()
    assert left_alone(run_folder) == []
