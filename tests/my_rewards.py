"""Rewards as users write them, good and bad. The tests name them by this file's path; no test imports them."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def matches(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def keywords(prompt: str, completion: str, **columns: Any) -> float:
    """1 when every column but the texts has arrived, as it was."""
    return float(columns == {"answer": "4", "level": 3, "tags": ["a", "ب"]} and prompt == "question")


def optional(prompt: str, completion: str, answer: str, bonus: float = 0.25) -> float:
    return bonus


def numpy_number(prompt: str, completion: str) -> Any:
    return np.float32(0.5)


def truth(prompt: str, completion: str) -> bool:
    return True


def wants_level(prompt: str, completion: str, level: int) -> float:
    return float(level)


def nothing(prompt: str, completion: str) -> None:
    return None


def a_list(prompt: str, completion: str) -> Any:
    return [1.0, 0.0]


def a_text(prompt: str, completion: str) -> Any:
    return "1.0"


def not_a_number(prompt: str, completion: str) -> float:
    return float("nan")


def an_object(prompt: str, completion: str) -> Any:
    return object()


def raises(prompt: str, completion: str) -> float:
    return {"a": 1.0}[completion]


def says_exit(prompt: str, completion: str) -> float:
    sys.exit("enough")


def exits(prompt: str, completion: str) -> float:
    if completion == "exit":
        os._exit(3)
    return 1.0


def crashes(prompt: str, completion: str) -> float:
    os.abort()


def hangs(prompt: str, completion: str) -> float:
    while completion == "hang":
        pass
    return 1.0


def allocates(prompt: str, completion: str) -> float:
    hoard = []
    while True:
        hoard.append(bytearray(64 * 2**20))


def prints(prompt: str, completion: str) -> float:
    print("to stdout", completion)
    print("to stderr", file=sys.stderr)
    os.write(1, b"to the descriptor\n")
    return 1.0


def prints_much(prompt: str, completion: str) -> float:
    for i in range(5000):
        print("line", i, "x" * 100)
    return 1.0


def blocks(prompt: str, completion: str) -> float:
    time.sleep(0.5)
    return 1.0


async def waits(prompt: str, completion: str) -> float:
    await asyncio.sleep(0.5)
    return 1.0


async def waits_for_ever(prompt: str, completion: str) -> float:
    await asyncio.sleep(0 if completion == "quick" else 10**6)
    return 1.0


async def blocks_its_loop(prompt: str, completion: str) -> float:
    if completion == "block":
        time.sleep(10**6)  # noqa: ASYNC251 (the mistake itself)
    if completion == "exit":
        os._exit(3)
    await asyncio.sleep(0.1)
    return 1.0


def writes_its_process(prompt: str, completion: str) -> float:
    Path(completion).write_text(str(os.getpid()))
    time.sleep(10**6)
    return 1.0


async def raises_late(prompt: str, completion: str) -> float:
    await asyncio.sleep(0)
    raise LookupError("late trouble")


def prepare_deadline() -> Callable[[str, float], str]:
    """For a pool: a function that rests, or computes, for so many seconds."""

    def spend(how: str, seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if how == "rests":
                time.sleep(0.01)
        return how

    return spend
