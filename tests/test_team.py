"""A team whose members do not do their part: every wait ends, and with the reason. Each test has its own team."""

import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import ENDED, team_of

from grpo import distributed
from grpo.sharded import ShardedPolicy
from grpo.signals import Interrupted
from grpo.team import DEADLINE, TeamError

pytestmark = pytest.mark.slow


def test_a_rank_that_leaves_out_a_collective_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tiny_dir: Path
) -> None:
    """Passes of unequal number, say. Rank 0 gives up, and no follower stays behind."""
    with team_of(2) as (team, followers):
        monkeypatch.setattr("grpo.team.LAST_WORDS", 0.1)
        policy = team.make("policy", ShardedPolicy, tiny_dir, dtype="float32")
        world = policy.team.mesh.get_group()
        assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=DEADLINE)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), world)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            team.each("team", "everywhere", [("policy", "_gather", "lm_head.weight", torch.float32), ("team", "check")])
        with pytest.raises(TeamError, match="not in step"):
            team.everywhere("team", "check")
    assert followers[0].returncode == 0


def test_the_end_of_a_rank_is_the_reason_for_whatever_follows_and_the_end_of_the_others() -> None:
    with team_of(3) as (team, (killed, busy)):
        team.make("clock", SimpleNamespace, sleep=time.sleep)
        team._lines[2].send(("clock", "sleep", (10 * ENDED,)))  # it looks at nothing meanwhile
        killed.kill()
        killed.wait()
        with pytest.raises(TeamError, match="rank 1 of 3 failed: it ended without a word"), distributed.explained():
            raise Interrupted(signal.SIGTERM)  # which torchrun sends to all when one has ended
    assert busy.returncode == 1
