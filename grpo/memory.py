"""How much memory the trainer has taken at most: of its GPU, or of the machine where it has none."""

import resource

import torch


def peak_gb(device: torch.device) -> float:
    """GB (1e9 bytes): allocated by torch on CUDA, else the largest resident set.

    Since the process began; in a multirun since the last job ended (`grpo.isolation`).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts in KiB
