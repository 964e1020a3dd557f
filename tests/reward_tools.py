"""Prompts, completions and rewards for the tests of rewards."""

import asyncio
from pathlib import Path
from typing import Any

from grpo.rewards import Rewards, build_rewards
from grpo.types import Completion, Prompt

MINE = Path(__file__).parent / "my_rewards.py"


def row(**columns: Any) -> Prompt:
    return Prompt(0, "train/0", "question", [1], {"answer": "4"} | columns)


def completion(text: str = "4", *, tokens: int = 1, finish_reason: str = "stop", group: int = 0) -> Completion:
    return Completion(group, 0, [1] * tokens, [0.0] * tokens, [0] * tokens, finish_reason, text=text)


def make(spec: Any, **options: Any) -> Rewards:
    entries = [{"kind": spec, **options}] if isinstance(spec, str) else spec
    return Rewards(build_rewards(entries, max_tokens=100))


def mine(name: str, **options: Any) -> Rewards:
    return make(f"{MINE}:{name}", **options)


async def score_all(rewards: Rewards, completions: list[Completion], prompt: Prompt | None = None) -> None:
    await asyncio.gather(*(rewards.score(prompt or row(), c) for c in completions))


def score(rewards: Rewards, *texts: str, prompt: Prompt | None = None) -> list[float | None]:
    completions = [completion(text) for text in texts]
    with rewards:
        asyncio.run(score_all(rewards, completions, prompt))
    return [c.reward for c in completions]
