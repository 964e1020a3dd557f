"""Two Triton kernels for rows of logits on CUDA: softmax statistics with residuals, and the gradient in the logits.

They do what `grpo.logprobs` does with torch operations elsewhere (same formulas, float32 arithmetic), but nothing of
the logits' size is allocated, and each logit is read once.

`_softmax` needs the whole row before it can write anything, and a row of a 152k vocabulary is longer than a
multiprocessor's memory. So a team of programs shares a row: each holds its span of columns in registers, publishes the
sums over it, waits until the whole team has, and goes on from the registers. Waiting is safe because programs take
their place by a ticket, in the order in which they really start: the members of the oldest unfinished row are all
running or next to run, whatever order the hardware prefers.

Left out: any fusion with the products themselves; cuBLAS is faster at those than a Triton product with an epilogue.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

# Columns of a program: 32 float32 registers of each of 128 threads. Many small programs hide each other's waiting.
SPAN = 4096
_WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def _softmax(  # type: ignore[no-untyped-def]
    logits,
    stride,
    residual,
    residual_stride,
    targets,
    logprobs,
    entropy,
    lse,
    sums,  # [3, rows, TEAM]: each member's maximum, sum of e = exp(z - maximum), sum of e (z - maximum)
    counters,  # [1 + rows], zeros: the next ticket, and how many members of each row have published their sums
    scale,
    V,
    rows,
    WRITE: tl.constexpr,
    TEAM: tl.constexpr,
    PADDED_TEAM: tl.constexpr,
    SPAN: tl.constexpr,
):
    ticket = tl.atomic_add(counters, 1)
    row = (ticket // TEAM).to(tl.int64)
    member = ticket % TEAM
    logits += row * stride
    at = member * SPAN + tl.arange(0, SPAN)
    z = tl.load(logits + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
    # finite, so that a span of nothing but -inf has no inf - inf
    top = tl.maximum(tl.max(z, 0), -1e30)
    e = tl.exp(z - top)
    total = tl.sum(e, 0)
    weighted = tl.sum(tl.where(e > 0, e * (z - top), 0.0), 0)
    highest = top
    if TEAM > 1:
        mine = sums + row * TEAM + member
        plane = rows * TEAM
        tl.store(mine, top)
        tl.store(mine + plane, total)
        tl.store(mine + 2 * plane, weighted)
        tl.debug_barrier()
        tl.atomic_add(counters + 1 + row, 1, sem="release")
        while tl.atomic_add(counters + 1 + row, 0, sem="acquire") < TEAM:
            pass
        members = tl.arange(0, PADDED_TEAM)
        there = members < TEAM
        # past the first cache, which may hold what these places held before the others wrote
        all_sums = sums + row * TEAM + members
        tops = tl.load(all_sums, mask=there, other=-1e30, cache_modifier=".cg")
        totals = tl.load(all_sums + plane, mask=there, other=0.0, cache_modifier=".cg")
        weighteds = tl.load(all_sums + 2 * plane, mask=there, other=0.0, cache_modifier=".cg")
        highest = tl.max(tops, 0)
        shrink = tl.exp(tops - highest)
        total = tl.sum(totals * shrink, 0)
        weighted = tl.sum((weighteds + totals * (tops - highest)) * shrink, 0)
    lse_row = highest + tl.log(total)
    target = tl.load(targets + row)
    if member == 0:
        tl.store(lse + row, lse_row)
        tl.store(logprobs + row, tl.load(logits + target).to(tl.float32) * scale - lse_row)
        # sum of p (z - highest): the entropy is a difference of numbers of its own size, not of the logits'
        tl.store(entropy + row, tl.log(total) - weighted / total)
    if WRITE:
        p = e * tl.exp(top - lse_row)
        d = tl.where(at == target, 1.0 - p, -p) * scale
        tl.store(residual + row * residual_stride + at, d.to(residual.dtype.element_ty), mask=at < V)


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
    scale,
    V,
    HAS_ENTROPY: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    z = tl.load(logits + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
    logp = z - tl.load(lse + row)
    p = tl.exp(logp)
    g = tl.load(grad + row)
    d = tl.where(at == tl.load(targets + row), g * (1.0 - p), -g * p)
    if HAS_ENTROPY:
        d -= tl.load(entropy_grad + row) * tl.where(p > 0, p * (logp + tl.load(entropy + row)), 0.0)
    tl.store(out + row * out_stride + at, (d * scale).to(out.dtype.element_ty), mask=at < V)


def softmax(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, residual_CV: Tensor | None = None, span: int = SPAN
) -> tuple[Tensor, Tensor, Tensor]:
    """logprob of the target, entropy and logsumexp of each row of logits / temperature, in float32.

    `residual_CV`, where it is given, is filled with the logprob's gradient in the logits, ([v = y] - p) / temperature.
    """
    C, V = logits_CV.shape
    assert logits_CV.stride(1) == 1
    assert residual_CV is None or (residual_CV.shape == (C, V) and residual_CV.stride(1) == 1)
    span = min(span, triton.next_power_of_2(V))
    team = triton.cdiv(V, span)
    logprobs_C, entropy_C, lse_C = torch.empty(3, C, dtype=torch.float32, device=logits_CV.device)
    sums = torch.empty(3, C, team, dtype=torch.float32, device=logits_CV.device)
    counters = torch.zeros(1 + C, dtype=torch.int32, device=logits_CV.device)
    out = logits_CV if residual_CV is None else residual_CV
    _softmax[(C * team,)](
        logits_CV,
        logits_CV.stride(0),
        out,
        out.stride(0),
        targets_C,
        logprobs_C,
        entropy_C,
        lse_C,
        sums,
        counters,
        1 / temperature,
        V,
        C,
        WRITE=residual_CV is not None,
        TEAM=team,
        PADDED_TEAM=triton.next_power_of_2(team),
        SPAN=span,
        num_warps=_WARPS,
    )
    return logprobs_C, entropy_C, lse_C


def logits_grad(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor,
    entropy_grad_C: Tensor | None,
    temperature: float,
    out_CV: Tensor,
) -> None:
    """Fill `out_CV` with the gradient in the logits."""
    C, V = logits_CV.shape
    assert logits_CV.stride(1) == out_CV.stride(1) == 1
    assert out_CV.shape == (C, V)
    span = min(SPAN, triton.next_power_of_2(V))
    _gradient[(C, triton.cdiv(V, span))](
        logits_CV,
        logits_CV.stride(0),
        out_CV,
        out_CV.stride(0),
        targets_C,
        lse_C,
        grad_C.float().contiguous(),
        entropy_C,
        entropy_C if entropy_grad_C is None else entropy_grad_C.float().contiguous(),
        1 / temperature,
        V,
        HAS_ENTROPY=entropy_grad_C is not None,
        SPAN=span,
        num_warps=_WARPS,
    )
