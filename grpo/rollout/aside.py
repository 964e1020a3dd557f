"""Completions beside the stream (evaluation, probes): no place, no account, the same episodes and rewards."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from grpo.rollout.client import Client, Sampled
from grpo.rollout.episode import Environments, Session, begin, extend, play, seeded
from grpo.types import Completion, Group, Prompt, Sampling

if TYPE_CHECKING:
    from grpo.rollout.loader import Scorer


@dataclass(slots=True, frozen=True)
class Aside:
    """scorer, environments: None for probes. seed: None leaves the seeds to the server. url: the server to ask."""

    client: Client
    scorer: "Scorer | None"
    environments: Environments | None
    decode: Callable[[list[int]], str]
    seed: int | None
    url: str | None

    async def sample(self, prompts: list[Prompt], sampling: Sampling, count: int) -> list[Group]:
        """`count` completions of each prompt. The seeds depend on the prompts' places in the list only, so every
        evaluation draws the same random numbers."""
        return await asyncio.gather(*(self._group(place, p, sampling, count) for place, p in enumerate(prompts)))

    async def _group(self, place: int, prompt: Prompt, sampling: Sampling, count: int) -> Group:
        prompt, sessions = await begin(self.environments, prompt, count)
        name = f"sample-{place}"
        found = await asyncio.gather(*(self._one(name, prompt, sampling, i, s) for i, s in enumerate(sessions)))
        return Group(-1, prompt, found)

    async def _one(
        self, name: str, prompt: Prompt, sampling: Sampling, index: int, session: Session | None
    ) -> Completion:
        async def ask(ids: list[int], turn_sampling: Sampling, turn: int) -> Sampled:
            return await self.client.generate(
                ids,
                seeded(turn_sampling, self.seed, name, index, turn),
                request_id=f"{name}-{self.seed}-{index}-{turn}-{time.monotonic_ns()}",
                url=self.url,
            )

        completion = Completion(-1, index, [], [], [], "")
        arrived = partial(extend, completion)
        try:
            await play(completion, prompt, sampling, session, ask=ask, decode=self.decode, arrived=arrived)
        finally:
            if session is not None:
                await session.close()
        if self.scorer is not None:
            await self.scorer.score(prompt, completion)
        return completion
