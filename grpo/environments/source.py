"""Looking at a user's Python file without running it."""

import ast
from collections.abc import Collection

from grpo.rewards.python import bound_names, find_source


def check_defined(path: str, key: str, arguments: Collection[str] | None = None) -> None:
    """Raises ValueError when `file.py:name` or `module:name` is missing, or, with `arguments`, is a class whose own
    constructor has not these or needs others; what cannot be seen is left to the import."""
    source, name = find_source(path, key), path.rpartition(":")[2]
    if source is None:
        return
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
    except SyntaxError as error:
        raise ValueError(f"{key}: {source}, line {error.lineno}: {error.msg}") from error
    if not any(name in bound_names(node) for node in tree.body):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        defined = [node.name for node in tree.body if isinstance(node, kinds)]
        raise ValueError(f"{key}: {source} defines no {name!r}; it defines {', '.join(defined) or 'nothing'}")
    for node in tree.body:
        if arguments is not None and isinstance(node, ast.ClassDef) and node.name == name and not node.decorator_list:
            _check_constructor(node, key, arguments)


def _check_constructor(node: ast.ClassDef, key: str, arguments: Collection[str]) -> None:
    made = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
    if made is None or made.decorator_list:  # inherited, or made by something else
        return
    a = made.args
    positional = [p.arg for p in (*a.posonlyargs, *a.args)][1:]
    known = [*positional, *(p.arg for p in a.kwonlyargs)]
    for argument in arguments:
        if argument not in known and a.kwarg is None:
            raise ValueError(f"{key}.{argument}: no such argument; {node.name} has {', '.join(known) or 'none'}")
    needed = positional[: len(positional) - len(a.defaults)]
    needed += [p.arg for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    for argument in needed:
        if argument not in arguments:
            raise ValueError(f"{key}.{argument}: {node.name} has no default for it; give it")
