"""What a reward is: an object with options that scores one completion, or says "not scored" (None).

A reward is inline (pure text, microseconds: it runs in the loader's loop) or not (it has processes or connections, and
runs in the loop of its own thread, `side.py`). Errors are raised as RewardError; `combined.py` decides what they mean.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.rewards.options import check_types, one_of
from grpo.types import Completion, Prompt

# Under this name the right answer of a row, as text, reaches every reward (grpo/data/rows.py puts it there).
ANSWER = "answer"


class RewardError(RuntimeError):
    """A reward failed; the message has the user's own traceback, where there is one."""


class RewardTimeoutError(RewardError):
    """A reward did not answer within its deadline."""


@dataclass(kw_only=True)
class Reward:
    """Base of all rewards. `on_error`: "raise" ends the run, "unscored" leaves the completion without a reward."""

    KIND: ClassVar[str]
    INLINE: ClassVar[bool] = True
    NEEDS_ANSWER: ClassVar[bool] = False
    # The column in which it finds the right answer by itself, whatever `data.answer` is.
    OWN_ANSWER: ClassVar[str | None] = None

    name: str
    on_error: str = "raise"

    def __post_init__(self) -> None:
        check_types(self, self.key)
        one_of(("raise", "unscored"), self.key, on_error=self.on_error)
        self.check_options()

    @property
    def key(self) -> str:
        """How the user reaches this reward's options, for messages."""
        return f"data.reward[{self.name}]"

    def check_options(self) -> None:
        """What types alone do not say. Raises ValueError."""

    def check(self) -> None:
        """What can be seen before anything is loaded (files, modules). Raises ValueError."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError when the data set has not the columns that the reward asks for."""

    async def start(self) -> None:
        """Called once, in the side loop, for rewards that are not inline. Does not wait for what it starts."""

    async def ready(self) -> None:
        """Waits until the reward is loaded. Raises RewardError when it cannot be."""

    async def close(self) -> None:
        """Ends what `start` and `score` have started. In the side loop."""

    async def unreadable(self, answers: Sequence[str]) -> set[str]:
        """The gold answers that this reward cannot read; their rows are left out when the data is loaded."""
        return set()

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        raise NotImplementedError


def to_number(value: Any) -> float | None:
    """What a reward returned, as a float, or None for "not scored". Raises ValueError for anything else.

    Numbers of numpy and tensors of one element are numbers; a string, a list, NaN and infinities are not rewards.
    """
    if value is None:
        return None
    if not isinstance(value, int | float) and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, list | tuple | dict | set) or hasattr(value, "__len__"):
        what = "a text" if isinstance(value, str) else f"{type(value).__name__} of {len(value)}"
        raise ValueError(f"returned {what} ({_short(value)}); one completion has one number (or None: not scored)")
    if not isinstance(value, int | float):
        raise ValueError(f"returned {type(value).__name__} ({_short(value)}); expected a number (or None: not scored)")
    try:
        number = float(value)
    except OverflowError:  # a whole number may be larger than any float
        raise ValueError("returned a whole number beyond every float; expected one that a float can hold") from None
    if not math.isfinite(number):
        raise ValueError(f"returned {value}; expected a finite number (or None: not scored)")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
