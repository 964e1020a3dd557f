r"""Mathematical equality with math-verify (sympy): 1/2 = 0.5 = \frac12, {1,2} = {2,1}, (x+1)^2 = x^2+2x+1.

In worker processes: sympy can take for ever over `9!!!!`, math-verify's own timeout works in a main thread only, and
both hold the interpreter for milliseconds a call. What departs from the library, each for a fault seen:

- Only the last \boxed{} is an answer; none, or an unfinished one, is wrong. (The library by itself takes an earlier box
  for an unfinished last one, and two boxes for a set.)
- The gold is the first argument: the comparison is not symmetric.
- Words are compared as words, whatever their case. (To sympy `yes` is the product e*s*y, and equals `sye`.)
- 10\% is ten per cent: equal to 10% and 0.1, and also to 10, as golds leave the sign out.
- A completion that takes longer than `timeout` is not scored; it is neither right nor shown to be wrong.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.rewards.base import ANSWER, RewardError
from grpo.rewards.extract import last_boxed
from grpo.rewards.isolated import IsolatedReward
from grpo.types import Completion, Prompt

# Golds of this form are read without sympy: most golds of most sets are, and it takes milliseconds a gold.
PLAIN = re.compile(r"-?\d{1,15}(\.\d{1,10})?|-?\d{1,3}(,\d{3})+|-?\\frac\{\d{1,9}\}\{[1-9]\d{0,8}\}")
GOLDS_AT_ONCE = 64  # in one call to a worker
# Between groups of three digits: 1{,}000, 1\,000 and 1 000, which sympy reads as 1 times 0.
GROUPS = re.compile(r"(?<=\d)(?:\{,\}|\\[,;:! ]|[ ~])(?=\d{3}(?!\d))")
# What may take for ever to evaluate. (To try every gold would take half a second for ten of them.)
COSTLY = re.compile(r"!|\^.*\^|\\(?:sum|prod|int|binom|dbinom|lim)")
WORDS = re.compile(r"[^\W\d_]{2,}([ '\-][^\W\d_]+)*")


@dataclass(kw_only=True)
class MathVerify(IsolatedReward):
    r"""1 when the answer in the last \boxed{} equals the gold, else 0. `boxed: false` takes the whole completion as the
    answer, for policies that answer with nothing else."""

    KIND: ClassVar[str] = "math_verify"
    NEEDS_ANSWER: ClassVar[bool] = True
    TARGET: ClassVar[str] = "grpo.rewards.math_verify:prepare"
    COMPUTES: ClassVar[bool] = True

    on_error: str = "unscored"
    boxed: bool = True
    timeout: float = 5.0

    def options(self) -> dict[str, Any]:
        return {}

    def arguments(self, prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
        return ([prompt.columns[ANSWER]], last_boxed(completion.text) if self.boxed else completion.text)

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        (gold,), given = self.arguments(prompt, completion)
        if given is None or not given.strip():
            return 0.0
        verdict: bool = await self.pool.call([gold], given)
        return float(verdict)

    async def unreadable(self, answers: Sequence[str]) -> set[str]:
        doubtful = [a for a in answers if not PLAIN.fullmatch(a)]
        chunks = [doubtful[i : i + GOLDS_AT_ONCE] for i in range(0, len(doubtful), GOLDS_AT_ONCE)]
        results = await asyncio.gather(*(self._unreadable(chunk) for chunk in chunks))
        return {gold for result in results for gold in result}

    async def _unreadable(self, golds: list[str]) -> list[str]:
        """A gold over which the parser hangs or crashes is one that cannot be read."""
        try:
            found: list[str] = await self.pool.call(golds, None, timeout=self.timeout * (1 + len(golds) / 8))
            return found
        except RewardError:
            if len(golds) == 1:
                return golds
            middle = len(golds) // 2
            return await self._unreadable(golds[:middle]) + await self._unreadable(golds[middle:])


# ---- in the worker ----


def prepare() -> Callable[[list[str], str | None], bool | list[str]]:
    """judge([gold], answer) -> equal?   judge(golds, None) -> those that cannot be read."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that we keep the time ourselves

    def judge(golds: list[str], given: str | None) -> bool | list[str]:
        if given is None:
            return [gold for gold in golds if not is_readable(gold)]
        return is_equal(golds[0], given)

    assert judge(["1/2"], "0.5"), "math-verify does not work"  # its first call builds a parser: not in a deadline
    return judge


def is_readable(gold: str) -> bool:
    """Whether it is words, or a formula that can be parsed and compared: `9!!!!` is parsed at once, compared never."""
    from sympy import Basic, MatrixBase  # type: ignore[import-untyped]

    if as_words(gold) is not None:
        return True
    if COSTLY.search(gold):
        is_equal(gold, "0.123456789")
    return any(isinstance(value, Basic | MatrixBase) for value in parse(gold))


def is_equal(gold: str, given: str) -> bool:
    """Whether `given` is the answer `gold`, both the content of a box."""
    from math_verify import verify

    if normalize(gold) == normalize(given):
        return True
    gold_words, given_words = as_words(gold), as_words(given)
    if gold_words is not None and given_words is not None:
        return gold_words == given_words
    try:
        equal: bool = verify(parse(gold), parse(given), timeout_seconds=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise  # the comparison was not made
    except Exception:  # sympy cannot compare a matrix with a word, and says so in a dozen ways: not equal
        return False
    return equal


def parse(text: str) -> list[Any]:
    """What math-verify makes of the content of a box: sympy objects, then the text; [] when it finds nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify import parse as parse_text

    parsed: list[Any] = parse_text(
        f"${normalize(text)}$",
        extraction_config=[LatexExtractionConfig(), ExprExtractionConfig()],
        parsing_timeout=None,
    )
    return parsed


def normalize(text: str) -> str:
    r"""The content of a box as a bare formula: no $ or \( \), no line breaks, % for \%, 1000 for 1\,000."""
    inner = last_boxed(text)
    text = text if inner is None else inner
    text = re.sub(r"(?<!\\)(\$|\\[()\[\]])", " ", text)
    text = " ".join(text.replace(r"\%", "%").split())
    return GROUPS.sub("", text)


def as_words(text: str) -> str | None:
    r"""The words that an answer is, case folded, when it is nothing else: `\text{Monday}`, `no solution`, `even`."""
    text = normalize(text)
    inner = re.fullmatch(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}", text)
    text = (inner[1] if inner else text).strip(" .")
    return text.casefold() if WORDS.fullmatch(text) else None
