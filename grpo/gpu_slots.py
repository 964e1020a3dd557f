"""GPUs of jobs that run at the same time on one machine (hydra/launcher=joblib, submitit_local): each has its own.

The sweep's process says which GPUs there are (`announce`), since a launcher may hide them from its jobs. A job takes a
slot of `gpus_per_job` of them under a lock, the one of its number where that is free, and waits while all are taken; it
must do so before anything asks for a GPU. A process that runs several jobs keeps to its slot, since CUDA cannot move.
Left out: SLURM, which gives each job its GPUs itself, and GPUs that another sweep uses.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from grpo.record import gpu_names

GPUS = "GRPO_GPUS"  # in the environment of a sweep's jobs: the GPUs of them all
FOLDER = ".gpus"  # of locks, in the sweep's folder
POLL = 0.5  # seconds

_slot: list[int] = []  # of this process, once it has one


def announce() -> None:
    """In the sweep's process, before its jobs start: the GPUs that it may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(len(gpu_names()))] if visible is None else visible.split(",")
    os.environ[GPUS] = ",".join(name for name in names if name)


@contextlib.contextmanager
def own_gpus(sweep: Path, job: int, count: object) -> Iterator[None]:
    """CUDA_VISIBLE_DEVICES is the job's own inside the `with` block; nothing changes where there is no GPU.

    count: `gpus_per_job`. Raises ValueError when there are fewer.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"gpus_per_job={count!r}: expected a whole number, at least 1")
    names = [name for name in os.environ.get(GPUS, "").split(",") if name]
    if not names:
        yield
        return
    slots = len(names) // count
    if slots == 0:
        raise ValueError(f"gpus_per_job={count}: this machine has {len(names)}")
    order = _slot or [(job + i) % slots for i in range(slots)]
    (sweep / FOLDER).mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        taken = None
        while taken is None:
            taken = next((slot for slot in order if _lock(sweep / FOLDER / str(slot), stack)), None)
            if taken is None:
                time.sleep(POLL)
        _slot[:] = [taken]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[taken * count : (taken + 1) * count])
        yield


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Whether the lock is ours now, until the stack closes. The kernel drops it with the process, however it ends."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    stack.callback(file.close)
    return True
