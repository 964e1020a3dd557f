"""Completions beside the stream (evaluation, probes): no place, no account, the same episodes and rewards."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from grpo.rollout.client import Client, Sampled
from grpo.rollout.episode import Environments, EpisodeLost, Session, begin, extend, play, seeded
from grpo.rollout.errors import InvalidAnswer, RequestRefused
from grpo.types import Completion, Group, Prompt, Sampling

if TYPE_CHECKING:
    from grpo.rollout.loader import Scorer

log = logging.getLogger(__name__)


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
        evaluation draws the same random numbers.

        What the training stream would discard (an episode that was lost, an answer that cannot be used) is missing in
        its group, with a warning. Where nothing is left, the last unusable answer is raised, as it is for a probe.
        """
        lost: list[EpisodeLost | InvalidAnswer | RequestRefused] = []
        groups = await asyncio.gather(*(self._group(i, p, sampling, count, lost) for i, p in enumerate(prompts)))
        answers = [error for error in lost if not isinstance(error, EpisodeLost)]
        if answers and not any(group.completions for group in groups):
            raise answers[-1]
        if lost:
            log.warning("%d of %d completions are missing; the last: %s", len(lost), len(prompts) * count, lost[-1])
        return groups

    async def _group(
        self,
        place: int,
        prompt: Prompt,
        sampling: Sampling,
        count: int,
        lost: list[EpisodeLost | InvalidAnswer | RequestRefused],
    ) -> Group:
        try:
            prompt, sessions = await begin(self.environments, prompt, count)
        except EpisodeLost as error:
            lost += [error] * count
            return Group(-1, prompt, [])
        name = f"sample-{place}"
        group = Group(-1, prompt, [])
        asked = (self._one(name, prompt, sampling, i, s) for i, s in enumerate(sessions))
        for answer in await asyncio.gather(*asked):
            if isinstance(answer, Completion):
                group.completions.append(answer)
            else:
                lost.append(answer)
        return group

    async def _one(
        self, name: str, prompt: Prompt, sampling: Sampling, index: int, session: Session | None
    ) -> Completion | EpisodeLost | InvalidAnswer | RequestRefused:
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
        except (EpisodeLost, InvalidAnswer, RequestRefused) as error:
            if self.scorer is None:  # a probe: a proof with less than all of it proves less
                raise
            return error
        finally:
            if session is not None:
                await session.close()
        if self.scorer is not None:
            await self.scorer.score(prompt, completion)
        return completion
