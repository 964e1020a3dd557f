"""From a row of a data set to what a prompt needs: its content, the gold as text, the columns for the reward.

A row that cannot be used says why in one word (`Unusable.reason`); screen.py counts those words.
"""

import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards.base import ANSWER

# Where a data set's own column `answer` goes when the gold is taken from elsewhere or is cut out of it.
RAW_ANSWER = "raw_answer"

# What a row asks: text, or a chat so far ({"role": ..., "content": ...} each).
Content = str | list[dict[str, Any]]


@dataclass(slots=True)
class Table:
    """Rows by number. `name` is the split's; `scan` goes through some columns of all rows faster than one by one."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: list[str]
    scan: Callable[[list[str]], Iterator[Mapping[str, Any]]] | None = None

    def scanned(self, columns: list[str]) -> Iterator[Mapping[str, Any]]:
        return self.scan(columns) if self.scan else (self.rows[i] for i in range(len(self.rows)))

    def row_name(self, i: int) -> str:
        return f"{self.name}/{i}"


class Unusable(Exception):  # noqa: N818 (a verdict on a row, counted; not a failure)
    """This row is left out, for this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Fields(string.Formatter):
    """`{a}` and `{a.b}` are columns, and parts of columns, by name only."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        value = lookup(kwargs, field_name)
        if value is None:
            raise Unusable("null_prompt")
        return value, field_name


@dataclass(slots=True)
class Reader:
    r"""`prompt`: a format string over columns. `answer`: the column of the gold, None for none; `a.b` is a part of a
    column. `answer_pattern`: a regular expression whose last match (its first group) in the column is the gold."""

    prompt: str
    answer: str | None
    answer_pattern: str | None = None
    fields: list[str] = field(init=False)
    _pattern: re.Pattern[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        try:
            parts = list(string.Formatter().parse(self.prompt))
        except ValueError as error:
            raise ValueError(f"data.prompt={self.prompt!r}: {error}; write {{{{ and }}}} for plain braces") from None
        self.fields = list(dict.fromkeys(name for _, name, _, _ in parts if name is not None))
        for name in self.fields:
            if not re.fullmatch(r"[^\W\d][\w.\-]*", name):
                raise ValueError(
                    f"data.prompt={self.prompt!r}: {{{name}}} is no column; write {{{{ and }}}} for plain braces"
                )
        if not self.fields:
            raise ValueError(f"data.prompt={self.prompt!r}: names no column, so every prompt would be the same")
        if self.answer_pattern is not None:
            try:
                self._pattern = re.compile(self.answer_pattern, re.MULTILINE)
            except re.error as error:
                raise ValueError(f"data.answer_pattern={self.answer_pattern!r}: {error}") from None

    def check_columns(self, columns: Sequence[str], where: str) -> None:
        """Raises ValueError for a column that is not there."""
        if not columns:
            raise ValueError(f"data.path: {where} has no rows")
        for key, name in [("prompt", f) for f in self.fields] + ([("answer", self.answer)] if self.answer else []):
            if name not in columns and name.partition(".")[0] not in columns:
                value = self.prompt if key == "prompt" else name
                raise ValueError(
                    f"data.{key}={value!r}: {where} has no column {name!r}; it has {', '.join(sorted(columns))}"
                )

    def needed(self, columns: Sequence[str]) -> list[str]:
        """The columns that `content` and `gold` read."""
        names = [*self.fields, *([self.answer] if self.answer else [])]
        return list(dict.fromkeys(n if n in columns else n.partition(".")[0] for n in names))

    def content(self, row: Mapping[str, Any]) -> Content:
        """What the row asks. A prompt that is one column of chat messages is those messages."""
        value = lookup(row, self.fields[0])
        if self.prompt == f"{{{self.fields[0]}}}" and is_chat(value):
            return [dict(message) for message in value]
        text = _Fields().vformat(self.prompt, (), row)
        if not any(str(lookup(row, name)).strip() for name in self.fields):
            raise Unusable("empty_prompt")
        return text

    def essence(self, row: Mapping[str, Any]) -> str:
        """What makes the prompt this one: the columns' text, without template, instructions and system prompt."""
        values = [lookup(row, name) for name in self.fields]
        texts = [
            " ".join(str(m["content"]) for m in value if m["role"] != "system") if is_chat(value) else str(value)
            for value in values
        ]
        return " ".join(texts)

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """The right answer as text; None where the data set has none."""
        if self.answer is None:
            return None
        text = as_text(lookup(row, self.answer))
        if self._pattern is None:
            return text
        matches = list(self._pattern.finditer(text))
        if not matches:
            raise Unusable("answer_not_found")
        found = matches[-1].group(1 if self._pattern.groups else 0)
        return as_text(found)

    def for_reward(self, row: Mapping[str, Any], gold: str | None) -> dict[str, Any]:
        """Every column, and the gold as `answer`."""
        columns = dict(row)
        if gold is not None:
            if ANSWER in columns and columns[ANSWER] != gold:
                columns[RAW_ANSWER] = columns[ANSWER]
            columns[ANSWER] = gold
        return columns


def lookup(row: Mapping[str, Any], path: str) -> Any:
    """The value of a column, or of a part of it (`a.b`); None when it is not there."""
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value)
    )


def as_text(value: Any) -> str:
    """An answer as text: 7, 7.0 and "7" are "7" (a column with gaps makes whole numbers floats), [x] is x.

    Raises Unusable for null, NaN, blank text and anything that is not one value.
    """
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise Unusable("null_answer")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        raise Unusable("answer_not_text")
    text = str(value).strip()
    if not text:
        raise Unusable("null_answer")
    return text
