"""Secrets stay out of what is written: `.hydra/`, status.json, checkpoints, wandb, reports, logs.

    rollout.api_key=abc   is written as   rollout.api_key=***

A value that names an environment variable (`${oc.env:GRPO_API_KEY,null}`, the default) is written as it is, so that a
resumed run finds its key there; a literal one must be given again.
"""

import re
from typing import Any

MASK = "***"
_NAMES = r"(?:api_?key|password|secret|auth_token|access_token)"
_KEY = re.compile(rf"(?:^|_){_NAMES}$", re.IGNORECASE)
_OVERRIDE = re.compile(rf"((?:^|[\s,.+~_]){_NAMES}=)(?!null\b|['\"]?\$\{{)('[^']*'|\"[^\"]*\"|[^,\s]+)", re.IGNORECASE)


def masked(node: Any) -> Any:
    """A copy of nested dicts and lists with the values of secret keys masked, also within texts (`masked_text`)."""
    if isinstance(node, dict):
        return {k: MASK if _is_secret(k, v) else masked(v) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [masked(v) for v in node]
    return masked_text(node) if isinstance(node, str) else node


def masked_text(text: str) -> str:
    """A text with the values of overrides such as `rollout.api_key=abc` masked."""
    return _OVERRIDE.sub(rf"\1{MASK}", text)


def _is_secret(key: Any, value: Any) -> bool:
    return bool(_KEY.search(str(key))) and value not in (None, "") and "${" not in str(value)
