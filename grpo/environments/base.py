"""What an environment is, and what every kind of it has.

An environment lives for one completion: `reset` with the row's columns, then `step` with each answer of the policy.
Both may be plain functions or coroutines. A `Kind` is what `data.environment` names: options, and what makes
environments.
"""

from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from grpo.rewards.options import above, at_least, check_types, one_of

if TYPE_CHECKING:
    from grpo.environments.borders import Borders

KEY = "data.environment"

# A chat so far ({"role": ..., "content": ...} each), or text; None from `reset` is the prompt that the data set makes.
Messages = list[dict[str, Any]] | str
# What the policy sees next, the reward of this answer (0.0 for none; None is "not scored"), and whether it is over.
Step = tuple[Messages | None, float | None, bool]


class EnvironmentFailed(RuntimeError):  # noqa: N818
    """An environment raised, was late or returned nonsense; the message has its own traceback where there is one."""


class Environment(Protocol):
    """`close`, where there is one, is called when the completion has ended, in whatever way."""

    def reset(self, row: dict[str, Any]) -> Messages | Awaitable[Messages | None] | None: ...

    def step(self, completion: str) -> Step | Awaitable[Step]: ...


@dataclass(kw_only=True)
class Kind:
    """Base of all kinds.

    max_turns: answers of the policy per completion at most. max_turn_tokens: the longest answer (null: what is left of
    data.max_tokens, which is the limit of all turns and observations together). timeout: seconds for one call.
    on_error: "raise" ends the run, "discard" leaves the completion out and counts it. concurrency: calls at once.
    """

    # Its methods are plain text work of microseconds: they run where the requests do.
    INLINE: ClassVar[bool] = False
    # It keeps `timeout` itself, for something smaller than a call of its methods.
    OWN_DEADLINE: ClassVar[bool] = False

    max_turns: int = 8
    max_turn_tokens: int | None = None
    timeout: float = 30.0
    on_error: str = "raise"
    concurrency: int = 64

    def __post_init__(self) -> None:
        check_types(self, KEY)
        at_least(1, KEY, max_turns=self.max_turns, max_turn_tokens=self.max_turn_tokens, concurrency=self.concurrency)
        above(0, KEY, timeout=self.timeout)
        one_of(("raise", "discard"), KEY, on_error=self.on_error)
        self.check_options()

    def check_options(self) -> None:
        """What types alone do not say. Raises ValueError."""

    def check(self) -> None:
        """What can be seen before anything is loaded (files, modules). Raises ValueError."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError when the data has not the columns that the environment asks for."""

    def template_arguments(self) -> Mapping[str, Any]:
        """What the chat template needs to know besides the messages. Raises ValueError."""
        return {}

    def check_template(self, borders: "Borders") -> None:
        """Raises ValueError when the model's chat template does not do what the environment needs."""
        borders.check()

    async def start(self) -> None:
        """Starts what the environments share (processes, connections). In the side loop."""

    async def close(self) -> None:
        """Ends what `start` has started."""

    def make(self) -> Environment:
        """A fresh environment for one completion."""
        raise NotImplementedError
