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


@dataclass(slots=True)
class Completion:
    """One sampled completion: ids, logprobs and weight versions as the server gave them, one of each per token.

    `logprobs` are natural logarithms under the distribution that was sampled (temperature applied). `versions[i]` is
    the number of the weight sync whose weights sampled token i. `finish_reason` is "stop" or "length".
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

    @property
    def version_first(self) -> int:
        """The oldest version among the tokens: the completion's lag counts from it (law 1)."""
        return min(self.versions)

    @property
    def version_last(self) -> int:
        return max(self.versions)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(slots=True)
class Group:
    """The completions of one prompt. `index` is its place in the stream; groups are consumed in this order.

    `discarded` is None for a group that is trained, else why it left the stream ("zero_variance:all_right", ...).
    """

    index: int
    prompt: Prompt
    completions: list[Completion]
    discarded: str | None = None


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
