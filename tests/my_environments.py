"""Environments as users write them, for test_environments.py."""

import asyncio
import time
from typing import Any


class Counting:
    """Says how often it was asked; pays 0.25 for each answer."""

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self.asked = 0

    def reset(self, row: dict[str, Any]) -> None:
        self.row = row

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.asked += 1
        return f"{self.asked} {self.row['answer']}", 0.25, self.asked >= self.limit


class Coroutine:
    """The same with coroutines, a prompt of its own, and a message for an observation."""

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        await asyncio.sleep(0)
        return [{"role": "user", "content": f"ask {row['answer']}"}]

    async def step(self, completion: str) -> tuple[Any, float | None, bool]:
        return [{"role": "tool", "content": completion.upper()}], None, completion == "done"


class Blocking(Counting):
    def step(self, completion: str) -> tuple[str, float, bool]:
        time.sleep(0.3)
        return super().step(completion)


class Endless(Counting):
    def step(self, completion: str) -> tuple[str, float, bool]:
        time.sleep(60)
        return super().step(completion)


class Raising(Counting):
    def step(self, completion: str) -> tuple[str, float, bool]:
        raise KeyError("my own mistake")


class Exiting(Counting):
    def step(self, completion: str) -> tuple[str, float, bool]:
        raise SystemExit(3)


class Impatient(Counting):
    def step(self, completion: str) -> tuple[str, float, bool]:
        raise TimeoutError("its own time-out")


class Returning(Counting):
    """Whatever it is told to return."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def step(self, completion: str) -> Any:
        return self.value


class Random(Counting):
    """A prompt that is another for each completion."""

    made = 0

    def reset(self, row: dict[str, Any]) -> str:  # type: ignore[override]
        Random.made += 1
        return f"prompt {Random.made}"
