"""Checkpoints: whole or not there, the newest kept, the random numbers as they were, nothing but data unpickled."""

import pickle
import random
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo import checkpoint, checksums
from grpo.checkpoint import Checkpoints, Progress
from grpo.checkpoint_folder import complete
from grpo.durable import flush
from grpo.model import Policy
from grpo.optimizer import Optimizer

Parts = tuple[Policy, Optimizer]


@pytest.fixture(scope="module")
def parts(tiny_dir: Path) -> Parts:
    policy = Policy(tiny_dir)
    return policy, Optimizer(policy.parameters(), lr=1e-3, max_grad_norm=1.0)


def at(step: int) -> Progress:
    return Progress(step, step, 2 * step, 2 * step, {})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("keep", "left"), [(2, [2, 3]), (0, [1, 2, 3])])
def test_the_newest_are_kept(parts: Parts, tmp_path: Path, keep: int, left: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep, config={})
    (tmp_path / "step_000000.damaged").mkdir()  # counts for nothing, and goes to nobody
    (tmp_path / "step_000009.damaged").mkdir()
    for step in (1, 2, 3):
        checkpoints.save(*parts, at(step))
    assert names(tmp_path) == [
        "latest",
        "step_000000.damaged",
        *(f"step_{step:06d}" for step in left),
        "step_000009.damaged",
    ]
    assert (tmp_path / "latest").read_text() == "step_000003\n"
    assert checkpoints.written == 3


def test_an_old_one_that_cannot_be_removed_is_told_and_tried_again(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=0, config={})
    for step in (1, 2, 3):
        checkpoints.save(*parts, at(step))
    checkpoints.keep = 2  # so that the fourth has two to remove
    rename = Path.rename

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step_000001":
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", busy)
        assert checkpoints.save(*parts, at(4))["checkpoint/bytes"] > 0
    assert checkpoints.written == 4
    assert names(tmp_path) == ["latest", "step_000001", "step_000003", "step_000004"]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"{tmp_path / 'step_000001'}: cannot be removed (")
    assert "Device or resource busy" in told
    checkpoints.save(*parts, at(5))
    assert names(tmp_path) == ["latest", "step_000004", "step_000005"]


def test_one_that_is_there_stays_as_it_is(parts: Parts, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=0, config={})
    assert checkpoints.save(*parts, at(1))["checkpoint/bytes"] > 0
    before = (tmp_path / "step_000001" / "trainer.pt").stat()
    assert checkpoints.save(*parts, at(1)) == {}
    assert (tmp_path / "step_000001" / "trainer.pt").stat() == before


def test_what_a_killed_run_was_writing_is_removed(parts: Parts, tmp_path: Path) -> None:
    (tmp_path / ".step_000007.tmp").mkdir()
    (tmp_path / ".step_000007.tmp" / "half").touch()
    Checkpoints(tmp_path, keep=0, config={}).save(*parts, at(1))
    assert names(tmp_path) == ["latest", "step_000001"]


def test_every_file_is_on_the_disk_before_the_name_is(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []

    def note(path: Path) -> None:
        assert (tmp_path / "step_000001").exists() == (path == tmp_path)
        flushed.append(path)

    monkeypatch.setattr(checkpoint, "flush", note)
    Checkpoints(tmp_path, keep=0, config={}).save(*parts, at(1))
    files = sorted(p.relative_to(tmp_path / "step_000001") for p in (tmp_path / "step_000001").rglob("*"))
    assert sorted(path.relative_to(tmp_path / ".step_000001.tmp") for path in flushed[:-1]) == files
    assert flushed[-1] == tmp_path
    assert {path.name for path in files} >= {"model.safetensors", "trainer.pt", "config.json", checksums.NAME}


def test_what_a_checkpoint_holds(parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, optimizer = parts
    config, data = {"seed": 3, "train": {"steps": 4}}, {"rows": "abc"}
    checkpoints = Checkpoints(tmp_path, keep=0, config=config, data=data)
    clock = iter([0.0, 2.0, 10.0, 13.0])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.time, "monotonic", lambda: next(clock))
        saved = [checkpoints.save(policy, optimizer, at(step)) for step in (1, 2)]
    assert [s["checkpoint/seconds"] for s in saved] == [2.0, 3.0]
    assert checkpoints.seconds == 5.0
    size = sum(p.stat().st_size for p in (tmp_path / "step_000002").rglob("*") if p.is_file())
    assert saved[1]["checkpoint/bytes"] == checkpoints.bytes == size
    state = checkpoint.load(tmp_path / "step_000002")
    assert set(state) == {"progress", "optimizer", "rng", "config", "data"}
    assert (state["progress"], state["config"], state["data"]) == (asdict(at(2)), config, data)
    assert str(state["optimizer"]) == str(optimizer.state_dict())
    again = Policy(tmp_path / "step_000002")
    for ours, theirs in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_disk_must_hold_weights_moments_and_masters_and_a_spare(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = sum(p.numel() for p in parts[0].parameters())
    need = count * (4 + 12) + checkpoint.SPARE_BYTES  # float32 weights; two moments and a master of 4 bytes each
    free = [need - 1]
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: Namespace(free=free[0]))
    checkpoints = Checkpoints(tmp_path, keep=0, config={})
    with pytest.raises(OSError, match=r"a checkpoint needs 1\.1 GB; make room"):
        checkpoints.save(*parts, at(1))
    assert names(tmp_path) == []
    free[0] = need
    checkpoints.save(*parts, at(1))


def test_which_checkpoint_a_path_means(parts: Parts, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with pytest.raises(ValueError, match=f"resume={tmp_path}: no checkpoint there"):
        checkpoint.find(tmp_path)
    checkpoints = Checkpoints(folder, keep=0, config={})
    for step in (9, 10):
        checkpoints.save(*parts, at(step))
    (folder / "step_000011").touch()  # a file, so no checkpoint
    assert checkpoint.find(tmp_path) == folder / "step_000010"
    assert checkpoint.find(folder / "step_000009") == folder / "step_000009"


def test_where_the_name_of_the_newest_cannot_be_written_it_names_one_that_is_there(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new one is whole and counts; the old one, which has the name, is not removed."""
    checkpoints = Checkpoints(tmp_path, keep=1, config={})
    checkpoints.save(*parts, at(1))
    replace = Path.replace

    def full(path: Path, target: Path) -> Path:
        if path.name == "latest.tmp":
            raise OSError(28, "No space left on device")
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert checkpoints.save(*parts, at(2))["checkpoint/bytes"] > 0
    assert checkpoints.written == 2
    assert (tmp_path / "latest").read_text() == "step_000001\n"
    assert complete(tmp_path) == [tmp_path / "step_000001", tmp_path / "step_000002"]
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"{tmp_path}/latest still names one before step_000002: ")
    checkpoints.save(*parts, at(3))
    assert names(tmp_path) == ["latest", "step_000003"]
    assert (tmp_path / "latest").read_text() == "step_000003\n"


def test_a_flushed_file_is_closed(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    before = len(list(Path("/proc/self/fd").iterdir()))
    flush(tmp_path / "x")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def test_random_numbers_go_on_where_they_were(parts: Parts, tmp_path: Path) -> None:
    draws()
    Checkpoints(tmp_path, keep=0, config={}).save(*parts, at(1))
    expected = draws()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(5)
    assert not any(a == b for a, b in zip(draws(), expected, strict=True))
    checkpoint.set_rng_state(checkpoint.load(tmp_path / "step_000001")["rng"])
    assert draws() == expected


class Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("unpickled",))


def test_nothing_but_data_is_unpickled(tmp_path: Path) -> None:
    torch.save({"progress": {}, "bomb": Bomb()}, tmp_path / "trainer.pt")
    with pytest.raises(pickle.UnpicklingError):
        checkpoint.load(tmp_path)
    with pytest.raises(ValueError, match=r"trainer\.pt cannot be read"):
        checkpoint.inspect(tmp_path)
