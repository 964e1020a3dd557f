"""reasoning-gym's own scorers, for rows of `data=reasoning_gym`. Many give part of a point for a part of the answer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.rewards.base import ANSWER, to_number
from grpo.rewards.extract import find_answer
from grpo.rewards.isolated import IsolatedReward
from grpo.rewards.text import check_place
from grpo.types import Completion, Prompt

# The columns that make up an entry of reasoning-gym, and the name of its task.
ENTRY = ("question", ANSWER, "metadata")
TASK = "task"


@dataclass(kw_only=True)
class ReasoningGym(IsolatedReward):
    r"""The task's score of the answer, 0 to 1; 0 when the completion gives none. `threshold`: 1 from it on, 0 below.

    Where the answer stands: after the last `after`, in the last <tag>, in the last \boxed{}, or all of it.
    """

    KIND: ClassVar[str] = "reasoning_gym"
    TARGET: ClassVar[str] = "grpo.rewards.gym:prepare"
    COMPUTES: ClassVar[bool] = True
    OWN_ANSWER: ClassVar[str | None] = ANSWER

    on_error: str = "unscored"
    after: str | None = None
    tag: str | None = None
    boxed: bool = False
    threshold: float | None = None
    timeout: float = 10.0

    def check_options(self) -> None:
        check_place(self.key, after=self.after, tag=self.tag, boxed=self.boxed)

    def check_columns(self, columns: Collection[str]) -> None:
        missing = sorted({*ENTRY, TASK} - set(columns))
        if missing:
            raise ValueError(
                f"{self.key}: scores rows of data=reasoning_gym only; the data has no column {missing[0]!r}"
            )

    def options(self) -> dict[str, Any]:
        return {}

    def arguments(self, prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
        answer = find_answer(completion.text, after=self.after, tag=self.tag, boxed=self.boxed)
        return prompt.columns[TASK], answer and answer.strip(), {key: prompt.columns[key] for key in ENTRY}

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        arguments = self.arguments(prompt, completion)
        if arguments[1] is None:
            return 0.0
        score: float | None = await self.pool.call(*arguments)
        return score if score is None or self.threshold is None else float(score >= self.threshold)


def prepare() -> Callable[[str, str, dict[str, Any]], float | None]:
    """In the worker."""
    import reasoning_gym

    return lambda task, answer, entry: to_number(reasoning_gym.get_score_answer_fn(task)(answer, entry))
