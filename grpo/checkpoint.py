"""Checkpoints: a model directory that transformers and vLLM load as it is, plus `trainer.pt` with everything else.

    checkpoints/step_000100/    config.json, model.safetensors, tokenizer files, trainer.pt; with LoRA adapter/; and
                                SHA256SUMS of them all
    checkpoints/latest          the name of the newest complete one

A checkpoint is written aside, flushed to disk and renamed: a folder named step_<n> is always complete. The servers go
on generating meanwhile. Resuming needs few numbers, because groups are consumed in stream order: the number of groups
consumed says where the data goes on (law 2), and groups that were in flight are generated again.
"""

import json
import logging
import random
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from grpo import checksums, lora
from grpo.checkpoint_folder import complete
from grpo.durable import flush, remove_atomic, write_atomic
from grpo.model import Policy
from grpo.optimizer import Optimizer

log = logging.getLogger(__name__)

SPARE_BYTES = 1 << 30  # of free disk beyond the checkpoint itself


@dataclass(slots=True)
class Progress:
    """Where a run stands, besides weights and optimizer. `groups` counts groups consumed, discarded ones included."""

    step: int
    version: int
    groups: int
    places: int
    ledger: dict[str, int]


class Damaged(ValueError):  # noqa: N818
    """A checkpoint that cannot be read whole. `reason` says which of its files, and how that shows."""

    def __init__(self, checkpoint: Path, reason: str) -> None:
        super().__init__(f"resume={checkpoint}: {reason}; resume from another checkpoint")
        self.reason = reason


class Checkpoints:
    """Writes and prunes the checkpoints of one run. keep: how many of the newest stay; 0 keeps all. data: the
    fingerprints of its rows. `written` and `seconds` count since the start, `bytes` is the last one's size."""

    def __init__(self, folder: Path, *, keep: int, config: dict[str, Any], data: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.config = config
        self.data = data
        self.written, self.seconds, self.bytes = 0, 0.0, 0

    def save(self, policy: Policy, optimizer: Optimizer, progress: Progress) -> dict[str, float]:
        """Write `step_<n>`; returns `checkpoint/seconds` and `checkpoint/bytes`. OSError when it cannot be written."""
        started = time.monotonic()
        target = self.folder / f"step_{progress.step:06d}"
        if target.is_dir():  # written by the run that was resumed from it
            return {}
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True)
            flush(self.folder.parent)
        self._check_space(policy)
        aside = self.folder / f".{target.name}.tmp"
        for left in self.folder.glob(".step_*.tmp"):  # by a run that was killed while it wrote, or a full disk
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir()
        state = {
            "progress": asdict(progress),
            "optimizer": optimizer.state_dict(),
            "rng": rng_state(),
            "config": self.config,
            "data": self.data,
        }
        try:
            policy.save(aside)
            torch.save(state, aside / "trainer.pt")
        except Exception as error:
            shutil.rmtree(aside, ignore_errors=True)  # it takes room
            if _of_the_disk(error):
                raise OSError(f"{target}: cannot be written, the disk or a quota is full: {error}") from error
            raise
        files = [path for path in sorted(aside.rglob("*")) if path.is_file()]
        sums = checksums.Sums(aside)
        for path in files:
            sums.add(path)
        for path in files:  # meanwhile
            flush(path)
        files.append(sums.write())
        flush(files[-1])
        size = sum(path.stat().st_size for path in files)
        aside.rename(target)
        flush(self.folder)
        try:
            write_atomic(self.folder / "latest", target.name + "\n")
        except OSError as error:  # the checkpoint is whole all the same, and nothing of ours reads the name
            log.warning("%s/latest still names one before %s: %s", self.folder, target.name, error)
        else:
            self._prune()
        seconds = time.monotonic() - started
        self.written, self.seconds, self.bytes = self.written + 1, self.seconds + seconds, size
        log.info("checkpoint %s: %.1f MB in %.2f s", target.name, size / 1e6, seconds)
        return {"checkpoint/seconds": seconds, "checkpoint/bytes": float(size)}

    def _check_space(self, policy: Policy) -> None:
        # weights, and two float32 moments plus a master for each that is trained
        weights = sum(w.numel() * w.element_size() for _, w in policy.named_weights())
        need = weights + 12 * sum(p.numel() for p in policy.parameters()) + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < need:
            raise OSError(
                f"{self.folder}: {free / 1e9:.1f} GB free, a checkpoint needs {need / 1e9:.1f} GB; make room, or set "
                "train.keep_checkpoints lower"
            )

    def _prune(self) -> None:
        for old in complete(self.folder)[: -self.keep]:  # keep=0: [:0], none
            try:
                remove_atomic(old)
            except OSError as error:  # the new one is whole all the same
                log.warning("%s: cannot be removed (%s); the next checkpoint tries again", old, error)


def _of_the_disk(error: Exception) -> bool:
    """Whether safetensors or torch could not write: neither raises an OSError."""
    return isinstance(error, SafetensorError) or "inline_container" in str(error) or "PytorchStreamWriter" in str(error)


def find(path: Path) -> Path:
    """The checkpoint that `resume=<path>` means: itself, or the newest of a run folder. ValueError if none."""
    if (path / "trainer.pt").is_file():
        return path
    found = complete(path / "checkpoints")
    if not found:
        raise ValueError(f"resume={path}: no checkpoint there (a run folder with checkpoints/step_*, or one of those)")
    return found[-1]


def find_whole(path: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `resume=<path>` means, and its `Progress`: of a run folder the newest that can be read.

    Raises ValueError when there is none; Damaged for the one that was named, or when all of a run folder are.
    """
    newest = find(path)
    candidates = [newest] if newest == path else complete(newest.parent)[::-1]
    first: Damaged | None = None
    for candidate in candidates:
        try:
            progress = inspect(candidate)
            compare(candidate)
            return candidate, progress
        except Damaged as damage:
            log.warning("%s%s", damage, "; trying the one before" if candidate != candidates[-1] else "")
            first = first or damage
    assert first is not None
    raise first


def inspect(checkpoint: Path) -> dict[str, Any]:
    """Its `Progress` as a dict. Raises Damaged for a damaged checkpoint: a file that is missing or cut short."""
    from safetensors import safe_open

    file = checkpoint / "trainer.pt"
    try:
        # mmap: the optimizer's tensors, gigabytes of them, are not read here
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        progress: dict[str, Any] = dict(state["progress"])
        if (state.get("config") or {}).get("model", {}).get("lora_rank"):
            file = checkpoint / lora.FOLDER / lora.WEIGHTS
            file.stat()
        file = checkpoint / "config.json"
        json.loads(file.read_text(encoding="utf-8"))
        file = checkpoint / "*.safetensors"
        weights = sorted(checkpoint.glob("*.safetensors"))
        if not weights:
            raise FileNotFoundError(file)
        for file in (*weights, *sorted(checkpoint.glob(f"{lora.FOLDER}/*.safetensors"))):
            with safe_open(file, "pt"):  # compares the header with the file's length
                pass
    except Exception as error:  # zip's, pickle's, torch's, safetensors' and the file system's
        raise Damaged(checkpoint, f"{file.name} cannot be read ({type(error).__name__})") from error
    return progress


def rows(checkpoint: Path) -> dict[str, str] | None:
    """The fingerprints of the rows that its run has; None in one of an earlier version."""
    state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
    found: dict[str, str] | None = state.get("data")
    return found


def compare(checkpoint: Path) -> None:
    """Read all of it, gigabytes, and compare with what was written. Raises Damaged."""
    try:
        if not checksums.check(checkpoint):
            log.warning("%s has no %s: whether it is what was written cannot be told", checkpoint, checksums.NAME)
    except (OSError, ValueError) as error:
        raise Damaged(checkpoint, str(error)) from error


def load(path: Path) -> dict[str, Any]:
    """What `save` put into trainer.pt, on the CPU. Only tensors and plain data are unpickled."""
    state: dict[str, Any] = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True)
    return state


def rng_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": _to_lists(random.getstate()),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(_to_tuples(state["python"]))


def _to_lists(value: Any) -> Any:
    return [_to_lists(v) for v in value] if isinstance(value, tuple) else value


def _to_tuples(value: Any) -> Any:
    return tuple(_to_tuples(v) for v in value) if isinstance(value, list) else value
