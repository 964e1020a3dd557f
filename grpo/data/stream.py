"""The prompt stream: which row is the prompt at a place, for ever or for some epochs. Law 2 counts on its order.

Each epoch has every row once, in an order of its own that depends on (seed, epoch) alone; the end of one epoch and the
beginning of the next may share a batch, so a data set smaller than a batch is nothing special. A place is all that a
resume needs.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from grpo.data.order import row_at
from grpo.data.render import Renderer
from grpo.data.rows import Reader, Table, Unusable
from grpo.types import Prompt


@dataclass(slots=True)
class PromptMaker:
    """Makes the Prompt of a row of a table."""

    table: Table
    reader: Reader
    renderer: Renderer
    max_prompt_tokens: int

    def make(self, index: int, i: int) -> Prompt:
        """`index`: place in the stream. `i`: row. Raises ValueError for a row that should have been left out."""
        row, name = self.table.rows[i], self.table.row_name(i)
        try:
            text, gold = self.renderer.text(self.reader.content(row)), self.reader.gold(row)
        except Unusable as verdict:
            raise ValueError(f"data: row {name} cannot be used: {verdict.reason}") from None
        (ids,) = self.renderer.ids([text])
        if not 1 <= len(ids) <= self.max_prompt_tokens:
            raise ValueError(
                f"data.max_prompt_tokens={self.max_prompt_tokens}: the prompt of row {name} has {len(ids)} tokens"
            )
        return Prompt(index, name, text, ids, self.reader.for_reward(row, gold))


@dataclass(slots=True)
class Stream:
    """`rows`: the rows of the maker's table that are trained on, and their prompts' `keys`, where rows were screened.
    `epochs`: None is endless."""

    maker: PromptMaker
    rows: Sequence[int]
    seed: int
    epochs: int | None
    keys: Sequence[bytes] | None = None

    def prompt(self, index: int) -> Prompt | None:
        """The prompt at a place of the stream; None after the last epoch. Any place, any number of times."""
        epoch, place = divmod(index, len(self.rows))
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return self.maker.make(index, self.rows[row_at(place, len(self.rows), self.seed, epoch)])

    def without(self, keys: Collection[bytes]) -> tuple["Stream", int]:
        """This stream without the prompts of these keys, and how many those were."""
        if self.keys is None or not keys:
            return self, 0
        kept = [(row, key) for row, key in zip(self.rows, self.keys, strict=True) if key not in keys]
        rows = array("q", (row for row, _ in kept))
        if not rows:
            raise ValueError(f"data: every row of {self.maker.table.name} is also in a held-out set")
        return Stream(self.maker, rows, self.seed, self.epochs, [key for _, key in kept]), len(self.rows) - len(rows)
