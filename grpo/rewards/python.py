"""The user's own function as a reward: `data.reward=my_rewards.py:score` or `data.reward=package.module:score`.

    def score(prompt, completion, **columns) -> float | None: ...      # or async def

`prompt` and `completion` are text; the columns of the row come by name, `answer` being the right answer as text. A
function that names its columns (`def score(prompt, completion, answer)`) gets those. Columns that are called `prompt`
or `completion` would hide the two texts and are not passed.

The function runs in worker processes (pool.py): whatever it does there, the run goes on or ends with its traceback.
It is looked at here without being run, so that a misspelt name is an error before anything is loaded.
"""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, ClassVar

from grpo.rewards.base import to_number
from grpo.rewards.isolated import IsolatedReward
from grpo.types import Completion, Prompt

TEXTS = ("prompt", "completion")


@dataclass(kw_only=True)
class Python(IsolatedReward):
    """`path`: `file.py:function` or `module:function`. A plain function has a worker process for each of `workers`
    calls at a time; a coroutine runs `concurrency` times at once in each."""

    KIND: ClassVar[str] = "python"
    TARGET: ClassVar[str] = "grpo.rewards.python:prepare"

    path: str
    workers: int | None = 8
    concurrency: int = 64
    timeout: float = 30.0
    memory_gb: float | None = 4.0

    def check(self) -> None:
        """Raises ValueError for a function that is not there or has other parameters."""
        self._needed()

    def check_columns(self, columns: Collection[str]) -> None:
        missing = sorted(self._needed() - set(columns))
        if missing:
            raise ValueError(
                f"{self.key}: {self.path} asks for column {missing[0]!r}; the data has {', '.join(sorted(columns))}"
            )

    def _needed(self) -> set[str]:
        """The columns that the function cannot do without, from its definition in the source. Raises ValueError.

        What cannot be seen there (a decorated or imported function) is found out when the worker loads it.
        """
        source, name = find_source(self.path, self.key), self.path.rpartition(":")[2]
        if source is None:
            return set()
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
        except SyntaxError as error:
            raise ValueError(f"{self.key}: {source}, line {error.lineno}: {error.msg}") from error
        definition = next(
            (n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == name), None
        )
        if definition is None:
            if not any(name in bound_names(n) for n in tree.body):
                defined = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                raise ValueError(f"{self.key}: {source} defines no {name!r}; its functions: {', '.join(defined)}")
            return set()
        a = definition.args
        names = [p.arg for p in (*a.posonlyargs, *a.args)]
        if names[:2] != list(TEXTS):  # they are passed by place
            raise ValueError(f"{self.key}: {name}({', '.join(names)}) must begin with (prompt, completion)")
        needed = {*[p.arg for p in a.args[: len(a.args) - len(a.defaults)]]} | {
            p.arg for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is None
        }
        return needed - set(TEXTS)

    def options(self) -> dict[str, Any]:
        return {"path": self.path}

    def arguments(self, prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
        return prompt.text, completion.text, {k: v for k, v in prompt.columns.items() if k not in TEXTS}


def find_source(path: str, key: str) -> Path | None:
    """The source file behind `path`; None for a module without one. Raises ValueError when nothing is there."""
    where, colon, name = path.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise ValueError(f"{key}: {path!r} is neither file.py:function nor module:function")
    if where.endswith(".py"):
        file = Path(where).expanduser()
        if not file.is_file():
            raise ValueError(f"{key}: there is no file {where} (looked in {Path.cwd()})")
        return file
    search: list[str] | None = [str(Path.cwd()), *sys.path]
    origin: str | None = None
    for i, part in enumerate(parts := where.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), search)  # runs nothing, unlike importlib's find_spec
        if spec is None:
            raise ValueError(
                f"{key}: there is no module {where!r} (no {part!r} in {'.'.join(parts[:i]) or 'sys.path'})"
            )
        origin, search = spec.origin, list(spec.submodule_search_locations or [])
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def bound_names(node: ast.stmt) -> set[str]:
    """Names that a statement at the top of a module may bind; everything, for `import *` and blocks."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).partition(".")[0] for a in node.names}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


# ---- in the worker ----


def import_function(path: str) -> Callable[..., Any]:
    """Import what `find_source` has found."""
    where, _, name = path.rpartition(":")
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        sys.path.insert(0, str(file.parent))  # so that the file may import its neighbours
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None, file
        assert spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 (sys.path holds strings)
        module = importlib.import_module(where)
    function: Callable[..., Any] = getattr(module, name)
    return function


def prepare(path: str) -> Callable[..., Any]:
    """The user's function, with its columns chosen and its return checked."""
    function = import_function(path)
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def chosen(columns: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in columns.items() if takes_all or k in parameters}

    if inspect.iscoroutinefunction(function):

        async def score_async(prompt: str, completion: str, columns: dict[str, Any]) -> float | None:
            return to_number(await function(prompt, completion, **chosen(columns)))

        return score_async

    def score(prompt: str, completion: str, columns: dict[str, Any]) -> float | None:
        return to_number(function(prompt, completion, **chosen(columns)))

    return score
