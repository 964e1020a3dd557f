"""Each step's line says what each reward did: values, seconds, failures."""

import asyncio
from pathlib import Path

import command
import pytest
from fake_server import FakeServer
from loop import loop

from grpo.rewards import Rewards
from grpo.rewards.base import Reward
from grpo.rewards.text import Length
from grpo.types import Completion, Prompt


class Moody(Reward):
    """Fails on the first completion of each group."""

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        if completion.index == 0:
            raise ValueError("not this one")
        return 1.0


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_every_line_has_the_figures_of_every_reward(server: FakeServer, tmp_path: Path, max_staleness: int) -> None:
    """However far generation runs ahead, the values are of the step's own completions."""
    rewards = Rewards([(Length(name="short", target=1), 1.0), (Moody(name="moody", on_error="unscored"), 0.5)])
    with (
        rewards,
        loop(
            *([server.url], server.model_dir, tmp_path),
            steps=4,
            scorer=rewards,
            zero_variance="keep",
            max_staleness=max_staleness,
        ) as trainer,
    ):
        before = Completion(-1, 0, [5], [-1.0], [0], "stop")  # as the first evaluation's: it belongs to no step
        asyncio.run(rewards.score(Prompt(-1, "r", "p", [3], {}), before))
        trainer.run()
    lines = command.lines(tmp_path / "metrics.jsonl")
    rollouts = command.lines(tmp_path / "rollouts.jsonl")
    assert len(lines) == 4
    for line in lines:
        own = [r for r in rollouts if r["step"] == line["step"]]
        values = [r["rewards"]["short"] for r in own]
        mean = sum(values) / len(values)
        assert line["reward/short/mean"] == pytest.approx(mean)
        assert line["reward/short/std"] == pytest.approx((sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5)
        assert line["reward/moody/mean"] == 1.0
        if max_staleness == 0:  # the calls are those of this step's two groups: none is made before the sync
            assert line["reward/short/errors"] == line["reward/short/timeouts"] == line["reward/short/unscored"] == 0
            assert 0 <= line["reward/short/seconds_mean"] <= line["reward/short/seconds_max"]
            assert line["reward/moody/errors"] == line["reward/moody/unscored"] == 2  # one in each group
    if max_staleness:  # generation may run ahead, and each call is still counted in one line
        assert sum(line.get("reward/moody/errors", 0) for line in lines) == 8
