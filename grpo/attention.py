"""Causal attention over sequences packed end to end, for any transformers model: the implementation "grpo_packed".

transformers calls the function below with queries of the whole pack, [1, heads, T, head_dim]. On CUDA in half precision
it hands them to torch's variable-length kernel, or to another of `KERNELS`; elsewhere it lays the sequences out as rows
padded on the right, where causality alone keeps the padding from being seen, runs scaled_dot_product_attention, and
takes the tokens back out.

Features of an attention that neither way computes are refused, never ignored: soft-capping, sinks, position biases,
attention that is not causal. Sliding windows are right on both.

Where sequences share a prompt, the pack holds it once (`grpo.batch`). Both ways then attend over the sequences in full:
queries, keys and values are taken from the pack for each of them, and each token's output from one of its places.

Shapes: T tokens of the pack, F of the sequences in full, B sequences, L the longest, H heads, D head dimension.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from grpo import flash4

NAME = "grpo_packed"

# Key heads that serve several query heads are the kernel's own doing; since torch 2.12 its wrapper wants to be asked.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packing(
    cu_seqlens: Tensor,
    max_seqlen: int,
    dtype: torch.dtype,
    unfold_F: Tensor | None = None,
    fold_T: Tensor | None = None,
) -> dict[str, Any]:
    """Keyword arguments for a transformers model that say where the sequences of a pack begin and end.

    cu_seqlens: int32 [B + 1], from 0 to F; max_seqlen: the longest sequence; dtype: what the model computes in;
    unfold_F, fold_T: as a `MicroBatch` has them, or None where F is T.
    """
    if cu_seqlens.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        # The kernel only sizes its grid by it, so a power of two does, and compiled layers see few values.
        borders = {"cu_seq_lens_q": cu_seqlens, "max_length_q": 1 << (max(max_seqlen, 512) - 1).bit_length()}
        return borders if unfold_F is None else {**borders, "packed_unfold_F": unfold_F, "packed_fold_T": fold_T}
    # Worked out once per micro-batch rather than in every layer.
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    offset_L = torch.arange(max_seqlen, device=cu_seqlens.device)
    real_BL = offset_L < lengths[:, None]
    # Padding repeats the row's first token: finite, and behind every token that could see it.
    gather_BL = starts[:, None] + offset_L * real_BL
    slots_F = real_BL.flatten().nonzero().squeeze(1)
    if unfold_F is None or fold_T is None:
        return {"packed_gather_BL": gather_BL, "packed_slots_T": slots_F}
    return {"packed_gather_BL": unfold_F[gather_BL], "packed_slots_T": slots_F[fold_T]}


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    packed_gather_BL: Tensor | None = None,
    packed_slots_T: Tensor | None = None,
    packed_unfold_F: Tensor | None = None,
    packed_fold_T: Tensor | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    kernel: "Kernel | None" = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, H_kv, T, D] -> [1, T, H, D]. The signature is transformers' own."""
    refused = {"soft-capping": softcap, "attention sinks": s_aux, "a position bias": position_bias}
    for what, given in refused.items():
        if given is not None:
            raise ValueError(f"{type(module).__name__} uses {what}, which packed attention does not compute")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal; packed attention is")
    assert attention_mask is None
    assert dropout == 0.0
    assert query.shape[0] == 1
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_gather_BL is not None and packed_slots_T is not None:
        out_THD = _rows(query, key, value, packed_gather_BL, packed_slots_T, scaling, sliding_window)
    elif cu_seq_lens_q is not None and max_length_q is not None:
        # A window of W counts the token itself; the kernels count what lies to its left.
        left = -1 if sliding_window is None or sliding_window >= max_length_q else sliding_window - 1
        q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if packed_unfold_F is not None and packed_fold_T is not None:
            q_THD, k_THD, v_THD = (_unfold(x, packed_unfold_F) for x in (q_THD, k_THD, v_THD))
        out_THD = (kernel or _varlen)(q_THD, k_THD, v_THD, cu_seq_lens_q, max_length_q, scaling, left)
        if packed_fold_T is not None:
            out_THD = out_THD.index_select(0, packed_fold_T)
    else:
        raise ValueError(f"{type(module).__name__} does not hand the sequences' borders to its attention")
    return out_THD.unsqueeze(0), None


def _unfold(x_THD: Tensor, unfold_F: Tensor) -> Tensor:
    """[F, H, D]. By way of float32, in which the gradients of a prompt's places are then added up."""
    return x_THD.float().index_select(0, unfold_F).to(x_THD.dtype)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, left: int) -> Tensor:
    out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(left, 0), **_GROUPED)
    assert isinstance(out, Tensor)
    return out


def _rows(
    query: Tensor, key: Tensor, value: Tensor, gather_BL: Tensor, slots_T: Tensor, scale: float, window: int | None
) -> Tensor:
    B, L = gather_BL.shape
    group = query.shape[1] // key.shape[1]

    def rows(x: Tensor, repeat: int) -> Tensor:  # [1, H, T, D] -> [B, H, L, D]
        x = x.squeeze(0).index_select(1, gather_BL.flatten()).unflatten(1, (B, L)).transpose(0, 1)
        return x.repeat_interleave(repeat, 1) if repeat > 1 else x

    query, key, value = rows(query, 1), rows(key, group), rows(value, group)
    if window is None or window >= L:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        back_LL = torch.arange(L, device=query.device)[:, None] - torch.arange(L, device=query.device)
        mask_LL = (back_LL >= 0) & (back_LL < window)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask_LL, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, slots_T)


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int], Tensor]
KERNELS: dict[str, Kernel] = {"torch": _varlen, "flash4": flash4.attend}  # model.attention


def implementation(kernel: str) -> str:
    """Its name for transformers, which takes every name with "flash" in it for one of its own."""
    return NAME if kernel == "torch" else f"{NAME}_{list(KERNELS).index(kernel)}"


for name, kernel in KERNELS.items():
    AttentionInterface.register(implementation(name), functools.partial(packed_attention, kernel=kernel))
