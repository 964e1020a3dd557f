"""What breaks a run from inside when it is told to, for `seconds.py`: a reward, two losses. Each notes when it did.

GRPO_DRILL names a folder: the fault strikes as soon as it holds a file `go`, and writes the time into `struck`.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.losses import PPOClip
from grpo.sync import disk


def struck() -> bool:
    """Whether the fault is due; the first time is noted."""
    folder = Path(os.environ["GRPO_DRILL"])
    if not (folder / "go").exists():
        return False
    if not (folder / "struck").exists():
        (folder / "struck").write_text(repr(time.time()))
    return True


def raises(prompt: str, completion: str) -> float:
    """A reward."""
    if struck():
        raise RuntimeError("the reward broke")
    return float(len(completion))


class NaN(PPOClip):
    """A loss that sees logits that are NaN."""

    def token_loss(self, tokens: Any) -> Any:
        if struck():
            tokens.log_ratio_N = tokens.log_ratio_N * torch.nan
        return super().token_loss(tokens)


class RefusedSync(PPOClip):
    """A loss in whose process the weights' file gets a wrong name, which a server refuses."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        write = disk.write_safetensors

        def misnamed(
            path: Path, shapes: dict[str, list[int]], dtype: str, tensors: Iterable[tuple[str, Tensor]]
        ) -> None:
            if struck():
                shapes = {f"x.{name}": shape for name, shape in shapes.items()}
                tensors = ((f"x.{name}", tensor) for name, tensor in tensors)
            write(path, shapes, dtype, tensors)

        disk.write_safetensors = misnamed
