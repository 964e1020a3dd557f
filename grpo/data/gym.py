"""reasoning-gym's procedural tasks: any of its hundred, with its parameters, or several at once. No download.

Row i of a task is made by its generator from the seed `task_seed + i`, so the rows are the same in every run whatever
its seed, and the held-out rows start far behind the training rows. A held-out problem that comes up in training all the
same (small tasks repeat themselves) is left out of training, as for any data set.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from grpo.data.base import Data
from grpo.data.rows import Table
from grpo.rewards.options import at_least

COLUMNS = ["question", "answer", "metadata", "task"]
HELD_OUT_SEED = 10**9  # training rows would have to be as many to reach it


@dataclass(kw_only=True)
class ReasoningGym(Data):
    """`tasks`: names, or {task: name, weight: 1, <parameter>: ...}. `rows`: training rows in all, shared out by weight.
    `task_seed`: of the generators. The column `task` tells the reward whose scorer to ask."""

    tasks: str | list[Any]
    rows: int = 2000
    task_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, "data", rows=self.rows)
        self.task_list = [_parse(entry) for entry in ([self.tasks] if isinstance(self.tasks, str) else self.tasks)]
        if not self.task_list:
            raise ValueError("data.tasks=[]: name at least one task of reasoning-gym")

    def find(self) -> None:
        if find_spec("reasoning_gym") is None:
            raise ValueError("data=reasoning_gym: reasoning-gym is not installed: pip install 'grpo[tasks]'")
        for name, _, parameters in self.task_list:
            _create(name, parameters, size=1, seed=self.task_seed)
        self.check_columns(COLUMNS, "reasoning-gym")

    def tables(self) -> tuple[Table, dict[str, tuple[Data, Table]]]:
        total = sum(weight for _, weight, _ in self.task_list)
        parts = [
            (name, _create(name, parameters, size=max(1, round(self.rows * weight / total)), seed=self.task_seed))
            for name, weight, parameters in self.task_list
        ]
        held_out: dict[str, tuple[Data, Table]] = {}
        for name, _, parameters in self.task_list:
            if size := -(-self.eval_rows // len(self.task_list)):
                made = _create(name, parameters, size=size, seed=self.task_seed + HELD_OUT_SEED)
                label = name if name not in held_out else f"{name}_{len(held_out)}"
                held_out[label] = (self, Table(label, GeneratedRows([(name, made)]), COLUMNS))
        return Table("train", GeneratedRows(parts), COLUMNS), held_out


class GeneratedRows(Sequence[Mapping[str, Any]]):
    """The rows of several generators, one after the other; each row is made once, when it is first asked for."""

    def __init__(self, parts: list[tuple[str, Any]]) -> None:
        self._parts = parts
        self._made: dict[int, dict[str, Any]] = {}
        self._length = sum(len(made) for _, made in parts)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[i] for i in range(self._length))

    def __getitem__(self, i: Any) -> Any:
        row = self._made.get(i)
        if row is None:
            place = range(self._length)[i]
            for name, made in self._parts:
                if place < len(made):
                    self._made[i] = row = {**made[place], "task": name}
                    break
                place -= len(made)
        return row


def _parse(entry: Any) -> tuple[str, float, dict[str, Any]]:
    """(task, weight, parameters)."""
    if isinstance(entry, str):
        return entry, 1.0, {}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("task"), str):
        raise ValueError(f"data.tasks: {entry!r} is no task; expected a name or {{task: <name>, <parameter>: ...}}")
    parameters = {str(key): value for key, value in entry.items() if key not in ("task", "weight")}
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ValueError(f"data.tasks[{entry['task']}].weight={weight!r}: expected a number above 0")
    return entry["task"], float(weight), parameters


def _create(name: str, parameters: dict[str, Any], *, size: int, seed: int) -> Any:
    """A task's generator. Raises ValueError that names task and parameter."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=5) or sorted(DATASETS)
        raise ValueError(f"data.tasks={name}: reasoning-gym has no such task; it has {', '.join(near)}")
    known = sorted({f.name for f in fields(DATASETS[name][1])} - {"size", "seed"})
    for key in parameters:
        if key not in known:
            raise ValueError(f"data.tasks[{name}].{key}: no such parameter; the task has {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **parameters)
    except (TypeError, AssertionError, ValueError) as error:  # a value that the task refuses
        raise ValueError(f"data.tasks[{name}]: {parameters}: {error or 'refused by the task'}") from error
