"""The prompt stream: which row is the prompt at a place, for ever or for some epochs. Law 2 counts on its order.

Each epoch has every row once, in an order of its own that depends on (seed, epoch) alone; the end of one epoch and the
beginning of the next may share a batch, so a data set smaller than a batch is nothing special. A place is all that a
resume needs.
"""

from collections.abc import Sequence
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
    """`rows`: the rows of the maker's table that are trained on. `epochs`: None is endless."""

    maker: PromptMaker
    rows: Sequence[int]
    seed: int
    epochs: int | None

    def prompt(self, index: int) -> Prompt | None:
        """The prompt at a place of the stream; None after the last epoch. Any place, any number of times."""
        epoch, place = divmod(index, len(self.rows))
        if self.epochs is not None and epoch >= self.epochs:
            return None
        return self.maker.make(index, self.rows[row_at(place, len(self.rows), self.seed, epoch)])
