"""One completion from its first request to its end: the policy's turns, with an environment's observations in between.

    prompt -> answer -> observation -> answer -> ... -> answer

Token ids are only ever extended: an answer's ids stay as they were sampled, an observation's are put behind them, and
the next request sends all of them. Nothing is decoded and encoded again (law 3), so the trainer reads what the sampler
read. Each turn is a request with an id and a seed of its own; a sync may come between two turns, and the lag of the
completion is that of its oldest sampled token (law 1).

Without an environment there is one turn, and that is the whole of it. Left out: branching, and going back.

| ends | finish_reason |
| --- | --- |
| no environment, or it says done | "stop" |
| an answer was cut, or the next one has no room left | "length" |
| the last turn that is allowed was made, and the environment would go on | "turns" |

An answer that was cut is no action: the environment never sees it.
"""

import hashlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from grpo.types import Completion, Prompt, Sampling, Turn

if TYPE_CHECKING:
    from grpo.rollout.client import Sampled


class EpisodeLost(Exception):  # noqa: N818 (a verdict, counted; not a failure of the run)
    """The environment failed, and its failures are not to end the run. `reason` is a word for the ledger."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True, frozen=True)
class Observation:
    """What goes behind an answer before the policy goes on: ids, opening the policy's next turn, and their text."""

    token_ids: list[int]
    text: str


class Session(Protocol):
    """The environment of one completion. `earned`: the sum of its rewards so far, None for "not scored"."""

    max_turns: int
    max_turn_tokens: int | None

    @property
    def earned(self) -> float | None: ...

    async def step(self, answer: str, last_id: int) -> Observation | None:
        """What follows an answer (as text, and its last id); None when the episode is over."""
        ...

    async def close(self) -> None: ...


class Environments(Protocol):
    """Begins episodes. One object for a whole run; its calls block nothing."""

    async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
        """`count` fresh environments for completions of one prompt, and the prompt that all of them begin with.

        None for a completion without an environment. Raises EpisodeLost when there can be no episode.
        """
        ...


def extend(completion: Completion, answer: "Sampled") -> None:
    """Put an answer behind what is there."""
    completion.token_ids += answer.token_ids
    completion.logprobs += answer.logprobs
    completion.versions += answer.versions


async def begin(environments: Environments | None, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
    """As `Environments.begin`; without environments, nothing is changed."""
    return (prompt, [None] * count) if environments is None else await environments.begin(prompt, count)


def seeded(sampling: Sampling, seed: int | None, place: int | str, index: int, turn: int) -> Sampling:
    """With a seed of its own for every answer: equal prompt and seed would give equal completions.

    seed: the run's; None leaves it to the server. place: the group's in the stream. index: the completion's in it.
    """
    if seed is None:
        return replace(sampling, seed=None)
    name = f"{seed}/{place}/{index}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 11)  # 53 bits: exact in any JSON reader


# Ask the servers for one answer: ids so far, sampling with the turn's limit, the number of the turn from 0.
Ask = Callable[[list[int], Sampling, int], "Awaitable[Sampled]"]


async def play(
    completion: Completion,
    prompt: Prompt,
    sampling: Sampling,
    session: Session | None,
    *,
    ask: Ask,
    decode: Callable[[list[int]], str],
    arrived: "Callable[[Sampled], None]",
) -> None:
    """Fill `completion`. `arrived` adds an answer to it, with whatever lock and account the caller has.

    `sampling.max_tokens` is the limit of all turns and observations together. Raises what `ask` and the environment
    raise; the completion then holds the turns so far.
    """
    for turn in itertools.count():
        room = sampling.max_tokens - len(completion.token_ids)
        most = room if session is None or session.max_turn_tokens is None else min(room, session.max_turn_tokens)
        answer = await ask([*prompt.token_ids, *completion.token_ids], replace(sampling, max_tokens=most), turn)
        arrived(answer)
        completion.text = decode(answer.token_ids)
        completion.finish_reason = answer.finish_reason
        if session is None:
            return
        completion.turns.append(Turn(True, len(answer.token_ids), completion.text))
        completion.earned = session.earned
        if completion.truncated:
            return
        observation = await session.step(completion.text, answer.token_ids[-1])
        completion.earned = session.earned
        if observation is None:
            return
        if turn + 1 == session.max_turns:
            completion.finish_reason = "turns"
            return
        if len(completion.token_ids) + len(observation.token_ids) >= sampling.max_tokens:
            completion.finish_reason = "length"
            return
        completion.token_ids.extend(observation.token_ids)
        completion.turns.append(Turn(False, len(observation.token_ids), observation.text))
