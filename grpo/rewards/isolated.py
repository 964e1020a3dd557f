"""Rewards that run in worker processes, because what they call may hang, crash, leak or block."""

import os
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo.rewards.base import Reward
from grpo.rewards.options import above, at_least
from grpo.rewards.pool import Pool
from grpo.types import Completion, Prompt


@dataclass(kw_only=True)
class IsolatedReward(Reward):
    """Base: TARGET(**options()) in a worker gives the function that is called with arguments(prompt, completion).

    workers: processes at most (null: half of the cores, at most 16), started as they are needed. timeout: seconds for
    one completion, after which its process is replaced. memory_gb: address space of a process; null is no limit.
    """

    INLINE: ClassVar[bool] = False
    TARGET: ClassVar[str]
    COMPUTES: ClassVar[bool] = False  # and waits for nothing: `timeout` counts its CPU, whatever else the machine does

    workers: int | None = None
    timeout: float = 5.0
    memory_gb: float | None = 4.0
    concurrency: int = 1
    _pool: Pool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self.key, workers=self.workers, concurrency=self.concurrency)
        above(0, self.key, timeout=self.timeout, memory_gb=self.memory_gb)

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What the worker's factory is called with."""

    @abstractmethod
    def arguments(self, prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
        """What the worker's function is called with."""

    @property
    def pool(self) -> Pool:
        assert self._pool is not None, f"{self.key} has not been started"
        return self._pool

    async def start(self) -> None:
        self._pool = Pool(
            name=self.name,
            target=self.TARGET,
            options=self.options(),
            workers=self.workers or max(1, min(16, len(os.sched_getaffinity(0)) // 2)),
            timeout=self.timeout,
            computes=self.COMPUTES,
            memory_gb=self.memory_gb,
            slots=self.concurrency,
        )
        self._pool.start()

    async def ready(self) -> None:
        await self.pool.ready()

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        value: float | None = await self.pool.call(*self.arguments(prompt, completion))
        return value
