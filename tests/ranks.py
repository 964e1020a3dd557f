"""A team of several ranks for tests: this process is rank 0, the followers are processes as torchrun starts them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from composed import ROOT
from torch.distributed import TCPStore

from grpo import distributed
from grpo.distributed import Place
from grpo.team import Team

ENDED = 30.0  # seconds in which a follower must be gone


@contextlib.contextmanager
def team_of(ranks: int) -> Iterator[tuple[Team, list["subprocess.Popen[bytes]"]]]:
    """The team, and its followers' processes; none of them outlives the block."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
        "OMP_NUM_THREADS": "1",
    }
    followers = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "run.py")], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(1, ranks)
    ]
    before = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        team = distributed.open_team("cpu", 1, Place(0, ranks, 0, ranks, "127.0.0.1", store.port))
        assert team is not None
        yield team, followers
    finally:
        distributed.close_team()
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
        if before is not None:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = before
        try:
            for follower in followers:
                follower.wait(ENDED)
        finally:
            for follower in followers:
                follower.kill()
                follower.wait()
