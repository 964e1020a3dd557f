"""Getting the policy's weights to the servers, as a numbered version, and proving that they arrived.

`auto` chooses a backend, `make_sync` builds it. Imported by vLLM's processes too (`grpo.sync.engine`), so nothing
heavy is imported here.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from grpo.model import Policy
    from grpo.settings import Sync
    from grpo.sync.base import Control, WeightSync


def auto(*, device: str, gpus: int, attached: bool, ranks: int = 1) -> tuple[str, str]:
    """Which backend `sync=auto` is, and why. device: the trainer's; gpus: on this machine, of which its processes there
    take `ranks`; attached: rollout.urls."""
    if device == "cpu":
        return "disk", "the trainer is on the CPU"
    if attached:
        return "disk", "the servers are not ours: a file is all that is sure to reach them (sync.dir)"
    if gpus > ranks:
        return "nccl", f"{gpus} GPUs: {'one' if ranks == 1 else ranks} for the trainer, the others for servers"
    if ranks > 1:
        return "disk", f"the servers share the {gpus} GPUs with the trainer's ranks"
    return "ipc", "trainer and server share the one GPU"


def make_sync(
    settings: "Sync",
    *,
    backend: str,
    controls: "list[Control]",
    policy: "Policy",
    dtype: "torch.dtype",
    folder: Path,
) -> "WeightSync":
    """The backend's object for these servers. `folder`: the run folder."""
    common: dict[str, Any] = {
        "controls": controls,
        "policy": policy,
        "dtype": dtype,
        "pause": settings.pause,
        "timeout": settings.timeout,
    }
    if backend == "disk":
        from grpo.sync.disk import DiskSync

        return DiskSync(folder=settings.dir, fallback=folder, **common)
    from grpo.sync.vllm import IPCSync, NCCLSync

    return {"ipc": IPCSync, "nccl": NCCLSync}[backend](**common)


def server_backend(backend: str) -> str:
    """What a server is told at its start."""
    from grpo.sync.engine import BACKEND

    return BACKEND if backend == "disk" else backend
