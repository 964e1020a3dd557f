"""Token logprobs and entropy against float64 references, finite differences, and full logits."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from grpo.logprobs import _parts, block_rows, even_blocks, head_backward, sequence_blocks, token_logprobs

N, V, D = 11, 37, 8


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (0.7 * torch.randn(n, D, generator=draw, dtype=torch.float64) for n in (N, V))
    bias = torch.randn(V, generator=draw, dtype=torch.float64)
    targets = torch.randint(V, (N,), generator=draw)
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        bias.to(dtype).requires_grad_(),
        targets,
    )


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().T / temperature
    logits = logits if bias is None else logits + bias.double() / temperature
    logp = logits.log_softmax(1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(1)


def test_by_hand() -> None:
    # logits 0 and ln 3: probabilities 1/4 and 3/4, at T = 2 they are 1/(1+sqrt 3) and the rest
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), 1.0)
    assert logprobs.item() == pytest.approx(math.log(0.75), abs=1e-6)
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), abs=1e-6)
    logprobs, _ = token_logprobs(hidden, weight, torch.tensor([0]), 2.0)
    assert logprobs.item() == pytest.approx(-math.log(1 + math.sqrt(3)), abs=1e-6)
    assert logprobs.dtype == entropy.dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("rows", [None, 1, 4, 100])  # None keeps the residuals for the backward pass
def test_values_and_gradients_equal_autograd_through_full_logits(
    temperature: float, with_bias: bool, with_entropy: bool, rows: int | None
) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    bias_or_none = bias if with_bias else None
    upstream, upstream_entropy = torch.randn(2, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours = token_logprobs(hidden, weight, targets, temperature, bias_V=bias_or_none, entropy_grad=True, rows=rows)
    theirs = reference(hidden, weight, bias_or_none, targets, temperature)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    if not with_entropy:
        ours, theirs = ours[:1], theirs[:1]
    upstreams = (upstream, upstream_entropy)[: len(ours)]
    mine = torch.autograd.grad(ours, leaves, upstreams)
    expected = torch.autograd.grad(theirs, leaves, upstreams)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("blocks", [[slice(0, N)], [slice(0, 2), slice(2, 9), slice(9, N)]])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_one_pass_equals_two(blocks: list[slice], temperature: float) -> None:
    hidden, weight, bias, targets = inputs()
    factor = torch.linspace(-1, 2, N, dtype=torch.float64)

    def loss(
        logprobs: Tensor, entropy: Tensor, where: slice
    ) -> Tensor:  # not linear, so the gradient depends on values
        return (factor[where] * (logprobs.exp() + 0.3 * entropy**2)).sum()

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, bias_V=bias, entropy_grad=True)
    expected = torch.autograd.grad(loss(logprobs, entropy, slice(0, N)), [hidden, weight, bias])
    weight_grad, bias_grad = torch.ones(V, D, dtype=torch.float64), torch.zeros(V, dtype=torch.float64)
    seen = []

    def noted(*arguments: Tensor | slice) -> Tensor:
        seen.append(arguments[2])
        return loss(*arguments)  # type: ignore[arg-type]

    ours = head_backward(
        hidden.detach(), weight, targets, temperature, noted, blocks, weight_grad, bias_V=bias, bias_grad_V=bias_grad
    )
    assert seen == blocks
    torch.testing.assert_close(ours[0], logprobs.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(ours[1], entropy.detach(), rtol=0, atol=1e-12)
    for mine, theirs in zip(
        (ours[2], weight_grad - 1, bias_grad), expected, strict=True
    ):  # - 1: it adds to what is there
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rows", [None, 4])
def test_finite_differences(rows: int | None) -> None:
    hidden, weight, bias, targets = inputs()

    def function(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(h, w, targets, 0.8, bias_V=b, entropy_grad=True, rows=rows)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_float32_is_close_to_float64() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    exact = reference(hidden, weight, bias, targets, 0.7)
    ours = token_logprobs(hidden, weight, targets, 0.7, bias_V=bias)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-6)


def test_temperature_is_not_applied_to_the_raw_logprob() -> None:
    hidden, weight, _, targets = inputs()
    raw, _ = token_logprobs(hidden, weight, targets, 1.0)
    tempered, _ = token_logprobs(hidden, weight, targets, 0.6)
    exact, _ = reference(hidden, weight, None, targets, 0.6)
    torch.testing.assert_close(tempered, exact, rtol=0, atol=1e-12)
    assert (raw / 0.6 - exact).abs().mean() > 0.3
    with pytest.raises(ValueError, match=r"rollout.temperature=0.0 must be greater than 0"):
        token_logprobs(hidden, weight, targets, 0.0)


def test_forbidden_tokens_give_no_nan() -> None:
    hidden, weight, bias, targets = inputs()
    with torch.no_grad():
        targets[:] = 3
        bias[10:20] = -torch.inf
    logprobs, entropy = token_logprobs(hidden, weight, targets, 0.7, bias_V=bias, entropy_grad=True)
    kept = torch.cat([torch.arange(10), torch.arange(20, V)])
    exact = reference(hidden, weight[kept], bias[kept], targets, 0.7)
    torch.testing.assert_close((logprobs, entropy), exact, rtol=0, atol=1e-12)
    (logprobs + entropy).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad is not None
    assert (weight.grad[10:20] == 0).all()


def test_a_nan_stays_visible() -> None:
    hidden, weight, _, targets = inputs()
    with torch.no_grad():
        hidden[4, 0] = torch.nan
    logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0)
    assert torch.isnan(logprobs).nonzero().tolist() == torch.isnan(entropy).nonzero().tolist() == [[4]]


def test_entropy_has_no_gradient_unless_asked() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


def test_bfloat16_weights_give_float32_logprobs() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, weight, targets, 0.9, entropy_grad=True)
    exact = reference(hidden, weight, None, targets, 0.9)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), exact[0], rtol=0, atol=0.1)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [None, 4])
def test_a_second_backward_gives_the_same(rows: int | None) -> None:
    hidden, weight, _, targets = inputs()
    total = token_logprobs(hidden, weight, targets, 0.7, rows=rows)[0].sum()
    first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(total, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_tokens() -> None:
    hidden, weight, _, targets = inputs()
    logprobs, _ = token_logprobs(hidden[:0], weight, targets[:0], 1.0)
    assert logprobs.shape == (0,)
    (weight_grad,) = torch.autograd.grad(logprobs.sum(), [weight])
    assert (weight_grad == 0).all()


def test_blocks() -> None:
    assert even_blocks(10, 4) == [slice(0, 3), slice(3, 6), slice(6, 10)]
    assert even_blocks(0, 4) == []
    assert sequence_blocks([3, 2, 4, 1], 5) == [slice(0, 5), slice(5, 10)]
    assert sequence_blocks([3, 6], 5) is None
    assert sequence_blocks([], 5) == []
    assert _parts(1664, 640) == [slice(0, 512), slice(512, 1024), slice(1024, 1664)]  # 13 tiles of 128
    assert _parts(700, 640) == [slice(0, 384), slice(384, 700)]
    assert _parts(5, 2) == [slice(0, 1), slice(1, 3), slice(3, 5)]
    assert _parts(0, 640) == []
    assert block_rows(torch.empty(151_936, 1)) == 52  # 32 MB of float32
    assert block_rows(torch.empty(151_936, 1, dtype=torch.bfloat16)) == 64  # 20 MB; 105 fit, taken down to a multiple


# The interpreter runs one program after the other, so a row must be one program's: a team would wait for ever.
KERNELS = """
import torch
from grpo import kernels, logprobs

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16):
    for temperature in (0.7, 1.0):
        logits = (torch.randn(5, 9001) * 4).to(dtype)
        logits[1, :4500] = -torch.inf
        targets, grad, entropy_grad = torch.randint(4500, 9001, (5,)), torch.randn(5), torch.randn(5)
        residual = torch.empty(5, 9001, dtype=torch.float64)
        exact = logprobs._softmax(logits.double(), targets, temperature, residual)
        for out in (None, torch.empty(5, 9001), torch.empty(5, 9001, dtype=torch.bfloat16)):
            ours = kernels.softmax(logits, targets, temperature, out, span=1 << 14)
            for a, b in zip(ours, exact):
                assert (a - b).abs().max() < 4e-6, (dtype, temperature)
            if out is not None:
                bound = 2e-6 if out.dtype == torch.float32 else 2.0**-7 * residual.abs().max()
                assert (out - residual).abs().max() < bound, (dtype, out.dtype, temperature)
        for g in (None, entropy_grad):
            expected = torch.empty(5, 9001, dtype=torch.float64)
            rows = logprobs._Rows(targets, exact[2], grad.double(), exact[1], g)
            logprobs._logits_grad(logits.double(), rows, temperature, expected)
            for out in (torch.empty(5, 9001), torch.empty(5, 9001, dtype=torch.bfloat16)):
                kernels.logits_grad(logits, targets, ours[2], grad, ours[1], g, temperature, out)
                bound = 2e-5 if out.dtype == torch.float32 else 2.0**-7 * expected.abs().max()
                assert (out - expected).abs().max() < bound, (dtype, out.dtype, temperature)
        logits[2, 3] = torch.nan
        assert torch.isnan(torch.stack(kernels.softmax(logits, targets, temperature, span=1 << 14)))[:, 2].all()
print("kernels agree")
"""


def test_kernels_equal_torch_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read at import, hence a process of its own
    done = subprocess.run(
        [sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert "kernels agree" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_cuda_equals_float64(dtype: torch.dtype, temperature: float) -> None:
    """Both ways, in several blocks, with an entropy term, against float64 on the CPU from the same rounded inputs."""
    n, vocabulary, width = 300, 5003, 64
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=draw).to(dtype).cuda().requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=draw) * 0.4).to(dtype).cuda().requires_grad_()
    targets = torch.randint(vocabulary, (n,), generator=draw).cuda()
    factor = torch.randn(n, generator=draw).cuda()

    def loss(logprobs: Tensor, entropy: Tensor, where: slice) -> Tensor:
        scale = factor[where].to(logprobs.device, logprobs.dtype)
        return (scale * (logprobs.clamp(min=-30) + 0.5 * entropy)).sum()

    leaves = [x.detach().double().cpu().requires_grad_() for x in (hidden, weight)]
    exact = reference(*leaves, None, targets.cpu(), temperature)
    expected = torch.autograd.grad(loss(*exact, slice(None)), leaves)
    values = token_logprobs(hidden, weight, targets, temperature, entropy_grad=True, rows=128)
    gradients = torch.autograd.grad(loss(*values, slice(None)), [hidden, weight])
    weight_grad = torch.zeros(vocabulary, width, device="cuda")
    blocks = even_blocks(n, 128)
    *again, hidden_grad = head_backward(
        hidden.detach(), weight.detach(), targets, temperature, loss, blocks, weight_grad
    )
    bound = 1e-5 if dtype == torch.float32 else 6e-3  # bfloat16 rounds the gradient in the logits
    for mine in (values, again):
        for a, b in zip(mine, exact, strict=True):
            assert (a.double().cpu() - b).abs().max() < 1e-4  # logits leave the product in float32
    for mine in (gradients, (hidden_grad, weight_grad)):
        for a, b in zip(mine, expected, strict=True):
            assert (a.double().cpu() - b).norm() < bound * b.norm()
