"""Type checks of the options that come from a configuration: Hydra lets `timeout=abc` pass, we name the key."""

import types
import typing
from dataclasses import fields
from typing import Any

NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}


def check_types(options: Any, prefix: str) -> None:
    """Raises ValueError for a field of the dataclass object whose value is not of its annotated type.

    `prefix` is how the user reaches the object, e.g. "data" or "data.reward (math_verify)".
    """
    hints = typing.get_type_hints(type(options))
    for f in fields(options):
        if not f.init:
            continue
        value = getattr(options, f.name)
        if not fits(value, hints[f.name]):
            raise ValueError(f"{prefix}.{f.name}={value!r}: expected {describe(hints[f.name])}")


def fits(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, a) for a in arguments)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(v, arguments[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(k, arguments[0]) and fits(v, arguments[1]) for k, v in value.items()
        )
    if hint in (int, float) and isinstance(value, bool):
        return False  # a bool is an int to Python, never to a user
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def describe(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(a) for a in arguments)
    if origin is list:
        return "a list"
    if origin is dict:
        return "a mapping"
    return NAMES.get(hint, str(hint))


def at_least(low: float, prefix: str, **values: float | None) -> None:
    """Raises ValueError for a value below `low`; None passes."""
    for key, value in values.items():
        if value is not None and not value >= low:
            raise ValueError(f"{prefix}.{key}={value}: must be at least {low:g}")


def above(low: float, prefix: str, **values: float | None) -> None:
    """Raises ValueError for a value that is not above `low`; None passes."""
    for key, value in values.items():
        if value is not None and not value > low:
            raise ValueError(f"{prefix}.{key}={value}: must be above {low:g}")


def one_of(choices: tuple[str, ...], prefix: str, **values: str) -> None:
    """Raises ValueError for a value that is none of `choices`."""
    for key, value in values.items():
        if value not in choices:
            raise ValueError(f"{prefix}.{key}={value!r}: choose one of {', '.join(choices)}")
