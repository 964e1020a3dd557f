"""Which sizes of an attention head vLLM takes on a CPU, read from its source: it says so late, in the engine.

Left out: GPUs, where the choice of the attention backend decides and nearly every size has one; importing vLLM, which
takes seconds. Where the source is not as we know it, nothing is checked and vLLM has its say.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BACKEND, METHOD = "v1/attention/backends/cpu_attn.py", "get_supported_head_sizes"


def check_heads(config: dict[str, Any], path: str) -> None:
    """Raises ValueError when a server on this CPU could not compute the model's attention. config: its config.json."""
    size, sizes = head_size(config), cpu_head_sizes()
    if size and sizes and size not in sizes:
        key = "head_dim" if config.get("head_dim") else "hidden_size / num_attention_heads"
        raise ValueError(
            f"model.path={path}: its attention heads have size {size} ({key} in its config.json), vLLM on a CPU takes "
            f"{', '.join(map(str, sizes))}; use another model, a GPU (model.device=cuda), or attach to a server that "
            "can (rollout.urls)"
        )


def head_size(config: dict[str, Any]) -> int | None:
    """None where the config does not say."""
    try:
        return int(config.get("head_dim") or int(config["hidden_size"]) // int(config["num_attention_heads"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def cpu_head_sizes() -> list[int]:
    """Empty where the list is not found."""
    package = find_spec("vllm")
    try:
        tree = ast.parse((Path((package and package.origin) or "").parent / BACKEND).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == METHOD and isinstance(node.body[-1], ast.Return):
            try:
                sizes = ast.literal_eval(node.body[-1].value or ast.Constant(None))
            except ValueError:
                return []
            return sizes if isinstance(sizes, list) and all(isinstance(size, int) for size in sizes) else []
    return []
