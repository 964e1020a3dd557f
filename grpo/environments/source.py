"""Looking at a user's Python file without running it."""

import ast

from grpo.rewards.python import bound_names, find_source


def check_defined(path: str, key: str) -> None:
    """Raises ValueError when `file.py:name` or `module:name` is missing; what cannot be seen is left to the import."""
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
