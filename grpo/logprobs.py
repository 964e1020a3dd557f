"""Token logprobs and entropy from hidden states, without ever holding the logits of the whole batch.

The head's logits are N x V numbers (20 GB in float32 for 32k tokens of a 152k vocabulary). Here they exist for a block
of rows at a time. Two ways to the same numbers:

- `token_logprobs` is an ordinary differentiable function. The upstream gradient is known only in its backward pass, so
  that computes the logits of each block again: four products of size N x V x D.
- `head_backward` is told how a block's logprobs become a loss, and goes forward and backward while the block's logits
  exist: three products. It adds up the weight's gradient in float32. A loss that ties the tokens of a sequence together
  gets blocks of whole sequences (`sequence_blocks`).

Law 4: logits are divided by the temperature in float32, before the normalisation. (A raw logprob divided by T is not
the logprob at temperature T.) With z = logits / T and p = softmax(z):

    logprob_n = z_ny - logsumexp(z_n)           d logprob_n / d z_nv = [v = y] - p_nv
    entropy_n = -sum_v p_nv log p_nv            d entropy_n / d z_nv = -p_nv (log p_nv + entropy_n)

On CUDA the row operations are those of `grpo.kernels`, and logits of bfloat16 weights leave the product in float32.
Left out: ignored targets (what is not trained is not passed in), label smoothing, logit soft-capping (`grpo.model`
refuses models that have it).

Shapes: N tokens, V vocabulary, D hidden size, C rows of a block.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Bytes of float32 logits held at a time. On a GPU larger blocks make better products, above all for the weight's
# gradient, whose V x D sums are read and written once per block; on a CPU memory is all that matters.
_BLOCK_BYTES = {"cuda": 940_000_000, "cpu": 64_000_000}

# (logprobs of the block, entropy of the block, its place in N) -> the block's share of the loss, a scalar
BlockLoss = Callable[[Tensor, Tensor, slice], Tensor]


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    bias_V: Tensor | None = None,
    entropy_grad: bool = False,
    rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution (nats), at the sampling temperature.

    Returns logprobs_N, differentiable in hidden states, weight and bias, and entropy_N, which is detached unless
    `entropy_grad`. Both float32 (float64 for float64 input). `rows` of logits are held at a time (default: by memory);
    it changes speed and memory, not the result.
    """
    _check(hidden_ND, weight_VD, targets_N, temperature)
    cut = even_blocks(len(targets_N), rows or block_rows(weight_VD))
    return _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, targets_N, temperature, entropy_grad, cut)


def head_backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    block_loss: BlockLoss,
    blocks: Sequence[slice],
    weight_grad_VD: Tensor | None,
    *,
    bias_V: Tensor | None = None,
    bias_grad_V: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of the head in one pass over `blocks`, which cover N (`even_blocks`, `sequence_blocks`).

    `block_loss(logprobs_C, entropy_C, where)` gives a block's share of the loss as a scalar; it may use either argument
    and is called once per block, in order. The gradient of the sum of these scalars is added to `weight_grad_VD` and
    `bias_grad_V` (None: not wanted), and that of the hidden states is returned.

    Returns logprobs_N and entropy_N (detached), and hidden_grad_ND in the hidden states' dtype.
    """
    _check(hidden_ND, weight_VD, targets_N, temperature)
    logprobs_N, entropy_N = torch.empty(2, len(targets_N), dtype=_wide(hidden_ND), device=hidden_ND.device)
    hidden_grad_ND = torch.empty_like(hidden_ND)
    for where in blocks:
        with torch.no_grad():
            logits_CV = _logits(hidden_ND[where], weight_VD, bias_V)
            logprobs_C, entropy_C, lse_C = _statistics(logits_CV, targets_N[where], temperature)
        logprobs_N[where], entropy_N[where] = logprobs_C, entropy_C
        leaves = logprobs_C.requires_grad_(), entropy_C.requires_grad_()
        share = block_loss(*leaves, where)
        grad_C, entropy_grad_C = torch.autograd.grad(share, leaves, allow_unused=True)
        with torch.no_grad():
            grad_C = torch.zeros_like(lse_C) if grad_C is None else grad_C
            d_CV = _logits_grad_(
                logits_CV,
                targets_N[where],
                lse_C,
                grad_C,
                entropy_C.detach(),
                entropy_grad_C,
                temperature,
                hidden_ND.dtype,
            )
            del logits_CV
            torch.mm(d_CV, weight_VD, out=hidden_grad_ND[where])
            _add_head_grad(weight_grad_VD, bias_grad_V, d_CV, hidden_ND[where])
            del d_CV
    return logprobs_N, entropy_N, hidden_grad_ND


def block_rows(weight_VD: Tensor) -> int:
    """How many rows of logits to hold at a time: as many as the memory set aside for them takes."""
    rows = _BLOCK_BYTES[weight_VD.device.type] // (4 * len(weight_VD))
    return max(1, rows // 64 * 64 if rows > 64 else rows)


def even_blocks(N: int, rows: int) -> list[slice]:
    """The fewest blocks of at most `rows`, of like size."""
    count = -(-N // rows)
    return [slice(N * i // count, N * (i + 1) // count) for i in range(count)]


def sequence_blocks(lengths: Sequence[int], rows: int) -> list[slice] | None:
    """Blocks of whole sequences with at most `rows` tokens each; None if a sequence is longer than that."""
    if max(lengths, default=0) > rows:
        return None
    blocks: list[slice] = []
    start = stop = 0
    for length in lengths:
        if stop + length - start > rows:
            blocks.append(slice(start, stop))
            start = stop
        stop += length
    return [*blocks, slice(start, stop)] if stop > start else blocks


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature: float,
        entropy_grad: bool,
        blocks: list[slice],
    ) -> tuple[Tensor, Tensor]:
        values = torch.empty(3, len(targets_N), dtype=_wide(hidden_ND), device=hidden_ND.device)
        logits_CV = None
        for where in blocks:
            logits_CV = None  # frees the last block's before the next is made
            logits_CV = _logits(hidden_ND[where], weight_VD, bias_V)
            values[:, where] = torch.stack(_statistics(logits_CV, targets_N[where], temperature))
        logprobs_N, entropy_N, lse_N = values.unbind()
        # A tiny model's logits are one block: kept, the backward pass need not compute them again.
        keep = len(blocks) == 1 and not hidden_ND.is_cuda and any(ctx.needs_input_grad[:3])
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, logits_CV if keep else None)
        ctx.temperature, ctx.entropy_grad, ctx.blocks = temperature, entropy_grad, blocks
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, entropy_grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=lse_N.dtype) if wants_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=lse_N.dtype) if wants_bias else None
        for where in ctx.blocks:
            # `kept` may be wanted again (retain_graph), so its gradient is written elsewhere.
            logits_CV = _logits(hidden_ND[where], weight_VD, bias_V) if kept is None else kept.clone()
            d_CV = _logits_grad_(
                logits_CV,
                targets_N[where],
                lse_N[where],
                grad_N[where],
                entropy_N[where],
                entropy_grad_N[where] if ctx.entropy_grad else None,
                ctx.temperature,
                hidden_ND.dtype,
            )
            del logits_CV
            if hidden_grad_ND is not None:
                torch.mm(d_CV, weight_VD, out=hidden_grad_ND[where])
            _add_head_grad(weight_grad_VD, bias_grad_V, d_CV, hidden_ND[where])
            del d_CV
        narrow = [g if g is None else g.to(hidden_ND.dtype) for g in (weight_grad_VD, bias_grad_V)]
        return hidden_grad_ND, *narrow, None, None, None, None


def _check(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"rollout.temperature={temperature} must be greater than 0 to train: greedy has no logprobs")
    assert hidden_ND.shape == (len(targets_N), weight_VD.shape[1])
    assert hidden_ND.dtype == weight_VD.dtype


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """In float32 (float64). A bfloat16 logit of 20 is off by up to 0.06, which would be 6 % of a ratio."""
    if hidden_CD.is_cuda and hidden_CD.dtype != _wide(hidden_CD):
        logits_CV = torch.mm(hidden_CD, weight_VD.t(), out_dtype=torch.float32)
        return logits_CV if bias_V is None else logits_CV.add_(bias_V)
    return torch.nn.functional.linear(hidden_CD, weight_VD, bias_V).to(_wide(hidden_CD))


def _statistics(logits_CV: Tensor, targets_C: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """logprob of the target, entropy and logsumexp of each row of logits / temperature."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        from grpo import kernels  # Triton exists where CUDA does

        return kernels.statistics(logits_CV, targets_C, temperature)
    logp_CV = logits_CV / temperature
    lse_C = logp_CV.logsumexp(1)
    logp_CV.sub_(lse_C[:, None])
    logprobs_C = logp_CV.gather(1, targets_C[:, None]).squeeze(1)
    p_CV = logp_CV.exp()
    # A logit of -inf has p = 0, and 0 * -inf would make the entropy NaN: it contributes nothing.
    entropy_C = p_CV.mul_(logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)).sum(1).neg_()
    return logprobs_C, entropy_C, lse_C


def _logits_grad_(
    logits_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor,
    entropy_grad_C: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the loss in the logits, rounded to the dtype of the products to come. Overwrites the logits."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        from grpo import kernels

        return kernels.logits_grad_(logits_CV, targets_C, lse_C, grad_C, entropy_C, entropy_grad_C, temperature, dtype)
    logp_CV = logits_CV.div_(temperature).sub_(lse_C[:, None])
    if entropy_grad_C is None:
        d_CV = logp_CV.exp_().mul_(-grad_C[:, None])
    else:
        p_CV = logp_CV.exp()
        logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0).add_(entropy_C[:, None]).mul_(entropy_grad_C[:, None])
        d_CV = logp_CV.add_(grad_C[:, None]).mul_(p_CV).neg_()
    d_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None].to(d_CV.dtype))
    return d_CV.div_(temperature).to(dtype)


def _add_head_grad(weight_grad_VD: Tensor | None, bias_grad_V: Tensor | None, d_CV: Tensor, hidden_CD: Tensor) -> None:
    if weight_grad_VD is not None:
        if weight_grad_VD.dtype == d_CV.dtype:
            weight_grad_VD.addmm_(d_CV.t(), hidden_CD)
        elif d_CV.is_cuda:
            torch.addmm(weight_grad_VD, d_CV.t(), hidden_CD, out_dtype=torch.float32, out=weight_grad_VD)
        else:
            weight_grad_VD.add_(d_CV.t() @ hidden_CD)
    if bias_grad_V is not None:
        bias_grad_V.add_(d_CV.sum(0, dtype=bias_grad_V.dtype))
