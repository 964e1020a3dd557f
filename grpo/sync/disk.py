"""sync=disk: the weights go through a file that trainer and servers both see. On one machine it lies in memory."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from grpo.sync.base import Control, SyncTimings, WeightSync
from grpo.sync.engine import BACKEND

MEMORY = Path("/dev/shm")
PREFIX = "grpo-weights-"


class DiskSync(WeightSync):
    """Writes `version_<n>.safetensors` while the servers generate; they read it while they are paused.

    folder: where; None takes memory where there is room for two versions, else `fallback` (the run folder).
    """

    backend = BACKEND

    def __init__(self, *, folder: str | None, fallback: Path, **common: Any) -> None:
        super().__init__(**common)
        self.bytes = sum(w.numel() * self.dtype.itemsize for _, w in self.policy.named_weights())
        parent = Path(folder) if folder is not None else self._choose(fallback)
        parent.mkdir(parents=True, exist_ok=True)
        remove_dead(parent)
        # the pid is in the name, so that a later run can tell whose remains these are
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))

    def attach(self) -> None:
        shapes = {name: list(weight.shape) for name, weight in self.policy.named_weights()}
        self.everywhere(
            lambda c: c.post(
                "/init_weight_transfer_engine", json={"init_info": {"shapes": shapes}}, timeout=self.timeout
            )
        )

    def prepare(self, version: int, timings: SyncTimings) -> None:
        free = shutil.disk_usage(self.folder).free
        if free < self.bytes:
            raise OSError(
                f"sync.dir={self.folder.parent}: {free / 1e9:.2f} GB free, a version of the weights needs "
                f"{self.bytes / 1e9:.2f} GB; choose another sync.dir"
            )
        aside = self._file(version).with_suffix(".tmp")
        weights = {n: w.to("cpu", self.dtype).contiguous() for n, w in self.policy.named_weights()}
        save_file(weights, aside)
        aside.rename(self._file(version))
        timings.bytes = self.bytes

    def transfer(self, version: int) -> None:
        body = {"update_info": {"path": str(self._file(version))}}
        finish = {"weight_version": str(version)}

        def one(control: Control) -> None:
            control.post("/start_weight_update", timeout=self.timeout)
            control.post("/update_weights", json=body, timeout=self.timeout)
            control.post("/finish_weight_update", json=finish, timeout=self.timeout)

        self.everywhere(one)

    def cleanup(self, version: int) -> None:
        self._file(version).unlink()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, version: int) -> Path:
        return self.folder / f"version_{version}.safetensors"

    def _choose(self, fallback: Path) -> Path:
        with contextlib.suppress(OSError):
            if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * self.bytes + (64 << 20):
                return MEMORY
        return fallback


def remove_dead(parent: Path) -> None:
    """Remove what runs left behind that no longer live."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
