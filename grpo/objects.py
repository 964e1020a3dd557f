"""The groups of a configuration made into objects; what is wrong with one is said in one line, with key and value."""

import contextlib
import pydoc
import re
import typing
from typing import Any, TypeVar

from hydra.utils import instantiate
from omegaconf import OmegaConf

from grpo.settings import fits, type_name

T = TypeVar("T")


def build(node: Any, name: str, kind: type[T]) -> T:
    """Instantiate one group; plain lists and dicts reach it. A ValueError keeps its one line."""
    from hydra.errors import InstantiationException

    try:
        built = instantiate(node, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        if isinstance(cause, ValueError):
            raise ValueError(str(cause)) from error
        if isinstance(cause, TypeError):
            raise ValueError(_wrong_keys(name, str(cause))) from error
        raise ValueError(f"{name}: {' '.join(str(cause).split())}") from error
    if not isinstance(built, kind):
        raise ValueError(f"{name}._target_={node['_target_']}: makes a {type(built).__name__}, not a {kind.__name__}")
    return built


def build_loss(node: Any) -> Any:
    from grpo.losses.base import Loss

    given: Any = OmegaConf.to_container(node)
    found = None
    with contextlib.suppress(pydoc.ErrorDuringImport):  # `build` says what is wrong with the module
        found = pydoc.locate(str(given["_target_"]))
    if found is not None and not (isinstance(found, type) and issubclass(found, Loss)):
        raise ValueError(f"loss._target_={given['_target_']}: is no subclass of grpo.losses.Loss")
    for key, hint in _parameters(found).items():
        if key in given and not fits(given[key], hint):
            raise ValueError(f"loss.{key}={given[key]!r}: expected {type_name(hint)}")
    return build(node, "loss", Loss)  # type: ignore[type-abstract]


def _parameters(made: type | None) -> dict[str, Any]:
    """Annotated types of a class's parameters, those that it hands on to its base classes included."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(NameError):  # `build` says what is wrong with the class
        for base in reversed(made.__mro__ if made is not None else ()):
            hints |= typing.get_type_hints(vars(base).get("__init__", object))
    return hints


def _wrong_keys(name: str, message: str) -> str:
    """Python's words for a wrong argument, in the user's."""
    if found := re.search(r"unexpected keyword argument '(\w+)'", message):
        return f"{name}.{found[1]}: no such key"
    if found := re.search(r"missing \d+ required keyword-only arguments?: '(\w+)'", message):
        return f"{name}.{found[1]}: no value; give {name}.{found[1]}=<value>, or choose another {name}"
    return f"{name}: {message}"
