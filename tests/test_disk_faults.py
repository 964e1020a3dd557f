"""A full disk and damaged checkpoints: what is whole stays whole, and the ending says why."""

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import FakeServer
from loop import loop

from grpo import checkpoint, checksums, record
from grpo.checkpoint_folder import complete
from grpo.claim import check_rows, fingerprints
from grpo.durable import write_atomic
from grpo.preflight import check_bytes
from grpo.record import FILES, Recorder
from grpo.token_record import TokenRecorder


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_full_disk_ends_the_run_by_name_without_a_checkpoint_of_the_step_that_is_not_recorded(
    tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")  # every write: no space left on device
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, zero_variance="keep", checkpoint_every=1) as trainer,
    ):
        with pytest.raises(OSError, match=r"metrics.jsonl cannot be written: No space left on device") as caught:
            trainer.run()
        trainer.try_save()
        trainer.recorder.finish("failed", {"state": "failed"}, caught.value)
    assert not (tmp_path / "checkpoints").exists()
    assert status(tmp_path)["state"] == "failed"


def test_the_state_is_written_where_nothing_else_finds_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(tmp_path, steps=3, facts={"pad": "x" * 400})
    size = (tmp_path / "status.json").stat().st_size

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "write_atomic", full)
    recorder.finish("failed", {}, RuntimeError("y" * 10_000))
    assert (status(tmp_path)["state"], status(tmp_path)["error"]["type"]) == ("failed", "RuntimeError")
    assert (tmp_path / "status.json").stat().st_size < size + 600, "the long message stays out"
    assert "No space left" in capsys.readouterr().err


def test_a_checkpoint_that_finds_no_room_does_not_end_the_run_but_the_last_one_does(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([0, 1 << 40, 0])
    real = shutil.disk_usage

    def disk_usage(path: Any) -> Any:
        return SimpleNamespace(free=next(free)) if Path(path).name == "checkpoints" else real(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=3, zero_variance="keep", checkpoint_every=1) as trainer,
    ):
        with pytest.raises(OSError, match=r"GB free, a checkpoint needs .* GB; make room"):
            trainer.run()
        assert (trainer.saves_failed, trainer.checkpoints.written) == (1, 1)
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_000002"]
    first, second, third = lines(tmp_path)
    assert "checkpoint/bytes" not in first.keys() | second.keys()
    files = (tmp_path / "checkpoints" / "step_000002").rglob("*")
    assert third["checkpoint/bytes"] == sum(file.stat().st_size for file in files)
    assert third["checkpoint/seconds"] > 0


def test_the_lines_of_a_step_are_on_the_disk_before_its_checkpoint_has_its_name(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: dict[str, int] = {}  # bytes, by name in the run folder
    named: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note(handle: int) -> None:
        fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").resolve()
        if path.is_relative_to(tmp_path):
            on_disk[str(path.relative_to(tmp_path))] = (
                os.fstat(handle).st_size if path.is_file() else len(list(path.iterdir()))
            )

    def name(path: Path, target: Path) -> Path:
        if Path(target).name.startswith("step_"):
            named.append(Path(target).name)
            files = [*FILES, *(f"tokens/{file.name}" for file in (tmp_path / "tokens").iterdir())]
            assert len(files) == len(FILES) + len(named)  # a record of each step
            assert {file: on_disk.get(file) for file in files} == {f: (tmp_path / f).stat().st_size for f in files}
            assert on_disk["tokens"] == len(named), "the records' names are on the disk"
            assert on_disk["."] == len(list(tmp_path.iterdir())), "the folder of checkpoints too"
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", name)
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=2, zero_variance="keep", checkpoint_every=1) as trainer,
    ):
        trainer.recorder.tokens = TokenRecorder(tmp_path)
        trainer.run()
    assert named == ["step_000001", "step_000002"]
    assert on_disk["metrics.jsonl"] > 0


@pytest.fixture
def saved(tiny_dir: Path, tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 1 and 2."""
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=2, zero_variance="keep", checkpoint_every=1) as trainer,
    ):
        trainer.run()
    return tmp_path


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "config.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(
    saved: Path, file: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = saved / "checkpoints" / "step_000002"
    if damage == "cut":
        content = (newest / file).read_bytes()
        (newest / file).write_bytes(content[: len(content) // 2])
    else:
        (newest / file).unlink()
    found, progress = checkpoint.find_whole(saved)
    assert (found.name, progress["step"]) == ("step_000001", 1)
    assert "step_000002" in caplog.text
    assert "trying the one before" in caplog.text
    if file != "trainer.pt":
        with pytest.raises(ValueError, match=r"step_000002: .* cannot be read"):  # asked for by name
            checkpoint.find_whole(newest)


@pytest.mark.parametrize("file", ["model.safetensors", "trainer.pt", "config.json", "generation_config.json"])
def test_one_byte_that_has_changed_on_the_disk_is_seen(
    saved: Path, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of a tensor no format would show it: the run would go on with other weights."""
    newest = saved / "checkpoints" / "step_000002"
    content = bytearray((newest / file).read_bytes())
    content[len(content) // 2] ^= 1
    (newest / file).write_bytes(content)
    found, _ = checkpoint.find_whole(saved)
    assert found.name == "step_000001"
    assert "step_000002" in caplog.text
    with pytest.raises(ValueError, match=rf"step_000002: {re.escape(file)} (is not what was written|cannot be read)"):
        checkpoint.find_whole(newest)  # asked for by name
    (newest / checksums.NAME).unlink()  # as earlier versions left it
    if file == "model.safetensors":
        assert checkpoint.find_whole(saved)[0] == newest


def test_the_record_of_checksums_is_one_that_sha256sum_reads(saved: Path) -> None:
    folder = saved / "checkpoints" / "step_000002"
    ended = subprocess.run(
        ["sha256sum", "--check", "--strict", checksums.NAME], cwd=folder, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    others = {path.name for path in folder.rglob("*") if path.is_file()} - {checksums.NAME}
    assert {line.partition(":")[0] for line in ended.stdout.splitlines()} == others
    assert len(others) >= 4


def test_where_every_checkpoint_is_damaged_the_newest_is_named(saved: Path) -> None:
    for path in complete(saved / "checkpoints"):
        (path / "trainer.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step_000002: trainer.pt cannot be read"):
        checkpoint.find_whole(saved)


def test_what_a_killed_save_left_is_removed_by_the_next(saved: Path, tiny_dir: Path) -> None:
    left = saved / "checkpoints" / ".step_000009.tmp"
    left.mkdir()
    shutil.rmtree(saved / "checkpoints" / "step_000002")
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, saved, steps=2, zero_variance="keep", checkpoint_every=2) as trainer,
    ):
        trainer.run()
    assert not left.exists()
    assert (saved / "checkpoints" / "latest").read_text().strip() == "step_000002"


def test_other_rows_are_refused_unless_forced(caplog: pytest.LogCaptureFixture) -> None:
    report = {"seconds": 1.0, "train": {"rows": 3, "fingerprint": "a"}, "math": {"train": {"fingerprint": "b"}}}
    before = fingerprints(report)
    assert before == {"train": "a", "math.train": "b"}
    check_rows(before, dict(before), forced=False)
    check_rows(None, before, forced=False)  # a checkpoint of an earlier version says nothing
    with pytest.raises(ValueError, match=r"rows of math.train .*resume_force=true"):
        check_rows(before, {"train": "a", "math.train": "c"}, forced=False)
    check_rows(before, {"train": "z", "math.train": "b"}, forced=True)
    assert "other rows than the run began with: train" in caplog.text


def test_weights_that_have_changed_on_the_disk_are_not_begun_with(saved: Path) -> None:
    folder = saved / "checkpoints" / "step_000002"
    check_bytes(str(folder))
    (folder / "trainer.pt").unlink()  # an optimizer's state, which nothing here reads
    check_bytes(str(folder))
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    changed = rf"^model.path={folder}: the checkpoint is damaged: model.safetensors is not what was written"
    with pytest.raises(ValueError, match=changed):
        check_bytes(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"^model.path={folder}: the checkpoint is damaged: .*No such file"):
        check_bytes(str(folder))


def test_a_record_of_another_model_is_no_record_of_ours(tmp_path: Path) -> None:
    (tmp_path / checksums.NAME).write_text("# of a download\n0123 *other.bin\n\n")
    check_bytes(str(tmp_path))


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (lambda text: "", "config.json is not in SHA256SUMS"),
        (lambda text: text[:120], "line 2 of SHA256SUMS cannot be read"),
        (lambda text: text.replace("model.safetensors", "model.safetensor_"), "model.safetensors is not in SHA256SUMS"),
        (lambda text: text + "\n", r"line \d+ of SHA256SUMS cannot be read"),
        (lambda text: text.replace("  ", " *"), None),  # as `sha256sum --binary` writes it
    ],
)
def test_a_record_that_is_not_whole_is_damage_too(saved: Path, record: Callable[[str], str], why: str | None) -> None:
    """Else the file that it does not name could be anything."""
    folder = saved / "checkpoints" / "step_000002"
    (folder / checksums.NAME).write_text(record((folder / checksums.NAME).read_text()))
    if why is None:
        checkpoint.compare(folder)
        return
    with pytest.raises(checkpoint.Damaged, match=rf"step_000002: {why}"):
        checkpoint.compare(folder)
    assert checkpoint.find_whole(saved)[0].name == "step_000001"


def test_without_a_record_it_is_said_that_nothing_was_compared(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved / "checkpoints" / "step_000002"
    (folder / checksums.NAME).unlink()
    assert checkpoint.find_whole(saved)[0] == folder
    assert f"{folder} has no SHA256SUMS" in caplog.text


def test_a_lora_checkpoint_without_its_adapter_is_damaged(saved: Path) -> None:
    folder = saved / "checkpoints" / "step_000002"
    state = torch.load(folder / "trainer.pt", weights_only=True)
    state["config"] = {"model": {"lora_rank": 4}}
    torch.save(state, folder / "trainer.pt")
    with pytest.raises(checkpoint.Damaged, match=r"step_000002: adapter_model\.safetensors cannot be read"):
        checkpoint.inspect(folder)


def test_a_file_in_the_place_of_a_checkpoint_is_told(saved: Path, tiny_dir: Path) -> None:
    """It was taken for the checkpoint, and none was written."""
    folder = saved / "checkpoints" / "step_000002"
    shutil.rmtree(folder)
    folder.touch()
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, saved, steps=2, zero_variance="keep", checkpoint_every=1) as trainer,
        pytest.raises(OSError, match="step_000002"),
    ):
        trainer.run()


def test_a_full_disk_names_the_file_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path / 'config.yaml'}'"):
        write_atomic(tmp_path / "config.yaml", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", ["weights", "optimizer"])
def test_a_checkpoint_that_finds_no_room_while_it_is_written_costs_the_checkpoint(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: str
) -> None:
    """A quota, or others who fill the disk meanwhile: neither safetensors nor torch raises an OSError then."""
    save = checkpoint.Checkpoints.save
    model = (tiny_dir / "model.safetensors").stat().st_size
    room = 1000 if limit == "weights" else model + 20_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(self: Any, *args: Any) -> Any:
        if args[2].step == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
        try:
            return save(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", limited)
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=2, zero_variance="keep", checkpoint_every=1) as trainer,
    ):
        trainer.run()
    assert trainer.saves_failed == 1
    assert "no checkpoint of step 1, the run goes on: " in caplog.text
    assert "step_000001" in caplog.text
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000002"]


@pytest.mark.parametrize(("name", "damage"), [(".DS_Store", False), ("README.md", False), ("more.safetensors", True)])
def test_a_file_beside_those_of_a_checkpoint_matters_where_it_may_be_read(saved: Path, name: str, damage: bool) -> None:
    folder = saved / "checkpoints" / "step_000002"
    (folder / name).write_text("{}")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "meta.json").write_text("{}")
    if damage:
        with pytest.raises(checkpoint.Damaged, match=f"{name} is not in SHA256SUMS"):
            checkpoint.compare(folder)
    else:
        checkpoint.compare(folder)
        check_bytes(str(folder))
