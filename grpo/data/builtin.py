"""Data sets made on the spot: no file, no network."""

from dataclasses import dataclass
from typing import ClassVar

from grpo.data.arithmetic import held_out_rows, train_rows
from grpo.data.base import Data
from grpo.data.rows import Table
from grpo.environments.guess import PROMPT, SECRET
from grpo.rewards.options import at_least

COLUMNS = ["problem", "prompt", "answer"]
GUESSING = ["prompt", SECRET]
SECRETS = 1000  # training rows of the guessing game


@dataclass(kw_only=True)
class Arithmetic(Data):
    """The last digit of the sum of `digits` digits (arithmetic.py). Its rows are right by construction."""

    GENERATED: ClassVar[bool] = True

    digits: int = 6

    def find(self) -> None:
        at_least(1, "data", digits=self.digits)
        self.tables()
        self.reader.check_columns(COLUMNS, "arithmetic")

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        train = Table("train", train_rows(self.digits), COLUMNS)
        if not self.eval_rows:
            return train, {}
        return train, {"held_out": (self, Table("held_out", held_out_rows(self.eval_rows, self.digits), COLUMNS))}


@dataclass(kw_only=True)
class Guessing(Data):
    """Secret digits from 0 to digits - 1, in turn; the prompt says nothing of them. What is learned is how to ask, so
    the held-out rows have the same secrets. Played with environment=guess."""

    GENERATED: ClassVar[bool] = True

    digits: int = 7

    def find(self) -> None:
        at_least(2, "data", digits=self.digits)
        if self.digits > 10:
            raise ValueError(f"data.digits={self.digits}: there are ten digits")
        self.reader.check_columns(GUESSING, "the guessing game")

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        def table(name: str, count: int) -> Table:
            return Table(name, [{"prompt": PROMPT, SECRET: i % self.digits} for i in range(count)], GUESSING)

        return table("train", SECRETS), {
            "held_out": (self, table("held_out", self.eval_rows))
        } if self.eval_rows else {}
