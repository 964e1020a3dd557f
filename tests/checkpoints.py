"""Checkpoints for tests that need none of a real model."""

from pathlib import Path

import torch
from safetensors.torch import save_file


def readable(checkpoint: Path, step: int) -> None:
    """A checkpoint as far as a look at it goes."""
    checkpoint.mkdir(parents=True)
    torch.save({"progress": {"step": step}}, checkpoint / "trainer.pt")
    (checkpoint / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, checkpoint / "model.safetensors")
