"""All rewards of a data set together: scores a completion in place, keeps each reward's statistics.

    with Rewards([(reward, weight), ...]) as rewards:
        await rewards.score(prompt, completion)     # completion.rewards by name, completion.reward = weighted sum

`score` may be awaited in any event loop and never blocks it: what is not plain text arithmetic runs in worker processes
or in the thread of `side.py`. A completion with one reward not scored has no reward: a sum without it would be of
another scale. An error is never a 0.
"""

import asyncio
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from grpo.rewards.base import Reward, RewardError, RewardTimeoutError, to_number
from grpo.rewards.side import SideLoop
from grpo.types import Completion, Group, Prompt

log = logging.getLogger("grpo.rewards")

START_TIMEOUT = 150.0  # seconds for every reward to be ready; the workers have a shorter limit of their own
SHOWN = 3  # failures of a reward that are logged in full


@dataclass(slots=True)
class Tally:
    """The calls of one reward since the last look."""

    seconds: float = 0.0
    slowest: float = 0.0
    calls: int = 0
    unscored: int = 0
    timeouts: int = 0
    errors: int = 0


class Rewards:
    """Built from (reward, weight) pairs with distinct names. `weights` are by name."""

    def __init__(self, weighted: Sequence[tuple[Reward, float]]) -> None:
        self.rewards = [reward for reward, _ in weighted]
        self.weights = {reward.name: weight for reward, weight in weighted}
        assert len(self.weights) == len(weighted), "rewards must have distinct names"
        self._tallies = {name: Tally() for name in self.weights}
        self._failures: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards _tallies: the loader's loop writes, the trainer's thread reads
        self._side: SideLoop | None = None
        self.open = 0  # completions that are being scored

    @property
    def needs_answer(self) -> bool:
        return any(r.NEEDS_ANSWER for r in self.rewards)

    def check(self) -> None:
        """Raises ValueError for what can be seen before anything is loaded."""
        for reward in self.rewards:
            reward.check()

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError when a reward asks for a column that the data has not."""
        for reward in self.rewards:
            reward.check_columns(columns)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Starts what the rewards need (processes, connections) in the background; does not wait."""
        outside = [r for r in self.rewards if not r.INLINE]
        if not outside or self._side is not None:
            return
        self._side = SideLoop("rewards")
        for reward in outside:
            self._side.run(reward.start(), timeout=10)

    def wait_ready(self) -> None:
        """Waits until every reward is loaded. Raises RewardError with the traceback of one that cannot be."""
        for reward in self.rewards:
            if not reward.INLINE:
                assert self._side is not None, "start the rewards first"
                try:
                    self._side.run(reward.ready(), timeout=START_TIMEOUT)
                except RewardError as error:
                    raise RewardError(f"{reward.key} cannot be loaded: {error}") from None

    def unreadable(self, answers: Sequence[str], timeout: float = 3600) -> set[str]:
        """The gold answers that some reward cannot read."""
        distinct = sorted(set(answers))
        found: set[str] = set()
        for reward in self.rewards:
            if reward.INLINE:
                found |= asyncio.run(reward.unreadable(distinct))
            else:
                assert self._side is not None, "start the rewards first"
                found |= self._side.run(reward.unreadable(distinct), timeout=timeout)
        return found

    def close(self) -> None:
        """Ends every process and connection."""
        if self._side is None:
            return
        for reward in self.rewards:
            if not reward.INLINE:
                self._side.run(reward.close(), timeout=30)
        self._side.close()
        self._side = None

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        """Sets `completion.rewards` and `completion.reward` (None: not scored). Raises RewardError."""
        self.open += 1
        try:
            values = await asyncio.gather(*(self._score(r, prompt, completion) for r in self.rewards))
        finally:
            self.open -= 1
        completion.rewards = {r.name: value for r, value in zip(self.rewards, values, strict=True)}
        weighted = [None if v is None else v * self.weights[name] for name, v in completion.rewards.items()]
        completion.reward = None if None in weighted else sum(v for v in weighted if v is not None)

    async def _score(self, reward: Reward, prompt: Prompt, completion: Completion) -> float | None:
        started = time.perf_counter()
        value, failure = None, None
        try:
            if reward.INLINE:
                value = to_number(await reward.score(prompt, completion))
            else:
                assert self._side is not None, "start the rewards first"
                value = to_number(await self._side.submit(reward.score(prompt, completion)))
        except (RewardError, ValueError) as error:
            failure = error
        self._count(reward.name, time.perf_counter() - started, value, failure)
        if failure is not None:
            self._fail(reward, failure, prompt, completion)
        return value

    def _fail(self, reward: Reward, failure: Exception, prompt: Prompt, completion: Completion) -> None:
        where = f"{reward.key} failed on row {prompt.row}, completion {_head(completion.text)}"
        if reward.on_error == "raise":
            raise RewardError(f"{where}: {failure}") from failure
        self._failures[reward.name] += 1
        if self._failures[reward.name] <= SHOWN:
            log.warning("%s, and is not scored: %s", where, failure)

    def _count(self, name: str, seconds: float, value: float | None, failure: Exception | None) -> None:
        with self._lock:
            tally = self._tallies[name]
            tally.calls += 1
            tally.seconds += seconds
            tally.slowest = max(tally.slowest, seconds)
            tally.unscored += value is None
            tally.timeouts += isinstance(failure, RewardTimeoutError)
            tally.errors += failure is not None and not isinstance(failure, RewardTimeoutError)

    def stats(self, groups: Sequence[Group]) -> dict[str, float]:
        """Mean and std (ddof 0) of each reward in `groups`; time and failures of its calls since the last look.

        The calls are another set: they run ahead of the training step, and score evaluations too.
        """
        with self._lock:
            tallies, self._tallies = self._tallies, {name: Tally() for name in self.weights}
        result: dict[str, float] = {}
        for name, tally in tallies.items():
            values = [v for g in groups for c in g.completions if (v := c.rewards.get(name)) is not None]
            if values:
                mean = sum(values) / len(values)
                result[f"reward/{name}/mean"] = mean
                result[f"reward/{name}/std"] = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
            if not tally.calls:
                continue
            result[f"reward/{name}/seconds_mean"] = tally.seconds / tally.calls
            result[f"reward/{name}/seconds_max"] = tally.slowest
            result[f"reward/{name}/unscored"] = tally.unscored
            result[f"reward/{name}/timeouts"] = tally.timeouts
            result[f"reward/{name}/errors"] = tally.errors
        return result


def _head(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
