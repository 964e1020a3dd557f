"""From `data.environment`, as a user writes it, to a `Kind`.

environment: guess                                             one that ships, with its default options
environment: {kind: my_game.py:Game, max_turns: 5, size: 3}    a class of the user's; other keys are its arguments
environment: {kind: tools, tools: [my_tools.py:search]}
"""

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from grpo.environments.base import KEY, Kind

# Kind -> where its class is. Imported when asked for.
KINDS = {
    "guess": "grpo.environments.guess:Guess",
    "tools": "grpo.environments.tools:Tools",
    "custom": "grpo.environments.custom:Custom",
}


def build_environment(spec: Any) -> Kind | None:
    """None for null. Raises ValueError that names the key and what would be right."""
    if spec is None:
        return None
    given = {"kind": spec} if isinstance(spec, str) else spec
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise ValueError(f"{KEY}={spec!r}: expected a name, file.py:Class, or {{kind: <name>, <option>: ...}}")
    options: dict[str, Any] = {str(key): value for key, value in given.items() if key != "kind"}
    kind = given["kind"]
    name = "custom" if ":" in kind else kind
    if name not in KINDS or kind == "custom":
        shipped = ", ".join(sorted(set(KINDS) - {"custom"}))
        raise ValueError(f"{KEY}={kind}: choose one of {shipped}, or file.py:Class")
    module, _, class_name = KINDS[name].partition(":")
    cls: type[Kind] = getattr(importlib.import_module(module), class_name)
    allowed = {f.name for f in fields(cls) if f.init}
    if name == "custom":
        own = {key: options.pop(key) for key in [*options] if key not in allowed or key in ("path", "arguments")}
        return cls(**options, path=kind, arguments=own)  # type: ignore[call-arg]
    for key in options:
        if key not in allowed:
            raise ValueError(f"{KEY}.{key}: no such option; {kind} has {', '.join(sorted(allowed))}")
    for f in fields(cls):
        if f.init and f.default is MISSING and f.default_factory is MISSING and f.name not in options:
            raise ValueError(f"{KEY}.{f.name}: has no default; give it")
    return cls(**options)
