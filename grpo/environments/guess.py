"""A game that cannot be won in one turn: find a digit from "higher" and "lower".

It is played in the few characters that models/tiny knows how to go on from: the prompt is `?=`, an answer is whatever
ends with a digit (`:4`), and the environment says `+=` (the secret is higher), `-=` (lower) or `?=` (no digit).
Three guesses are enough for seven digits, of which three at most can be found without listening.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from grpo.environments.base import KEY, Environment, Kind, Step

SECRET = "secret"
PROMPT, HIGHER, LOWER, UNREADABLE = "?=", "+=", "-=", "?="


@dataclass(kw_only=True)
class Guess(Kind):
    """Pays 1 for the secret digit of the row's column `secret`."""

    INLINE: ClassVar[bool] = True

    max_turns: int = 3

    def check_columns(self, columns: Any) -> None:
        if SECRET not in columns:
            raise ValueError(f"{KEY}=guess: the data has no column {SECRET!r}; use data=guess")

    def make(self) -> Environment:
        return Game()


class Game:
    def reset(self, row: dict[str, Any]) -> None:
        """The prompt is the row's own."""
        self.secret = int(row[SECRET])

    def step(self, completion: str) -> Step:
        last = completion[-1:]
        if last not in tuple("0123456789"):
            return UNREADABLE, 0.0, False
        if int(last) == self.secret:
            return None, 1.0, True
        return (HIGHER if self.secret > int(last) else LOWER), 0.0, False
