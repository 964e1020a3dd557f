"""From `data.reward`, as a user writes it, to reward objects.

    reward: math_verify                                    one, with its default options
    reward: my_rewards.py:score                            a function of the user's
    reward:                                                several, weighted
      - math_verify
      - {kind: format, pattern: "...", weight: 0.2}
      - {kind: my_rewards.py:score, name: style, weight: 0.5, timeout: 10}

A list, never a mapping: Hydra replaces lists but merges mappings, so a reward given on the command line would silently
be added to the shipped one.
"""

import importlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from grpo.rewards.base import Reward

# Kind -> where its class is. Imported when asked for.
KINDS = {
    "exact_match": "grpo.rewards.text:ExactMatch",
    "number_match": "grpo.rewards.text:NumberMatch",
    "length": "grpo.rewards.text:Length",
    "overlong": "grpo.rewards.text:Overlong",
    "math_verify": "grpo.rewards.math_verify:MathVerify",
    "format": "grpo.rewards.regex:Format",
    "reasoning_gym": "grpo.rewards.gym:ReasoningGym",
    "http": "grpo.rewards.http:Http",
    "environment": "grpo.rewards.environment:FromEnvironment",
    "python": "grpo.rewards.python:Python",
}


def build_rewards(spec: Any, *, max_tokens: int) -> list[tuple[Reward, float]]:
    """(reward, weight) for each. Raises ValueError that names the entry and what would be right.

    max_tokens: the longest completion, the default of `overlong`.
    """
    if isinstance(spec, Mapping):
        raise ValueError(f"data.reward={dict(spec)}: write a list: data.reward=[{{kind: ..., ...}}]")
    entries = [spec] if isinstance(spec, str) else spec
    if not isinstance(entries, list | tuple) or not entries:
        raise ValueError(f"data.reward={spec!r}: expected a reward's name, file.py:function, or a list of them")
    weighted = [_build(entry, max_tokens) for entry in entries]
    names = [reward.name for reward, _ in weighted]
    for name in names:
        if name in ("mean", "std"):
            raise ValueError(
                f"data.reward: a reward is called {name!r}, as a metric of all of them is; give it a `name`"
            )
        if names.count(name) > 1:
            raise ValueError(f"data.reward: {names.count(name)} rewards are called {name!r}; give them a `name`")
    return weighted


def _build(entry: Any, max_tokens: int) -> tuple[Reward, float]:
    given = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise ValueError(f"data.reward: {entry!r} is no reward; expected a name or {{kind: <name>, <option>: ...}}")
    options: dict[str, Any] = dict(given)
    kind = options.pop("kind")
    weight = options.pop("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(f"data.reward[{kind}].weight={weight!r}: expected a number")
    if ":" in kind:
        kind, options["path"] = "python", kind
    if kind not in KINDS:
        raise ValueError(f"data.reward={kind}: choose one of {', '.join(sorted(KINDS))}, or file.py:function")
    if kind == "overlong":
        options = {"max_tokens": max_tokens, "cache": max(1, max_tokens // 5)} | options
    default_name = str(options["path"]).rpartition(":")[2] if "path" in options else kind
    options.setdefault("name", default_name)
    module, _, class_name = KINDS[kind].partition(":")
    cls: type[Reward] = getattr(importlib.import_module(module), class_name)
    allowed = {f.name for f in fields(cls) if f.init}
    for key in options:
        if key not in allowed:
            raise ValueError(f"data.reward[{kind}].{key}: no such option; it has {', '.join(sorted(allowed))}")
    for f in fields(cls):
        if f.init and f.default is MISSING and f.default_factory is MISSING and f.name not in options:
            raise ValueError(f"data.reward[{kind}].{f.name}: has no default; give it")
    return cls(**options), float(weight)
