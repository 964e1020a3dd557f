"""Local jsonl: a file or a folder of them. Read by us, because every value is kept as it was written.

(Table formats give a column one type: an answer that is 7 in one row and "7" in the next cannot be read at all, or
becomes 7.0.) For CSV and Parquet: `data=hub data.path=<folder>`.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from grpo.data.base import Data
from grpo.data.rows import Table

SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson")
# A file of a folder that is called so is a held-out set, never training data.
HELD_OUT = re.compile(r"(^|[^a-z])(test|eval|evaluation|valid|validation|val|dev|held.?out)($|[^a-z])", re.IGNORECASE)
LOOK = 100  # rows that are looked at for the names of columns


@dataclass(kw_only=True)
class Jsonl(Data):
    """`path`: a .jsonl file, or a folder of them (files called test, val, dev, ... are held-out sets, the others are
    trained on). `evals`: held-out sets by name, each with the keys in which it differs, e.g. {aime: {path: a.jsonl}}.
    """

    path: str
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def find(self) -> None:
        train, held_out = self._sets()
        for data, files in (train, *held_out.values()):
            columns = _columns([row for file in files for row in islice(_rows(file), LOOK)])
            data.check_columns(columns, str(files[0]))

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        (_, files), held_out = self._sets()
        return _table("train", files), {name: (data, _table(name, files)) for name, (data, files) in held_out.items()}

    def _sets(self) -> "tuple[tuple[Jsonl, list[Path]], dict[str, tuple[Jsonl, list[Path]]]]":
        """Which files are what."""
        files = _files(self.path, "data.path")
        if self.evals:
            named = {}
            for name, keys in self.evals.items():
                data = self.variant(name, keys)
                named[name] = (data, _files(data.path, f"data.evals.{name}.path"))
            taken = {f.resolve() for _, held in named.values() for f in held}
            train = [f for f in files if f.resolve() not in taken]
            if not train:
                raise ValueError(
                    f"data.path={self.path}: all of it is held out by data.evals, none is left to train on"
                )
            return (self, train), named
        held = [f for f in files if HELD_OUT.search(_stem(f))] if len(files) > 1 else []
        train = [f for f in files if f not in held]
        if not train:
            raise ValueError(
                f"data.path={self.path}: all its files are held-out sets by name, none is left to train on"
            )
        return (self, train), {_stem(f): (self, [f]) for f in held}


def _files(path: str, key: str) -> list[Path]:
    where = Path(path).expanduser()
    if where.is_dir():
        files = sorted(f for f in where.rglob("*") if f.name.endswith(SUFFIXES) and f.is_file())
        if not files:
            raise ValueError(f"{key}={path}: this folder has no file that ends with {', '.join(SUFFIXES)}")
        return files
    if not where.is_file():
        raise ValueError(f"{key}={path}: there is no such file or folder (looked in {Path.cwd()})")
    if not where.name.endswith(SUFFIXES):
        raise ValueError(
            f"{key}={path}: expected {', '.join(SUFFIXES)}; for other formats: data=hub data.path=<folder>"
        )
    return [where]


def _stem(file: Path) -> str:
    return file.name.partition(".")[0]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Raises ValueError that names file and line."""
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except ValueError as error:  # bad UTF-8 and bad JSON both are one
                raise ValueError(f"data: {file}, line {number}: not JSON in UTF-8 ({error})") from None
            if row is None and not text:
                continue
            if not isinstance(row, dict):
                raise ValueError(f"data: {file}, line {number}: expected an object {{...}}, found {text[:40]}")
            yield row


def _table(name: str, files: list[Path]) -> Table:
    rows = [row for file in files for row in _rows(file)]
    return Table(name, rows, _columns(rows))


def _columns(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
