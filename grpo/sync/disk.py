"""sync=disk: the weights go through a file that trainer and servers both see. On one machine it lies in memory.

A version is written aside and renamed while the servers still generate, read by them while they are paused, and removed
when all have confirmed it. The folder is ours alone: `grpo-weights-<pid>-...` with a lock that the run holds, so
that a later run can tell what a dead one left behind (also where several hosts or containers share the folder: a pid
alone would say nothing there).
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.rollout.errors import ServerError
from grpo.sync.base import CLEANUP_TIMEOUT, Control, WeightSync
from grpo.sync.engine import BACKEND, COMPARED

if TYPE_CHECKING:
    from torch import Tensor

MEMORY = Path("/dev/shm")
PREFIX, LOCK = "grpo-weights-", "lock"
RESERVE = 64 << 20  # bytes that stay free besides the file
LOOKED_AT = -1  # the "version" of a file that is only looked at
NEWBORN = 60.0  # seconds in which a folder may have no lock yet
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class DiskSync(WeightSync):
    """folder: where; None takes memory where there is room for two versions, else `fallback` (the run folder)."""

    backend = BACKEND
    repeatable = True

    def __init__(self, *, folder: str | None, fallback: Path, **common: Any) -> None:
        super().__init__(**common)
        parent = Path(folder) if folder is not None else self._choose(fallback)
        parent.mkdir(parents=True, exist_ok=True)
        remove_dead(parent)
        # Absolute: the servers may run in another directory.
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)).resolve()
        self.folder.chmod(0o755)  # a server may run as somebody else
        self._lock = (self.folder / LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def attach(self) -> None:
        init = {"shapes": {name: list(weight.shape) for name, weight in self.policy.named_weights()}}
        self.everywhere(
            lambda c: c.post("/init_weight_transfer_engine", json={"init_info": init}, timeout=self.timeout)
        )

    def prepare(self, version: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < self.bytes + RESERVE:
            raise OSError(
                f"sync.dir={self.folder.parent}: {free / 1e9:.2f} GB free, a version of the weights needs "
                f"{(self.bytes + RESERVE) / 1e9:.2f} GB; choose another sync.dir"
            )
        aside = self._file(version).with_suffix(".tmp")
        shapes = {name: list(weight.shape) for name, weight in self.policy.named_weights()}
        try:
            write_safetensors(
                aside, shapes, str(self.dtype).removeprefix("torch."), self.policy.named_weights(self.dtype)
            )
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise OSError(error.errno, f"sync.dir={self.folder.parent}: {error.strerror}", str(aside)) from error
        aside.rename(self._file(version))

    def transfer(self, version: int) -> None:
        update = {"update_info": {"path": str(self._file(version))}}
        finish = {"weight_version": str(version)}
        self.everywhere(self.start)
        self.everywhere(lambda c: c.post("/update_weights", json=update, timeout=self.timeout))
        self.everywhere(lambda c: c.post("/finish_weight_update", json=finish, timeout=self.timeout))

    def abandon(self, control: Control) -> None:
        # Our engine finishes no update that brought nothing; an update that it refuses closes it.
        control.post("/update_weights", json={"update_info": {}}, timeout=CLEANUP_TIMEOUT)

    def suspects(self, url: str) -> str:
        """The engine compares its model with a file of the policy's weights."""
        control = next(c for c in self._known if c.url == url)
        update = {"update_info": {"path": str(self._file(LOOKED_AT)), "compare": True}}
        try:
            self.prepare(LOOKED_AT)
            self.start(control)
            control.post("/update_weights", json=update, timeout=self.timeout)  # answers by refusing, which closes it
            answer = "nothing"
        except (ServerError, OSError) as error:
            answer = str(error)
        finally:
            self._file(LOOKED_AT).unlink(missing_ok=True)
        if found := re.search(COMPARED + "[^'\"]*", answer):
            return f"The server's weights {found.group()}"
        return f"Its weights could not be compared: {answer}"

    def cleanup(self, version: int) -> None:
        self._file(version).unlink()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _file(self, version: int) -> Path:
        return self.folder / f"version_{version}.safetensors"

    def _choose(self, fallback: Path) -> Path:
        with contextlib.suppress(OSError):
            if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * (self.bytes + RESERVE):
                return MEMORY
        return fallback


def write_safetensors(
    path: Path, shapes: dict[str, list[int]], dtype: str, tensors: "Iterable[tuple[str, Tensor]]"
) -> None:
    """Write one tensor after the other, so that one copy of the largest is all the memory this takes.

    shapes: what will come, in this order. dtype: of all, "float32", "bfloat16", ... The format: eight bytes with the
    length of a JSON header, the header, the tensors end to end (https://huggingface.co/docs/safetensors).
    """
    import torch

    size = getattr(torch, dtype).itemsize
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + size * int(torch.Size(shape).numel())
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    names: Iterator[str] = iter(shapes)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            assert name == next(names), f"{name}: not announced here"
            assert list(tensor.shape) == shapes[name], f"{name}: {tensor.shape}"
            assert str(tensor.dtype) == f"torch.{dtype}", f"{name}: {tensor.dtype}"
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        assert next(names, None) is None, "fewer tensors than announced"


def remove_dead(parent: Path) -> None:
    """Remove what runs left behind that no longer live: nobody holds their lock."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if time.time() - folder.stat().st_mtime > NEWBORN:
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it lives, or belongs to somebody else
            continue
