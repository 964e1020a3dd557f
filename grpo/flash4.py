"""FlashAttention 4 for packed sequences: `model.attention=flash4`, an NVIDIA GPU of the Hopper generation or newer.

torch's own variable-length kernel is FlashAttention 2, which does not use Hopper's asynchronous matrix units. The
package flash-attn-4 (in requirements/gpu.lock) has kernels that do, compiled at their first call. They are wrapped here
as two operators, so that torch.compile and activation checkpointing see one node each, as with torch's.

Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao: FlashAttention-4, 2026; Shah et al.: FlashAttention-3, arXiv 2407.08608.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot compute in `dtype` on `device`, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in half precision, and model.dtype={str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"it needs a GPU, and the model is on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0 (Hopper) or newer, and this GPU has {major}.{minor}"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "the package flash-attn-4 is not installed: pip install flash-attn-4==4.0.0b36"
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int) -> Tensor:
    """Causal attention within each sequence. q [T, H, D], k and v [T, H_kv, D], half precision -> [T, H, D].

    cu_seqlens: int32 [B + 1]; longest: at least the longest sequence; scale: of the logits; window: keys to the left of
    a query that it sees, itself not counted, or -1 for all.
    """
    out: Tensor = torch.ops.grpo.flash4(q, k, v, cu_seqlens, longest, scale, window)[0]
    return out


def _borders(cu_seqlens: Tensor, longest: int, window: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": True,
        "window_size_left": None if window < 0 else window,
    }


@torch.library.custom_op("grpo::flash4", mutates_args=(), device_types="cuda")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    borders = _borders(cu_seqlens, longest, window)
    out, lse, *_ = _flash_attn_fwd(q, k, v, softmax_scale=scale, return_lse=True, **borders)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, window: int) -> Any:
    T, H, _D = q.shape
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty((H, T), dtype=torch.float32)


@torch.library.custom_op("grpo::flash4_backward", mutates_args=(), device_types="cuda")
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    dq, dk, dv = _flash_attn_bwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        out,
        grad.contiguous(),
        lse,
        scale,
        **_borders(cu_seqlens, longest, window),
    )
    return dq, dk, dv


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor, _lse_grad: Tensor | None) -> tuple[Tensor | None, ...]:
    dq, dk, dv = torch.ops.grpo.flash4_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return dq, dk, dv, None, None, None, None


torch.library.register_autograd("grpo::flash4", _differentiate, setup_context=_save)
