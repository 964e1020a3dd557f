"""What the environment gave (`data.environment`), as a reward among others."""

from dataclasses import dataclass
from typing import ClassVar

from grpo.rewards.base import Reward
from grpo.types import Completion, Prompt


@dataclass(kw_only=True)
class FromEnvironment(Reward):
    """The sum of the rewards of all steps; not scored where one of them was None."""

    KIND: ClassVar[str] = "environment"

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        return completion.earned
