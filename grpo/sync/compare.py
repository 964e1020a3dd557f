"""Which tensors of a server's model are not those of a file: by what each layer computes, since a prepacked layer's
weights cannot be read any more.

Used after a proof has failed (law 8), in the server's process. Left out: layers in shards (tensor parallel), quantised
ones, and models whose layers have other names than their checkpoint's: their tensors count as not compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grpo.sync.engine import COMPARED

# Relative: two products of the same weights differ by rounding; a tensor that is off by less is not seen.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
ROWS = 16  # of the random input
SHOWN = 5  # names in a message


@dataclass
class Comparison:
    """off: how far, by the file's name of the tensor. seen: names that were compared."""

    total: int
    off: dict[str, float] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def note(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        self.seen.add(name)
        scale = float(theirs.abs().max()) or 1.0
        error = float((ours.double() - theirs.double()).abs().max()) / scale
        if not error <= TOLERANCE[theirs.dtype]:  # NaN is off
            self.off[name] = max(error, self.off.get(name, 0.0))

    def __str__(self) -> str:
        names = sorted(self.off, key=lambda name: -self.off[name])
        found = f"{len(names)} off: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}" if names else ""
        return f"{COMPARED}{len(self.seen)} of {self.total} tensors, {found or 'none is off'}"


def compare_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> Comparison:
    """model: vLLM's (or one of the same names). tensors: of a checkpoint, in the model's dtype, a tied head left out.

    Layers that are packed from several tensors (`packed_modules_mapping`, as qkv_proj) are compared part by part.
    """
    result = Comparison(len(tensors))
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if (method := getattr(module, "quant_method", None)) is not None and hasattr(method, "apply"):
            parent, _, last = path.rpartition(".")
            names = [f"{parent}.{part}.weight".lstrip(".") for part in packed.get(last, [last])]
            if names == ["lm_head.weight"] and names[0] not in tensors:
                names = [name for name in tensors if name.endswith("embed_tokens.weight")]  # the head is tied
            _by_effect(module, method, {name: tensors[name] for name in names if name in tensors}, len(names), result)
    for name, parameter in model.named_parameters():
        ours = tensors.get(name)
        if ours is not None and parameter.ndim == ours.ndim and parameter.shape[1:] == ours.shape[1:]:
            rows = ours.shape[0]  # an embedding may be padded
            if parameter.shape[0] >= rows:
                result.note(name, ours, parameter.detach()[:rows].to(ours.dtype))
    return result


def _by_effect(module: nn.Module, method: Any, weights: dict[str, Tensor], expected: int, result: Comparison) -> None:
    """A linear layer's product with random rows, against the file's."""
    if len(weights) != expected or any(weight.ndim != 2 for weight in weights.values()):
        return
    first = next(iter(weights.values()), None)
    if first is None:
        return
    draw = torch.Generator().manual_seed(0)
    x_RH = torch.randn(ROWS, first.shape[1], generator=draw).to(first)
    try:
        theirs_RO = method.apply(module, x_RH, None)
    except (RuntimeError, AssertionError):  # a shard takes another width
        return
    width = sum(weight.shape[0] for weight in weights.values())
    if theirs_RO.shape[-1] < width or (len(weights) > 1 and theirs_RO.shape[-1] != width):
        return
    start = 0
    for name, weight in weights.items():
        end = start + weight.shape[0]
        result.note(name, torch.nn.functional.linear(x_RH, weight), theirs_RO[:, start:end])
        start = end
