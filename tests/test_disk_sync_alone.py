"""sync=disk without a server: where the file lies, when it is there, what it refuses to write."""

import fcntl
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_sync_alone import A, B, FakeControl, Weights

from grpo.rollout.errors import ServerError
from grpo.sync import disk
from grpo.sync.disk import LOCK, PREFIX, RESERVE, DiskSync, write_safetensors


def made(folder: Path, *urls: str) -> DiskSync:
    controls: list[Any] = [FakeControl(url) for url in urls or (A,)]
    return DiskSync(
        folder=str(folder),
        fallback=folder,
        controls=controls,
        policy=Weights(),
        dtype=torch.float32,
        pause="keep",
        timeout=5.0,
    )


def test_what_a_dead_run_left_goes_and_what_a_living_one_holds_stays(tmp_path: Path) -> None:
    for name in ("dead", "living"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / LOCK).touch()
    with (tmp_path / f"{PREFIX}living" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sync = made(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([f"{PREFIX}living", sync.folder.name])
    sync.close()
    assert not sync.folder.exists()


def test_a_relative_folder_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sync = made(Path("weights"))
    assert sync.folder.parent == tmp_path / "weights"
    sync.close()


def test_room_for_the_file_and_a_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = made(tmp_path)
    free = [sync.bytes + RESERVE - 1]
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Namespace(free=free[0]))
    with pytest.raises(OSError, match=r"sync\.dir=.* GB free, a version of the weights needs 0\.07 GB"):
        sync.prepare(1)
    free[0] += 1
    sync.prepare(1)
    assert load_file(sync._file(1))["w"].tolist() == [0.0, 0.0, 0.0]
    sync.close()


def test_a_version_has_its_name_only_once_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = made(tmp_path)
    write = write_safetensors

    def watched(path: Path, *rest: Any) -> None:
        write(path, *rest)
        assert not sync._file(1).exists()

    monkeypatch.setattr(disk, "write_safetensors", watched)
    sync.prepare(1)
    assert [p.name for p in sorted(sync.folder.iterdir())] == [LOCK, sync._file(1).name]
    sync.close()


def test_the_server_that_is_asked_for_is_the_one_that_compares(tmp_path: Path) -> None:
    sync = made(tmp_path, A, B)
    first, second = sync.controls
    assert isinstance(first, FakeControl)
    assert isinstance(second, FakeControl)
    second.failing["/update_weights"] = lambda: ServerError("compared 3 of 3 tensors")
    sync.suspects(B)
    assert (first.paths(), second.paths()) == ([], ["/start_weight_update", "/update_weights"])
    assert [p.name for p in sync.folder.iterdir()] == [LOCK], "the file that was looked at is gone"
    sync.close()


def test_where_the_file_cannot_be_written_nothing_is_said_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = made(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: Namespace(free=0))
    assert sync.suspects(A).startswith("Its weights could not be compared: sync.dir=")
    sync.close()


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_tensor_that_is_not_as_announced_is_not_written(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="a: "):
        write_safetensors(tmp_path / "x", {"a": [2]}, "float32", [("a", tensor)])


def test_a_transposed_weight_is_written_as_it_reads(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).T
    write_safetensors(tmp_path / "x", {"a": [3, 2]}, "float32", [("a", weight)])
    assert torch.equal(load_file(tmp_path / "x")["a"], weight)
