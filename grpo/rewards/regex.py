"""Whether a completion has a form: the user's regular expression. In a worker, because it can backtrack for ever."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.rewards.isolated import IsolatedReward
from grpo.types import Completion, Prompt


@dataclass(kw_only=True)
class Format(IsolatedReward):
    r"""1 when `pattern` is found in the completion (`.` matches line breaks; anchor with ^ and \Z), else 0."""

    KIND: ClassVar[str] = "format"
    TARGET: ClassVar[str] = "grpo.rewards.regex:prepare"
    COMPUTES: ClassVar[bool] = True

    pattern: str
    on_error: str = "unscored"
    timeout: float = 2.0

    def check_options(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{self.key}.pattern={self.pattern!r}: {error}") from None

    def options(self) -> dict[str, Any]:
        return {"pattern": self.pattern}

    def arguments(self, prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
        return (completion.text,)


def prepare(pattern: str) -> Callable[[str], float]:
    """In the worker."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text: float(compiled.search(text) is not None)
