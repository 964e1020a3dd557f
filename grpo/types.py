"""The records that travel between the parts, and the seams between them.

    Prompt -> (server) -> Completion x group_size -> Group -> trainer

Everything here is plain data, made in the loader's thread and handed over whole: after a `Group` has been
delivered, only the trainer's thread touches it. Tensors appear in `grpo.batch`, not here.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

# Accounts of the token ledger (law 6). A completion's `outcome` is one of these words, or
# "masked:<why>" / "discarded:<why>".
IN_FLIGHT = "in_flight"
TRAINED = "trained"


@dataclass(slots=True, frozen=True)
class Prompt:
    """One row of a data set, rendered and tokenized once. What is sent to the server is what is trained.

    `index` counts prompts in stream order over all epochs and is unique in a run; `row` names the row of the
    data set, e.g. "train/17", and repeats in each epoch. `columns` holds every column, for the reward.
    """

    index: int
    row: str
    text: str
    token_ids: list[int]
    columns: dict[str, Any]


@dataclass(slots=True, frozen=True)
class Turn:
    """A stretch of a completion: an answer of the policy, or what its environment put after one (an observation)."""

    by_policy: bool
    tokens: int
    text: str


@dataclass(slots=True)
class Completion:
    """What follows a prompt: the ids that the server sampled, and, between turns, those of observations.

    `logprobs` and `versions` have one entry for each *sampled* token, in order, as the server gave them; an observation
    has neither, so that nothing can train or count it by mistake. `logprobs` are natural logarithms under the
    distribution that was sampled (temperature applied). `versions[i]` is the number of the weight sync whose weights
    sampled token i. `finish_reason` is "stop", "length" (the answer or the whole was cut) or "turns" (there were too
    many); "" for one that was dropped before its end.

    `turns` is empty without an environment: then every token was sampled. `text` is the policy's last answer, which is
    what rewards read. `earned` is the sum of what the environment gave; None is "not scored". `policy_logprobs` are the
    trainer's for the sampled tokens, before the batch's first update; only where they are recorded (`TrainStep`).
    `unusable` counts the tokens of an answer that could not be used: booked, and nowhere else.
    """

    group: int
    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    text: str = ""
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    outcome: str = IN_FLIGHT
    turns: list[Turn] = field(default_factory=list)
    earned: float | None = None
    policy_logprobs: list[float] = field(default_factory=list)
    unusable: int = 0

    @property
    def tokens(self) -> int:
        """Sampled tokens, the only ones that are trained, counted or booked."""
        return len(self.logprobs) if self.turns else len(self.token_ids)

    @property
    def mask(self) -> list[bool]:
        """For each of `token_ids`: was it sampled by the policy?"""
        if not self.turns:
            return [True] * len(self.token_ids)
        return [turn.by_policy for turn in self.turns for _ in range(turn.tokens)]

    @property
    def transcript(self) -> str:
        """All of it, for people: answers and observations."""
        return "".join(turn.text for turn in self.turns) if self.turns else self.text

    @property
    def version_first(self) -> int:
        """The oldest version among the sampled tokens: the completion's lag counts from it (law 1)."""
        return min(self.versions)

    @property
    def version_last(self) -> int:
        return max(self.versions)

    @property
    def truncated(self) -> bool:
        """Ended by a limit, not by the policy or its environment."""
        return self.finish_reason != "stop"


@dataclass(slots=True)
class Group:
    """The completions of one prompt. `index` is its place in the stream; groups are consumed in this order.

    `discarded` is None for a group that is trained, else why it left the stream ("zero_variance:all_right", ...).
    `dropped` are those of its completions that never came to an end that can be used (refused, unusable answer, lost
    episode): they have their outcome, are booked already, and are only recorded.
    """

    index: int
    prompt: Prompt
    completions: list[Completion]
    discarded: str | None = None
    dropped: list[Completion] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class Sampling:
    """What the server is told for one request. Every field is sent, so no default of the server's is in force.

    Training samples the distribution that the trainer computes (law 4): only the temperature may be changed.
    Temperature 0 is greedy, for evaluation.
    """

    temperature: float
    max_tokens: int
    seed: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class PromptSource(Protocol):
    """A seeded, endless or finite stream of prompts that can start anywhere."""

    def prompt(self, index: int) -> Prompt | None:
        """The prompt at a place of the stream, or None where the stream has ended. A pure function of index."""
        ...


class Reward(Protocol):
    """Scores one completion. None means "not scored"; an exception ends the run (never a silent 0)."""

    async def __call__(self, prompt: Prompt, completion: Completion) -> float | None: ...
