"""Two Triton kernels for rows of logits on CUDA: softmax statistics, and the gradient in the logits, written in place.

They do what `grpo.logprobs` does with torch operations elsewhere (same formulas, float32 arithmetic), but each reads
the logits once, and nothing of their size is allocated. A row is as long as the vocabulary: one program takes one row.

Left out: any fusion with the products themselves; cuBLAS is faster at those than a Triton product with an epilogue.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_BLOCK = 4096
_WARPS = 8


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits, stride, targets, logprobs, entropy, lse, temperature, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    # Each lane keeps the maximum and the sums of e = exp(z - top) and of e (z - top) over what it sees; reduced at
    # the end. The start is finite so that a lane that has seen nothing but -inf has no inf - inf.
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32) / temperature
        new_top = tl.maximum(top, z)
        shrink = tl.exp(top - new_top)
        e = tl.exp(z - new_top)
        weighted = (weighted + total * (top - new_top)) * shrink + tl.where(e > 0, e * (z - new_top), 0.0)
        total = total * shrink + e
        top = new_top
    highest = tl.max(top, 0)
    shrink = tl.exp(top - highest)
    total_all = tl.sum(total * shrink, 0)
    # sum of p (z - highest): the entropy is a difference of numbers of its own size, not of the logits'
    mean = tl.sum((weighted + total * (top - highest)) * shrink, 0) / total_all
    lse_row = highest + tl.log(total_all)
    target = tl.load(logits + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(lse + row, lse_row)
    tl.store(logprobs + row, target - lse_row)
    tl.store(entropy + row, tl.log(total_all) - mean)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    stride,
    out,
    out_stride,
    targets,
    lse,
    grad,
    entropy,
    entropy_grad,
    temperature,
    V,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    out += row * out_stride
    target = tl.load(targets + row)
    lse_row = tl.load(lse + row)
    g = tl.load(grad + row)
    if HAS_ENTROPY:
        entropy_row = tl.load(entropy + row)
        entropy_g = tl.load(entropy_grad + row)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        logp = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32) / temperature - lse_row
        p = tl.exp(logp)
        d = -g * p
        if HAS_ENTROPY:
            d -= entropy_g * tl.where(p > 0, p * (logp + entropy_row), 0.0)
        d = tl.where(at == target, d + g, d) / temperature
        # `out` may be narrower numbers in the row's own memory: everything of this block and the blocks before it is
        # read by now, and it ends before the next block begins.
        tl.debug_barrier()
        tl.store(out + at, d.to(out.dtype.element_ty), mask=at < V)


def statistics(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logprob of the target, entropy and logsumexp of each row of logits / temperature, in float32."""
    C, V = logits_CV.shape
    assert logits_CV.stride(1) == 1
    logprobs_C, entropy_C, lse_C = torch.empty(3, C, dtype=torch.float32, device=logits_CV.device)
    _statistics[(C,)](
        logits_CV,
        logits_CV.stride(0),
        targets_C,
        logprobs_C,
        entropy_C,
        lse_C,
        temperature,
        V,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return logprobs_C, entropy_C, lse_C


def logits_grad_(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor,
    entropy_grad_C: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient in the logits [C, V], in `dtype`, in the memory of `logits_CV`, which are lost."""
    C, V = logits_CV.shape
    assert logits_CV.is_contiguous()
    assert dtype.itemsize <= logits_CV.dtype.itemsize
    out_CV = logits_CV.view(dtype)[:, :V]
    _gradient[(C,)](
        logits_CV,
        logits_CV.stride(0),
        out_CV,
        out_CV.stride(0),
        targets_C,
        lse_C,
        grad_C.float().contiguous(),
        entropy_C,
        entropy_C if entropy_grad_C is None else entropy_grad_C.float().contiguous(),
        temperature,
        V,
        HAS_ENTROPY=entropy_grad_C is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return out_CV
