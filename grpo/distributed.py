"""The ranks of `torchrun --nproc-per-node N run.py ...`: rank 0 is the run, the others follow it.

Rank 0 does what a single process does: it alone reads the command, claims the folder, talks to the servers. Followers
know nothing of a configuration. They wait here for rank 0's lines (`grpo.team`), then make and call what they are
told, and end when rank 0 ends. Nothing is heavy here: torch is imported once it is known that there are ranks.

| waits for | deadline | unblocked by |
| --- | --- | --- |
| a follower for rank 0's address | STARTUP | the address, "nobody is needed", torchrun's signal |
| rank 0 for the followers' lines | STARTUP | the last of them, torchrun's signal |
"""

import contextlib
import functools
import os
import secrets
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from grpo.rollout.guard import die_with_parent

if TYPE_CHECKING:
    from grpo.team import Team

STARTUP = 600.0  # seconds for every rank to be there
LOOK_EVERY = 2.0  # seconds
ECHO = 3.0  # seconds: torchrun hands a signal on at once, which may have reached its processes by itself too
ADDRESS = "grpo/address"  # in torchrun's store: host, port and key of rank 0's lines, or NOBODY
NOBODY = b""
NO_SIGNAL = 0


@dataclass(slots=True, frozen=True)
class Place:
    """Which process of how many this is, as torchrun says it. `local_*`: on this host."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """None without torchrun, and for a single process of it."""
    ranks = environment.get("WORLD_SIZE", "1")
    if not ranks.isdigit() or int(ranks) < 2 or "RANK" not in environment:
        return None
    rank = int(environment["RANK"])
    return Place(
        rank=rank,
        ranks=int(ranks),
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        local_ranks=int(environment.get("LOCAL_WORLD_SIZE", ranks)),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
    )


_team: "Team | None" = None


@contextlib.contextmanager
def ranks() -> Iterator[None]:
    """Around a whole command. Rank 0 runs it; a follower follows and its process ends here; without ranks, nothing."""
    here = place()
    if here is None:
        yield
        return
    if here.rank:
        sys.exit(follow(here))
    die_with_parent(signal.SIGTERM)  # torchrun itself may be killed
    try:
        yield
    finally:
        if _team is None:  # a dry run, --help, a mistake
            with contextlib.suppress(Exception):
                _store(here).set(ADDRESS, NOBODY)


def open_team(device: str, threads: int, here: Place | None = None) -> "Team | None":
    """Rank 0's team, when every follower has answered; None without ranks.

    device: cpu or cuda (each rank takes its own). threads: of each rank on the CPU. Raises TimeoutError.
    """
    global _team
    here = here or place()
    if here is None:
        return None
    from grpo.team import Line, Team

    store, key = _store(here), secrets.token_bytes(32)
    with socket.create_server((_own_address(here), 0), backlog=here.ranks) as listener:
        host, port = listener.getsockname()[:2]
        store.set(ADDRESS, f"{host} {port} {key.hex()} {device} {threads}".encode())
        lines: dict[int, Line] = {}
        deadline = time.monotonic() + STARTUP
        while len(lines) < here.ranks - 1:
            listener.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                line = Line.accepted(listener, key)
            except TimeoutError:
                missing = sorted(set(range(1, here.ranks)) - set(lines))
                raise TimeoutError(
                    f"ranks {missing} did not come within {STARTUP:g} s; see torchrun's output"
                ) from None
            if line is not None:
                lines[line.peer] = line
    _team = Team(here, device, store, lines)
    return _team


def close_team() -> None:
    """The followers end. Safe without any."""
    global _team
    team, _team = _team, None
    if team is not None:
        team.close()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Where a rank is gone, whatever happens to rank 0 is for that reason: raises TeamError, with the rank's own words.

    (Rank 0 sees a broken collective, or the signal that torchrun sends to all when one has ended.)
    """
    try:
        yield
    except BaseException as error:
        if _team is not None:
            _team.explain(error)
        raise


def check_command(*, multirun: bool) -> None:
    """Raises ValueError for a multirun under torchrun."""
    here = place()
    if here is not None and multirun:
        raise ValueError(
            f"-m under torchrun ({here.ranks} ranks): a multirun has many jobs in one process; start each by torchrun"
        )


def check_plan(*, mode: str, batch_size: int, minibatches: int, device: str, backend: str) -> None:
    """Raises ValueError where the settings do not go with the ranks."""
    here = place()
    if here is None:
        return
    under = f"under torchrun ({here.ranks} ranks)"
    if mode == "eval":
        raise ValueError(f"mode=eval {under}: nothing is trained; run it without torchrun")
    if batch_size // minibatches < here.ranks:
        raise ValueError(
            f"train.batch_size={batch_size}: {batch_size // minibatches} completions per optimizer step (train."
            f"minibatches={minibatches}) for {here.ranks} ranks; raise it, or lower torchrun's --nproc-per-node"
        )
    if device.startswith("cuda:"):
        raise ValueError(f"model.device={device} {under}: rank r takes GPU r of its host; use model.device=cuda")
    if device == "cuda":
        from grpo.rollout.flags import visible_gpus

        if (gpus := visible_gpus()) < here.local_ranks:
            raise ValueError(f"--nproc-per-node={here.local_ranks}: a rank takes a GPU, this host has {gpus}")
    if backend == "ipc":
        raise ValueError(
            f"sync=ipc {under}: vLLM's engine wants a handle from every rank's GPU; use sync=nccl (servers on other "
            "GPUs) or sync=disk"
        )


# ---- a follower's process ----


def follow(here: Place) -> int:
    """A follower's whole life; its exit status. What fails is told to rank 0, which says it where people look."""
    die_with_parent(signal.SIGKILL)
    quiet()
    found = _address(here)
    if found == NOBODY:
        return 0
    host, port, key, device, threads = found.decode().split()
    from grpo.team import Line, Team

    line = Line.connected(host, int(port), bytes.fromhex(key), here.rank)
    # From here on the end comes through the line: whoever ends all ranks must let rank 0 finish its step.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    die_with_parent(NO_SIGNAL)
    try:
        import torch
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        if device == "cpu":
            torch.set_num_threads(int(threads))
        Team(here, device, _store(here), {0: line}).follow()
    except BaseException as error:
        with contextlib.suppress(OSError):
            line.send(("failed", (isinstance(error, RuntimeError), traceback.format_exc())))
        return 1
    return 0


def quiet() -> None:
    """A follower says nothing on the screen that rank 0 says too."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)  # not the end, but every thread's stack, as with rank 0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")


def _address(here: Place) -> bytes:
    from torch.distributed import DistStoreError

    store = _store(here)
    deadline = time.monotonic() + STARTUP
    while True:
        with contextlib.suppress(DistStoreError):  # not there yet
            store.wait([ADDRESS], timedelta(seconds=LOOK_EVERY))
            found: bytes = store.get(ADDRESS)
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {here.rank}: rank 0 did not ask for its ranks within {STARTUP:g} s")


@functools.cache  # where rank 0 holds the store, it must stay
def _store(here: Place) -> Any:
    """torchrun's store, which every rank can reach."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        here.address,
        here.port,
        is_master=here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=STARTUP),
    )


def _own_address(here: Place) -> str:
    """Ours, as the other hosts reach it; 127.0.0.1 where there are none."""
    if here.ranks == here.local_ranks:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((here.address, 9))  # chooses a route and sends nothing
        own = str(probe.getsockname()[0])
    return socket.gethostbyname(here.address) if own.startswith("127.") else own
