"""Any data set of the Hugging Face hub, or a local folder in a format that `datasets` reads (Parquet, CSV, ...).

`datasets` takes seconds to import, so that waits until it is needed. Left out: streaming. A streamed set has no rows by
number, so its order could not depend on (seed, epoch) alone and a resume could not be exact.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from grpo.data.base import Data
from grpo.data.rows import Table

HUB_TIMEOUT = 3  # seconds for the hub to answer, when it is only asked whether the set is there


@dataclass(kw_only=True)
class Hub(Data):
    """`path`: hub id, or a local folder. `name`: configuration of the set. `split`: training split. `columns`: those to
    keep (null: all). `rows`: use only the first so many. `evals`: held-out sets by name, each with the keys in which it
    differs, e.g. {test: {split: test}}; without any, rows are taken out of the training split."""

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    columns: list[str] | None = None
    rows: int | None = None
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    streaming: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming:
            raise ValueError(
                "data.streaming=true: a streamed set can be neither shuffled by epoch nor resumed exactly; "
                "use data.rows=<number> to read a part of a large set"
            )

    def find(self) -> None:
        for data in (self, *self._held_out().values()):
            if not _here(data.path):
                _ask_hub(data.path)

    def at_hand(self) -> bool:
        sets = (self, *self._held_out().values())
        return all(_here(data.path) for data in sets)

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        train = _load(self, "train")
        return train, {name: (data, _load(data, name)) for name, data in self._held_out().items()}

    def _held_out(self) -> "dict[str, Hub]":
        whole = replace(self, rows=None)
        return {name: whole.variant(name, keys) for name, keys in self.evals.items()}


def _ask_hub(path: str) -> None:
    """Raises ValueError when the hub does not have it, or is not there."""
    from huggingface_hub import HfApi

    if path.startswith(("/", ".", "~")):
        raise ValueError(f"data.path={path}: there is no such folder (looked in {Path.cwd()})")
    try:
        HfApi().dataset_info(path, timeout=HUB_TIMEOUT)
    except Exception as error:  # a dozen kinds: no network, no such set, gated, offline, a bad id
        raise ValueError(_not_to_be_had(path, error)) from error


def _not_to_be_had(path: str, error: Exception) -> str:
    why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
    return (
        f"data.path={path}: no local folder, not in the cache, and not to be had from the hub "
        f"({type(error).__name__}: {why}); give a local copy: data.path=/path/to/folder"
    )


def _here(path: str) -> bool:
    """A local folder, or a set in the cache."""
    return Path(path).expanduser().exists() or _cached(path)


def _cached(path: str) -> bool:
    """Whether an earlier run has downloaded it."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"datasets--{path.replace('/', '--')}" / "snapshots").is_dir()


def _load(data: Hub, name: str) -> Table:
    import datasets

    path = str(Path(data.path).expanduser()) if Path(data.path).expanduser().exists() else data.path
    try:
        if (Path(path) / "dataset_dict.json").is_file() or (Path(path) / "dataset_info.json").is_file():
            loaded = datasets.load_from_disk(path)
            loaded = loaded if isinstance(loaded, datasets.Dataset) else loaded[data.split]
        else:
            loaded = datasets.load_dataset(path, data.name, split=data.split, revision=data.revision)
    except KeyError as error:
        raise ValueError(f"data.split={data.split}: {path} has no such split ({error})") from None
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(_not_to_be_had(data.path, error)) from error
    except ValueError as error:  # unknown split or configuration; its message lists those that are there
        raise ValueError(f"data: {path} (name {data.name}, split {data.split}): {error}") from error
    if data.rows is not None:
        loaded = loaded.select(range(min(data.rows, len(loaded))))
    if data.columns is not None:
        missing = sorted(set(data.columns) - set(loaded.column_names))
        if missing:
            raise ValueError(
                f"data.columns: {path} has no column {missing[0]!r}; it has {', '.join(loaded.column_names)}"
            )
        loaded = loaded.select_columns(data.columns)

    def scan(columns: list[str]) -> Iterator[Mapping[str, Any]]:
        for batch in loaded.select_columns(columns).iter(batch_size=1000):
            for values in zip(*(batch[c] for c in columns), strict=True):
                yield dict(zip(columns, values, strict=True))

    return Table(name, loaded, list(loaded.column_names), scan)
