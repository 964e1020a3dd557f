"""Tools as users write them, for test_tools.py."""

import os
import time


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def shout(text: str) -> str:
    """Says it louder.

    Args:
        text: what to say
    """
    return text.upper()


def sleep(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "awake"


def leave() -> str:
    """Ends the process."""
    os._exit(3)


def table() -> dict[str, list[int]]:
    """A result that is no text."""
    return {"digits": list(range(10))}


def undocumented(x):  # type: ignore[no-untyped-def]
    return x
