"""The arithmetic task as a data set: no file, no network, a million rows that are never stored."""

from dataclasses import dataclass
from typing import ClassVar

from grpo.data.arithmetic import held_out_rows, train_rows
from grpo.data.base import Data
from grpo.data.rows import Table
from grpo.rewards.options import at_least

COLUMNS = ["problem", "prompt", "answer"]


@dataclass(kw_only=True)
class Arithmetic(Data):
    """The last digit of the sum of `digits` digits (arithmetic.py). Its rows are right by construction."""

    GENERATED: ClassVar[bool] = True

    digits: int = 6

    def find(self) -> None:
        at_least(1, "data", digits=self.digits)
        self.tables()

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        train = Table("train", train_rows(self.digits), COLUMNS)
        if not self.eval_rows:
            return train, {}
        return train, {"held_out": (self, Table("held_out", held_out_rows(self.eval_rows, self.digits), COLUMNS))}
