"""Token logprobs and entropy from hidden states, without ever holding the logits of the whole batch.

The head's logits are N x V numbers (20 GB in float32 for 32k tokens of a 152k vocabulary). Here they exist for a block
of rows at a time, in float32, and what stays of them is smaller. With z = logits / T, p = softmax(z), y the target:

    logprob_n = z_ny - logsumexp(z_n)           d logprob_n / d logits_nv = r_nv = ([v = y] - p_nv) / T
    entropy_n = -sum_v p_nv log p_nv            d entropy_n / d logits_nv = -p_nv (log p_nv + entropy_n) / T

The residual r needs no upstream gradient g, and g_n, one number for each row, commutes with the head's products: with
hidden states H and weight W the gradients are dH = diag(g) (r W) and dW = r^T (diag(g) H). So r is written in the
weight's dtype while the logits exist, and the loss comes later. Two ways to the same numbers:

- `token_logprobs` is an ordinary differentiable function. It keeps r for its backward pass where that takes little
  memory (three products of size N x V x D); otherwise the backward pass computes the logits again (four).
- `head_backward` is told how a block's logprobs become a loss, and goes forward and backward block by block: three
  products for any N. It adds up the weight's gradient in float32. A loss that ties the tokens of a sequence together
  gets blocks of whole sequences (`sequence_blocks`).

A gradient of the entropy has another factor per row; where a loss has one, the logits are computed again.

Law 4: logits are divided by the temperature in float32, before the normalisation. (A raw logprob divided by T is not
the logprob at temperature T.) On CUDA the row operations are those of `grpo.kernels`, and logits of bfloat16 weights
leave the product in float32. Left out: ignored targets (what is not trained is not passed in), label smoothing, logit
soft-capping (`grpo.model` refuses models that have it).

Shapes: N tokens, V vocabulary, D hidden size, C rows of a block.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Bytes of logits and of residuals held at a time. On a GPU larger blocks make better products, above all for the
# weight's gradient, whose V x D sums are read and written once per block of residuals; on a CPU only memory matters.
_LOGIT_BYTES = {"cuda": 390_000_000, "cpu": 32_000_000}
_RESIDUAL_BYTES = {"cuda": 550_000_000, "cpu": 32_000_000}
# Bytes of residuals that `token_logprobs` may keep for its backward pass: 8k tokens of a 152k vocabulary in bfloat16.
_KEPT_BYTES = {"cuda": 2_500_000_000, "cpu": 64_000_000}

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
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden_ND, weight_VD, bias_V))
    memory = len(targets_N) * len(weight_VD) * hidden_ND.dtype.itemsize
    keep = trained and rows is None and memory <= _KEPT_BYTES[hidden_ND.device.type]
    rows = rows or block_rows(weight_VD)
    return _TokenLogprobs.apply(hidden_ND, weight_VD, bias_V, targets_N, temperature, entropy_grad, rows, keep)


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
        hidden_CD, targets_C = hidden_ND[where], targets_N[where]
        with torch.no_grad():
            d_CV = torch.empty(len(targets_C), len(weight_VD), dtype=hidden_ND.dtype, device=hidden_ND.device)
            logprobs_C, entropy_C, lse_C = _forward(hidden_CD, weight_VD, bias_V, targets_C, temperature, d_CV)
        logprobs_N[where], entropy_N[where] = logprobs_C, entropy_C
        leaves = logprobs_C.requires_grad_(), entropy_C.requires_grad_()
        share = block_loss(*leaves, where)
        grad_C, entropy_grad_C = torch.autograd.grad(share, leaves, allow_unused=True)
        with torch.no_grad():
            grad_C = torch.zeros_like(lse_C) if grad_C is None else grad_C
            factor_C: Tensor | None = grad_C
            if entropy_grad_C is not None:
                rows = _Rows(targets_C, lse_C, grad_C, entropy_C.detach(), entropy_grad_C)
                _gradient_again(hidden_CD, weight_VD, bias_V, rows, temperature, d_CV)
                factor_C = None
            _head_products(d_CV, factor_C, hidden_CD, weight_VD, hidden_grad_ND[where], weight_grad_VD, bias_grad_V)
            del d_CV
    return logprobs_N, entropy_N, hidden_grad_ND


def block_rows(weight_VD: Tensor) -> int:
    """How many rows of residuals to hold at a time: as many as the memory set aside for them takes.

    On CUDA fewer, if then the product for the hidden states' gradient fills all multiprocessors a whole number of times
    (its tiles are 128 x 256, and 13 x 10 of them occupy 130 of an H200's 132 where 16 x 10 need a second round).
    """
    rows = _rows(_RESIDUAL_BYTES[weight_VD.device.type], len(weight_VD) * weight_VD.dtype.itemsize)
    if not weight_VD.is_cuda:
        return rows
    processors = torch.cuda.get_device_properties(weight_VD.device).multi_processor_count
    wave = max(1, processors // -(-weight_VD.shape[1] // 256)) * 128
    return rows // wave * wave or rows


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
        rows: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        N, V = len(targets_N), len(weight_VD)
        residual_NV = torch.empty(N, V, dtype=hidden_ND.dtype, device=hidden_ND.device) if keep else None
        values = _forward(hidden_ND, weight_VD, bias_V, targets_N, temperature, residual_NV, rows)
        logprobs_N, entropy_N, lse_N = values.unbind()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, residual_NV)
        ctx.temperature, ctx.entropy_grad, ctx.rows = temperature, entropy_grad, rows
        ctx.set_materialize_grads(False)  # an entropy that takes no part in the loss has None for a gradient
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor | None, entropy_grad_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N, entropy_N, lse_N, residual_NV = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_grad_ND = torch.empty_like(hidden_ND) if wants_hidden else None
        grad_N = torch.zeros_like(lse_N) if grad_N is None else grad_N
        kept = residual_NV is not None and entropy_grad_N is None
        wide = weight_VD.dtype if kept else lse_N.dtype  # one product has nothing to add up
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        bias_grad_V = torch.zeros_like(bias_V, dtype=wide) if wants_bias else None
        rows = _Rows(targets_N, lse_N, grad_N, entropy_N, entropy_grad_N)
        d_CV, factor_N = (residual_NV, grad_N) if kept else (None, None)
        for where in [slice(0, len(targets_N))] if kept else even_blocks(len(targets_N), ctx.rows):
            hidden_CD = hidden_ND[where]
            if not kept:
                d_CV = None  # frees the last block's
                d_CV = torch.empty(len(hidden_CD), len(weight_VD), dtype=hidden_ND.dtype, device=hidden_ND.device)
                _gradient_again(hidden_CD, weight_VD, bias_V, rows.part(where), ctx.temperature, d_CV)
            assert d_CV is not None
            into_CD = None if hidden_grad_ND is None else hidden_grad_ND[where]
            _head_products(d_CV, factor_N, hidden_CD, weight_VD, into_CD, weight_grad_VD, bias_grad_V)
        narrow = [g if g is None else g.to(hidden_ND.dtype) for g in (weight_grad_VD, bias_grad_V)]
        return hidden_grad_ND, *narrow, None, None, None, None, None


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


def _forward(
    hidden_CD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    temperature: float,
    residual_CV: Tensor | None,
    rows: int | None = None,
) -> Tensor:
    """logprob, entropy and logsumexp [3, C]; fills the residuals. Logits exist for `rows` rows at a time."""
    values = torch.empty(3, len(targets_C), dtype=_wide(hidden_CD), device=hidden_CD.device)
    for part in _parts(len(targets_C), min(rows or _logit_rows(weight_VD), _logit_rows(weight_VD))):
        logits_CV = _logits(hidden_CD[part], weight_VD, bias_V)
        residual = None if residual_CV is None else residual_CV[part]
        values[:, part] = torch.stack(_softmax(logits_CV, targets_C[part], temperature, residual))
        del logits_CV  # before the next are made
    return values


@dataclass(slots=True)
class _Rows:
    """What the gradient in the logits of C rows depends on, besides the logits."""

    targets_C: Tensor
    lse_C: Tensor
    grad_C: Tensor
    entropy_C: Tensor
    entropy_grad_C: Tensor | None

    def part(self, where: slice) -> "_Rows":
        entropy_grad_C = None if self.entropy_grad_C is None else self.entropy_grad_C[where]
        return _Rows(
            self.targets_C[where], self.lse_C[where], self.grad_C[where], self.entropy_C[where], entropy_grad_C
        )


def _gradient_again(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, rows: _Rows, temperature: float, out_CV: Tensor
) -> None:
    """Fill `out_CV` with the gradient of the loss in the logits, which are computed again."""
    for part in _parts(len(hidden_CD), _logit_rows(weight_VD)):
        logits_CV = _logits(hidden_CD[part], weight_VD, bias_V)
        _logits_grad(logits_CV, rows.part(part), temperature, out_CV[part])
        del logits_CV  # before the next are made


def _logit_rows(weight_VD: Tensor) -> int:
    return _rows(_LOGIT_BYTES[weight_VD.device.type], len(weight_VD) * _wide(weight_VD).itemsize)


def _parts(C: int, rows: int) -> list[slice]:
    """The fewest parts of at most `rows`, in tiles of 128 where `rows` is: products work in such tiles."""
    tile = 128 if rows % 128 == 0 else 1
    tiles, count = -(-C // tile), -(-C // rows)
    borders = [min(C, tile * (tiles * i // max(1, count))) for i in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def _rows(memory: int, row: int) -> int:
    rows = memory // row
    return max(1, rows // 64 * 64 if rows > 64 else rows)


def _softmax(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, residual_CV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """logprob of the target, entropy and logsumexp of each row of logits / temperature; fills the residuals."""
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        from grpo import kernels  # Triton exists where CUDA does

        return kernels.softmax(logits_CV, targets_C, temperature, residual_CV)
    logp_CV = logits_CV / temperature
    lse_C = logp_CV.logsumexp(1)
    logp_CV.sub_(lse_C[:, None])
    logprobs_C = logp_CV.gather(1, targets_C[:, None]).squeeze(1)
    p_CV = logp_CV.exp()
    if residual_CV is not None:
        d_CV = p_CV.neg()
        d_CV.scatter_add_(1, targets_C[:, None], torch.ones_like(lse_C)[:, None])
        residual_CV.copy_(d_CV.div_(temperature))
        del d_CV
    # A logit of -inf has p = 0, and 0 * -inf would make the entropy NaN: it contributes nothing.
    entropy_C = p_CV.mul_(logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0)).sum(1).neg_()
    return logprobs_C, entropy_C, lse_C


def _logits_grad(logits_CV: Tensor, rows: _Rows, temperature: float, out_CV: Tensor) -> None:
    """Fill `out_CV` with the gradient of the loss in the logits. The logits may be overwritten."""
    grad_C, entropy_grad_C = rows.grad_C, rows.entropy_grad_C
    if logits_CV.is_cuda and logits_CV.dtype != torch.float64:
        from grpo import kernels

        kernels.logits_grad(
            logits_CV, rows.targets_C, rows.lse_C, grad_C, rows.entropy_C, entropy_grad_C, temperature, out_CV
        )
        return
    logp_CV = logits_CV.div_(temperature).sub_(rows.lse_C[:, None])
    if entropy_grad_C is None:
        d_CV = logp_CV.exp_().mul_(-grad_C[:, None])
    else:
        p_CV = logp_CV.exp()
        logp_CV.masked_fill_(logp_CV == -torch.inf, 0.0).add_(rows.entropy_C[:, None]).mul_(entropy_grad_C[:, None])
        d_CV = logp_CV.add_(grad_C[:, None]).mul_(p_CV).neg_()
    d_CV.scatter_add_(1, rows.targets_C[:, None], grad_C[:, None].to(d_CV.dtype))
    out_CV.copy_(d_CV.div_(temperature))


def _head_products(
    d_CV: Tensor,
    factor_C: Tensor | None,
    hidden_CD: Tensor,
    weight_VD: Tensor,
    hidden_grad_CD: Tensor | None,
    weight_grad_VD: Tensor | None,
    bias_grad_V: Tensor | None,
) -> None:
    """Gradients in hidden states (written), weight and bias (added to) from diag(factor) d; None is a factor of 1."""
    if hidden_grad_CD is not None:
        torch.mm(d_CV, weight_VD, out=hidden_grad_CD)
        if factor_C is not None:
            hidden_grad_CD.mul_(factor_C[:, None])
    if weight_grad_VD is not None:
        scaled_CD = hidden_CD if factor_C is None else (hidden_CD * factor_C[:, None]).to(hidden_CD.dtype)
        if weight_grad_VD.dtype == d_CV.dtype:
            weight_grad_VD.addmm_(d_CV.t(), scaled_CD)
        elif d_CV.is_cuda:
            torch.addmm(weight_grad_VD, d_CV.t(), scaled_CD, out_dtype=torch.float32, out=weight_grad_VD)
        else:
            weight_grad_VD.add_(d_CV.t() @ scaled_CD)
    if bias_grad_V is not None:
        factor_C = torch.ones_like(d_CV[:, 0]) if factor_C is None else factor_C.to(d_CV.dtype)
        bias_grad_V.add_(factor_C @ d_CV)
