"""Rewards that compare text: no process, no deadline, because each takes microseconds whatever the policy writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo.rewards.base import ANSWER, Reward
from grpo.rewards.extract import find_answer, last_number, whole_number
from grpo.rewards.options import above, one_of
from grpo.types import Completion, Prompt


def check_place(key: str, *, after: str | None, tag: str | None, boxed: bool) -> None:
    """Where an answer stands is one place."""
    if sum((after is not None, tag is not None, boxed)) > 1:
        raise ValueError(f"{key}: give one of after, tag and boxed")
    if after == "" or tag == "":
        raise ValueError(f"{key}: after and tag must not be empty; null turns them off")


@dataclass(kw_only=True)
class AnswerReward(Reward):
    r"""Finds the answer: after the last `after`, in the last <tag>, in the last \boxed{}, or all of the completion."""

    NEEDS_ANSWER: ClassVar[bool] = True

    after: str | None = None
    tag: str | None = None
    boxed: bool = False

    def check_options(self) -> None:
        check_place(self.key, after=self.after, tag=self.tag, boxed=self.boxed)

    def given(self, completion: Completion) -> str | None:
        return find_answer(completion.text, after=self.after, tag=self.tag, boxed=self.boxed)


@dataclass(kw_only=True)
class ExactMatch(AnswerReward):
    """1 when the answer is the gold, character by character apart from space around it; else 0."""

    KIND: ClassVar[str] = "exact_match"

    ignore_case: bool = False

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        given, gold = self.given(completion), str(prompt.columns[ANSWER])
        if given is None:
            return 0.0
        if self.ignore_case:
            given, gold = given.casefold(), gold.casefold()
        return float(given.strip() == gold.strip())


@dataclass(kw_only=True)
class NumberMatch(AnswerReward):
    """1 when the last number of the answer equals the gold as a number (1,000 = 1000.0); else 0."""

    KIND: ClassVar[str] = "number_match"

    async def unreadable(self, answers: Sequence[str]) -> set[str]:
        return {a for a in answers if whole_number(a) is None}

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        gold = whole_number(str(prompt.columns[ANSWER]))
        assert gold is not None, f"row {prompt.row}: its answer is no number, yet it was not left out"
        given = self.given(completion)
        return float(given is not None and last_number(given) == gold)


@dataclass(kw_only=True)
class Length(Reward):
    """0 at `target`, falling by 1 for each `scale` that the completion is longer or shorter: the toy reward of minimal
    loops, which learn to write completions of a given length."""

    KIND: ClassVar[str] = "length"

    target: int = 20
    unit: str = "tokens"
    scale: float = 1.0

    def check_options(self) -> None:
        one_of(("tokens", "characters"), self.key, unit=self.unit)
        above(0, self.key, target=self.target, scale=self.scale)

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        length = completion.tokens if self.unit == "tokens" else len(completion.text)
        return -abs(length - self.target) / self.scale


@dataclass(kw_only=True)
class Overlong(Reward):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), in tokens.

    0 up to `max_tokens - cache`, then falling linearly to -1 at `max_tokens`, -1 beyond. A completion that was cut by
    the token limit counts as `max_tokens` long, however the limits are set.
    """

    KIND: ClassVar[str] = "overlong"

    max_tokens: int
    cache: int

    def check_options(self) -> None:
        above(0, self.key, max_tokens=self.max_tokens, cache=self.cache)
        if self.cache >= self.max_tokens:
            raise ValueError(f"{self.key}.cache={self.cache}: must be below max_tokens={self.max_tokens}")

    async def score(self, prompt: Prompt, completion: Completion) -> float:
        length = self.max_tokens if completion.truncated else completion.tokens
        return max(-1.0, min(0.0, (self.max_tokens - self.cache - length) / self.cache))
