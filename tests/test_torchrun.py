"""`torchrun --nproc-per-node 2 run.py` around a fake server: the run of one process, its resume, and its end."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import small
from fake_server import FakeServer
from real_run import Run, check_laws

from grpo import cli, distributed
from grpo.rollout.guard import descendants

pytestmark = pytest.mark.slow

END = 40.0  # seconds in which a run that has lost a rank must be over


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """None of them outlives the test."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.kill()
        assert run.survivors() == []


def finished(run: Run) -> Run:
    assert run.end() == 0, run.output
    assert run.status()["state"] == "finished"
    assert run.survivors() == []
    return run


def test_two_ranks_then_one_then_two_are_one_run(server: FakeServer, tmp_path: Path, runs: list[Run]) -> None:
    """Synchronous, so that the runs are the same: every figure of the chain is that of one unbroken process."""
    task = [
        *small(server),
        "rollout.max_staleness=0",
        "train.eval_every=0",
        "train.minibatches=2",
        "sync.verify_every=1",
    ]
    runs.append(Run(tmp_path / "alone", *task, "train.steps=6"))
    alone = finished(runs[-1])
    runs.append(Run(tmp_path / "chain", *task, "train.steps=2", ranks=2))
    finished(runs[-1])
    assert runs[-1].status()["ranks"] == 2
    for ranks, steps in ((1, 4), (2, 6)):
        runs.append(Run(tmp_path / "chain", f"train.steps={steps}", resume=True, ranks=ranks))
        finished(runs[-1])
    check_laws(runs[-1], steps=6, max_staleness=0)
    exact = ("loss", "grad_norm", "update_size", "kl/sampler", "entropy", "ess", "ratio/max", "tokens/trained")
    for ours, theirs in zip(runs[-1].lines("metrics"), alone.lines("metrics"), strict=True):
        for key in exact:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), key
    assert runs[-1].lines("rollouts") == alone.lines("rollouts")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "alone.output", "chain", "chain.output"]


def test_a_rank_that_is_killed_ends_the_run_with_the_reason(
    server: FakeServer, tmp_path: Path, runs: list[Run]
) -> None:
    run = Run(tmp_path / "run", *small(server), "train.steps=100000", "train.eval_every=0", ranks=2)
    runs.append(run)
    run.until_steps(2)
    (follower,) = [pid for pid in run.below("run.py") if environment(pid).get("RANK") == "1"]
    os.kill(follower, signal.SIGKILL)
    assert run.end(END) != 0
    assert run.survivors() == []
    status: dict[str, Any] = run.status()
    assert (status["state"], status["error"]["type"]) == ("failed", "TeamError")
    assert status["error"]["message"].startswith("rank 1 of 2 failed: it ended without a word")


def test_rank_0_killed_leaves_nobody(server: FakeServer, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path / "run", *small(server), "train.steps=100000", "train.eval_every=0", ranks=2)
    runs.append(run)
    run.until_steps(1)
    (first,) = [pid for pid in run.below("run.py") if environment(pid).get("RANK") == "0"]
    os.kill(first, signal.SIGKILL)
    assert run.end(END) != 0
    assert run.survivors() == []


def test_a_signal_to_all_ranks_ends_the_run_in_order(server: FakeServer, tmp_path: Path, runs: list[Run]) -> None:
    """As a scheduler sends it: to torchrun, which hands it on, and to every process besides."""
    run = Run(tmp_path / "run", *small(server), "train.steps=100000", "train.eval_every=0", ranks=2)
    runs.append(run)
    run.until_steps(2)
    for pid in [run.process.pid, *descendants(run.process.pid)]:
        os.kill(pid, signal.SIGTERM)
    run.end(END)
    assert run.survivors() == []
    status = run.status()
    assert status["state"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step_{status['step']:06d}" / "trainer.pt").exists()


def test_torchrun_killed_leaves_nobody(server: FakeServer, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path / "run", *small(server), "train.steps=100000", "train.eval_every=0", ranks=2)
    runs.append(run)
    run.until_steps(1)
    run.kill()
    assert run.survivors() == []
    assert run.status()["state"] == "interrupted"


def test_a_dry_run_ends_every_rank(tmp_path: Path, runs: list[Run]) -> None:
    runs.append(Run(tmp_path / "run", "dry_run=true", ranks=2))
    started = time.monotonic()
    assert runs[-1].end() == 0, runs[-1].output
    assert time.monotonic() - started < distributed.STARTUP
    assert "on cpu, sharded over 2 ranks" in runs[-1].output
    assert not (tmp_path / "run").exists()


def environment(pid: int) -> dict[str, str]:
    pairs = Path("/proc", str(pid), "environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


# ---- mistakes ----


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


SOUND = {"mode": "train", "batch_size": 8, "minibatches": 2, "device": "cpu", "backend": "disk"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "eval"}, r"mode=eval under torchrun \(2 ranks\): nothing is trained; run it without torchrun"),
        ({"batch_size": 3}, "train.batch_size=3: 1 completions per optimizer step .* for 2 ranks"),
        ({"device": "cuda:1"}, "model.device=cuda:1 under torchrun .*: rank r takes GPU r"),
        ({"device": "cuda"}, "--nproc-per-node=2: a rank takes a GPU, this host has 0"),
        ({"backend": "ipc"}, "sync=ipc under torchrun .*: vLLM's engine wants a handle from every rank"),
    ],
)
@pytest.mark.usefixtures("two_ranks")
def test_settings_that_do_not_go_with_ranks(wrong: dict[str, Any], message: str) -> None:
    distributed.check_plan(**SOUND)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        distributed.check_plan(**{**SOUND, **wrong})  # type: ignore[arg-type]


@pytest.mark.usefixtures("two_ranks")
def test_a_multirun_under_torchrun_is_refused() -> None:
    with pytest.raises(ValueError, match=r"-m under torchrun \(2 ranks\)"):
        cli.prepare(["run.py", "-m", "seed=0,1"])


def test_without_torchrun_there_is_no_place() -> None:
    assert distributed.place({}) is None
    assert distributed.place({"WORLD_SIZE": "1", "RANK": "0"}) is None  # torchrun with one process
    assert distributed.place({"WORLD_SIZE": "4"}) is None  # somebody else's variable
