"""A game that cannot be won in one turn: find a secret digit from what the game says to each guess.

It is played in the few characters that models/tiny knows how to go on from: the prompt is `?=`, an answer is whatever
ends with a digit (`:4`), and the environment says how far it is to the secret (hint=distance: `3=`, counted upwards and
round from 9 to 0), or only on which side it is (hint=side: `+=` higher, `-=` lower), or `?=` (no digit).

A policy that does not listen names the same `max_turns` digits whatever it hears, so of `digits` equally frequent
secrets it finds max_turns / digits at most. Listening finds all: with the distance by the second guess, with the side
in three guesses of seven digits (a binary search), four of ten.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.environments.base import KEY, Environment, Kind, Step
from grpo.rewards.options import one_of

SECRET = "secret"
PROMPT, HIGHER, LOWER, UNREADABLE = "?=", "+=", "-=", "?="


@dataclass(kw_only=True)
class Guess(Kind):
    """Pays 1 for the secret digit of the row's column `secret`. hint: "distance" or "side"."""

    INLINE: ClassVar[bool] = True

    max_turns: int = 3
    hint: str = "distance"

    def check_options(self) -> None:
        one_of(("distance", "side"), KEY, hint=self.hint)

    def check_columns(self, columns: Any) -> None:
        if SECRET not in columns:
            raise ValueError(f"{KEY}=guess: the data has no column {SECRET!r}; use data=guess")

    def make(self) -> Environment:
        return Game(self.hint)


class Game:
    def __init__(self, hint: str = "distance") -> None:
        self.hint = hint

    def reset(self, row: dict[str, Any]) -> None:
        """The prompt is the row's own."""
        self.secret = int(row[SECRET])

    def step(self, completion: str) -> Step:
        last = completion[-1:]
        if last not in tuple("0123456789"):
            return UNREADABLE, 0.0, False
        if int(last) == self.secret:
            return None, 1.0, True
        if self.hint == "distance":
            return f"{(self.secret - int(last)) % 10}=", 0.0, False
        return (HIGHER if self.secret > int(last) else LOWER), 0.0, False
