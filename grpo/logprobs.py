"""Token logprobs and entropy from hidden states, without ever holding the logits of the whole batch.

The head's logits are N x V numbers (18 GB in float32 for 32k tokens of a 152k vocabulary). Here they exist for a block
of rows at a time. Two ways to the same numbers:

- `token_logprobs` is an ordinary differentiable function. The upstream gradient is known only in its backward pass, so
  that computes the logits of each block again: four products of size N x V x D.
- `head_backward` is told how a block's logprobs become a loss, and goes forward and backward while the block's logits
  exist: three products. It serves every loss that is a sum over tokens of something of that token alone, and adds up
  the weight's gradient in float32.

Law 4: logits are divided by the temperature in float32, before the normalisation. (A raw logprob divided by T is not
the logprob at temperature T.) With z = logits / T and p = softmax(z):

    logprob_n = z_ny - logsumexp(z_n)           d logprob_n / d z_nv = [v = y] - p_nv
    entropy_n = logsumexp(z_n) - sum_v p z      d entropy_n / d z_nv = -p_nv (log p_nv + entropy_n)

Left out: ignored targets (what is not trained is not passed in), label smoothing, logit soft-capping (`grpo.model`
refuses models that have it).

Shapes: N tokens, V vocabulary, D hidden size, C rows of a block.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# Logits of a block: 256 MB in float32. Larger blocks no longer make the products faster.
BLOCK_ELEMENTS = 2**26

# (logprobs of the block, entropy of the block, its place in N) -> the block's share of the loss
TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]


def token_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    *,
    bias_V: Tensor | None = None,
    entropy_grad: bool = False,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution (nats), at the sampling temperature.

    Returns logprobs_N, differentiable in hidden states, weight and bias, and entropy_N, which is detached unless
    `entropy_grad`. Both float32 (float64 for float64 input). `block` rows of logits are held at a time; it changes
    speed and memory, not the result.
    """
    _check(hidden_ND, weight_VD, targets_N, temperature)
    return _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, targets_N, temperature, entropy_grad, block)


def head_backward(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperature: float,
    token_loss: TokenLoss,
    weight_grad_VD: Tensor | None,
    *,
    bias_V: Tensor | None = None,
    bias_grad_V: Tensor | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of the head in one pass over the blocks.

    `token_loss(logprobs_C, entropy_C, where)` gives a block's share of the loss as a scalar; it may use either argument
    and is called once per block, in order. The gradient of the sum of these scalars is added to `weight_grad_VD` and
    `bias_grad_V` (None: not wanted), and that of the hidden states is returned.

    Returns logprobs_N and entropy_N (detached), and hidden_grad_ND in the hidden states' dtype.
    """
    _check(hidden_ND, weight_VD, targets_N, temperature)
    wide = _wide(hidden_ND)
    N = len(targets_N)
    logprobs_N = torch.empty(N, dtype=wide, device=hidden_ND.device)
    entropy_N = torch.empty_like(logprobs_N)
    hidden_grad_ND = torch.empty_like(hidden_ND)
    with torch.no_grad():
        for where in _blocks(N, len(weight_VD), block):
            scaled_CV = _scaled_logits(hidden_ND[where], weight_VD, bias_V, temperature)
            logprobs_C, entropy_C, lse_C = _statistics(scaled_CV, targets_N[where])
            logprobs_N[where], entropy_N[where] = logprobs_C, entropy_C
            with torch.enable_grad():
                leaves = logprobs_C.requires_grad_(), entropy_C.requires_grad_()
                loss = token_loss(*leaves, where)
                grad_C, entropy_grad_C = torch.autograd.grad(loss, leaves, allow_unused=True)
            if grad_C is None:
                grad_C = torch.zeros_like(lse_C)
            d_CV = _logits_grad(
                scaled_CV,
                targets_N[where],
                lse_C,
                grad_C,
                entropy_C.detach(),
                entropy_grad_C,
                temperature,
                hidden_ND.dtype,
            )
            del scaled_CV
            torch.mm(d_CV, weight_VD, out=hidden_grad_ND[where])
            _accumulate(weight_grad_VD, bias_grad_V, d_CV, hidden_ND[where])
    return logprobs_N, entropy_N, hidden_grad_ND


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
        block: int | None,
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden_ND)
        logprobs_N = torch.empty(len(targets_N), dtype=wide, device=hidden_ND.device)
        entropy_N, lse_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        blocks = list(_blocks(len(targets_N), len(weight_VD), block))
        scaled_CV = None
        for where in blocks:
            scaled_CV = _scaled_logits(hidden_ND[where], weight_VD, bias_V, temperature)
            logprobs_N[where], entropy_N[where], lse_N[where] = _statistics(scaled_CV, targets_N[where])
        # One block: its logits fit the memory that the backward pass would need for them anyway, so they are kept.
        kept = scaled_CV if len(blocks) == 1 and any(ctx.needs_input_grad[:3]) else None
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, kept)
        ctx.temperature, ctx.entropy_grad, ctx.blocks = temperature, entropy_grad, blocks
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, entropy_grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, kept = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = lse_N.dtype
        hidden_grad_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        for where in ctx.blocks:
            scaled_CV = kept
            if scaled_CV is None:
                scaled_CV = _scaled_logits(hidden_ND[where], weight_VD, bias_V, ctx.temperature)
            d_CV = _logits_grad(
                scaled_CV,
                targets_N[where],
                lse_N[where],
                grad_N[where],
                entropy_N[where],
                entropy_grad_N[where] if ctx.entropy_grad else None,
                ctx.temperature,
                hidden_ND.dtype,
            )
            del scaled_CV
            if hidden_grad_ND is not None:
                torch.mm(d_CV, weight_VD, out=hidden_grad_ND[where])
            _accumulate(weight_grad_VD, bias_grad_V, d_CV, hidden_ND[where])
        narrow = [g if g is None else g.to(hidden_ND.dtype) for g in (weight_grad_VD, bias_grad_V)]
        return hidden_grad_ND, *narrow, None, None, None, None


def _check(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"rollout.temperature={temperature} must be greater than 0 to train: greedy has no logprobs")
    assert hidden_ND.shape == (len(targets_N), weight_VD.shape[1])
    assert hidden_ND.dtype == weight_VD.dtype


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _blocks(N: int, V: int, block: int | None) -> Iterator[slice]:
    rows = block if block is not None else max(1, BLOCK_ELEMENTS // V)
    for start in range(0, N, rows):
        yield slice(start, min(start + rows, N))


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CD, weight_VD, bias_V).to(_wide(hidden_CD))
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _statistics(scaled_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logprob, entropy and logsumexp of each row."""
    lse_C = scaled_CV.logsumexp(1)
    p_CV = torch.exp(scaled_CV - lse_C[:, None])
    # A logit of -inf has p = 0, and 0 * -inf would make the entropy NaN: it contributes nothing.
    p_CV.mul_(scaled_CV.masked_fill(scaled_CV == -torch.inf, 0.0))
    logprobs_C = scaled_CV.gather(1, targets_C[:, None]).squeeze(1) - lse_C
    return logprobs_C, lse_C - p_CV.sum(1), lse_C


def _logits_grad(
    scaled_CV: Tensor,
    targets_C: Tensor,
    lse_C: Tensor,
    grad_C: Tensor,
    entropy_C: Tensor,
    entropy_grad_C: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient of the loss in the logits (before the temperature), rounded to the dtype of the products to come."""
    logp_CV = scaled_CV - lse_C[:, None]
    if entropy_grad_C is None:
        d_CV = logp_CV.exp_().mul_(-grad_C[:, None])
    else:
        p_CV = logp_CV.exp()
        logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0).add_(entropy_C[:, None]).mul_(entropy_grad_C[:, None])
        d_CV = logp_CV.add_(grad_C[:, None]).mul_(p_CV).neg_()
    d_CV.scatter_add_(1, targets_C[:, None], grad_C[:, None])
    if temperature != 1.0:
        d_CV.div_(temperature)
    return d_CV.to(dtype)


def _accumulate(weight_grad_VD: Tensor | None, bias_grad_V: Tensor | None, d_CV: Tensor, hidden_CD: Tensor) -> None:
    if weight_grad_VD is not None:
        if weight_grad_VD.dtype == d_CV.dtype:
            weight_grad_VD.addmm_(d_CV.t(), hidden_CD)
        else:
            weight_grad_VD.add_(d_CV.t() @ hidden_CD)
    if bias_grad_V is not None:
        bias_grad_V.add_(d_CV.sum(0, dtype=bias_grad_V.dtype))
