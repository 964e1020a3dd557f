"""What one process must not hand on from a job of a multirun to the next.

What ends with its owner is not here: threads, loops and processes (run.py's stack), signal handlers (`grpo.signals`),
random numbers (`grpo.seeds`, at the start of each run), log files (Hydra, which configures logging for each job). Left
out: modules, which Python imports once; one of the user's that counts in a global goes on counting.
"""

import contextlib
import gc
import sys
import traceback
from pathlib import Path


def clean() -> None:
    """Free the last job's tensors, compiled code and memory statistics. Starts no CUDA context."""
    gc.collect()
    with contextlib.suppress(OSError):  # Linux: the largest resident set is counted anew (`grpo.memory`)
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # it counts the models that one layer's code was compiled for, and gives up after some
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.ipc_collect()
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames in an error's traceback, and of those behind it.

    Hydra keeps the error of a failed job until the last one has ended; with it would stay all that `run.py` had in its
    hands, the model and the optimizer first.
    """
    for one in chain(error):
        traceback.clear_frames(one.__traceback__)


def chain(error: BaseException | None) -> list[BaseException]:
    """An error and all that are behind it, each once."""
    found: list[BaseException] = []
    queue = [error]
    while queue:
        one = queue.pop()
        if one is not None and one not in found:
            found.append(one)
            queue += [one.__cause__, one.__context__]
    return found
