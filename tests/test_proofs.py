"""When a sync is proven (law 8), and the names that every step's records have (they are read by others)."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from loop import loop
from real_run import check_proofs

METRICS = """
step version time/elapsed_s time/step_s time/wait_rollouts_s time/train_s time/sync_s reward/mean reward/std loss
grad_norm lr lag/mean lag/max ratio/mean ratio/min ratio/max kl/sampler ess clip/fraction entropy completion/length_mean
completion/truncated_fraction groups/zero_variance tokens/generated tokens/trained tokens/masked tokens/discarded
tokens/in_flight throughput/generated_tokens_per_s throughput/trained_tokens_per_s lag_0/tokens lag_0/kl lag_0/ess
lag_0/clip_fraction
"""
ROLLOUTS = """
step group index prompt completion reward rewards advantage version_first version_last lag tokens finish_reason outcome
"""


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("every", "proven"), [(2, [2, 4]), (0, [])])
def test_the_first_sync_and_every_so_many_are_proven(
    tiny_dir: Path, tmp_path: Path, every: int, proven: list[int]
) -> None:
    asked: list[int] = []
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=5, verify_every=every) as trainer:
        prove = trainer.prove

        def noted(version: int) -> dict[str, float]:
            asked.append(version)
            return prove(version)

        trainer.prove = noted
        trainer.run()
    metrics = lines(tmp_path, "metrics")
    assert asked == [0, *proven]
    assert [line["step"] for line in metrics if "sync/probe_max" in line] == proven
    for line in metrics:
        assert set(METRICS.split()) <= set(line)
    for line in lines(tmp_path, "rollouts"):
        assert set(ROLLOUTS.split()) <= set(line)


def line(step: int, **proof: float | None) -> dict[str, Any]:
    return {"step": step, "sync/total_s": 0.1, **{f"sync/{name}": value for name, value in proof.items()}}


def test_the_check_of_real_runs_demands_the_proof_of_every_sync_that_is_due() -> None:
    """One that is missing is no proof of 0."""
    good, bare = line(2, probe_max=1e-6), line(1)
    check_proofs([bare, good], 2)
    check_proofs([bare, line(2)], 0)
    check_proofs([bare, good, {"step": 3}], 2)  # a run that ended in its last sync
    check_proofs([{"step": 1}, good], 2, resumed_after=1)
    with pytest.raises(KeyError, match="sync/probe_max"):
        check_proofs([bare, line(2)], 2)
    with pytest.raises(AssertionError):
        check_proofs([bare, line(2, probe_max=1e-3)], 2)
    with pytest.raises(TypeError):
        check_proofs([bare, line(2, probe_max=None)], 2)  # not a number, in the file
    for resumed_after in (0, 2):
        with pytest.raises(AssertionError, match="step 1: without a sync"):
            check_proofs([{"step": 1}, good], 2, resumed_after=resumed_after)
