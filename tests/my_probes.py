"""Losses for tests of multiruns. Each is made at the start of its job, and then notes what the process holds.

Notes go to the file that GRPO_PROBES names, one JSON line a job. `Probed` trains as PPOClip, `Fails` for two steps.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch

from grpo.losses import PPOClip


class Probed(PPOClip):
    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        with Path(os.environ["GRPO_PROBES"]).open("a") as file:
            file.write(json.dumps(held()) + "\n")


class Fails(Probed):
    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.calls = 0

    def token_loss(self, tokens: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("a loss that fails")
        return super().token_loss(tokens)


def held() -> dict[str, Any]:
    """What a job must not leave to the next one."""
    objects = gc.get_objects()
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "loops": sum(isinstance(o, asyncio.AbstractEventLoop) and not o.is_closed() for o in objects),
        "parameters": sum(isinstance(o, torch.nn.Parameter) for o in objects),
        "tensors": sum(type(o) is torch.Tensor and o.numel() > 1000 for o in objects),  # of an optimizer, say
        "files": sorted(name for name in files if name.startswith("/") and not name.startswith(("/dev", "/proc"))),
        "sockets": sum(name.startswith("socket:") for name in files),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "handlers": [str(getattr(h, "baseFilename", type(h).__name__)) for h in logging.getLogger().handlers],
        "wandb": _wandb(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _wandb() -> bool:
    try:
        import wandb
    except ImportError:
        return False
    return wandb.run is not None
