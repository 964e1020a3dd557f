"""bfloat16 moments: unbiased rounding, a second moment that keeps moving, and updates close to AdamW's."""

import copy
import math

import pytest
import torch
from torch import nn

from grpo.adamw_bf16 import BFloat16AdamW, stochastic_round


def test_rounding_keeps_the_mean() -> None:
    noise = torch.Generator().manual_seed(0)
    step = 2.0**-7  # between bfloat16's neighbours of 1
    for sign in (1.0, -1.0):
        draws = stochastic_round(torch.full((40_000,), sign * (1 + step / 4)), noise)
        assert draws.dtype == torch.bfloat16
        assert sorted(draws.abs().unique().tolist()) == [1.0, 1.0 + step]
        share = float((draws.abs() > 1).float().mean())
        assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / 40_000))
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, 1e30]).bfloat16()
    assert torch.equal(stochastic_round(exact.float(), noise), exact)


def adamw(parameter: nn.Parameter, lr: float = 0.01) -> BFloat16AdamW:
    return BFloat16AdamW([{"params": [parameter], "weight_decay": 0.1}], lr=lr, betas=(0.9, 0.999), eps=1e-8)


def test_the_second_moment_decays() -> None:
    """By 0.999 a step; rounded to the nearest bfloat16 it would stay where it is."""
    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = adamw(parameter)
    parameter.grad = torch.ones(1000)
    optimizer.step()
    parameter.grad = torch.zeros(1000)
    for _ in range(1000):
        optimizer.step()
    second = optimizer.state[parameter]["exp_avg_sq"]
    assert second.dtype == torch.bfloat16
    assert float(second.float().mean()) == pytest.approx(0.001 * 0.999**1000, rel=0.02)


def test_updates_follow_adamw() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-1, 1, 600).view(20, 30).clone()) for _ in range(2))
    start = ours.detach().clone()
    optimizers = [adamw(ours), torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1)]
    draw = torch.Generator().manual_seed(1)
    scale = torch.logspace(-4, 2, 600).view(20, 30)  # gradients of very different sizes, with a drift
    for _ in range(300):
        gradient = scale * (torch.randn(20, 30, generator=draw) + 0.3)
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    gap, way = ours - theirs, theirs - start
    assert gap.norm() < 0.02 * way.norm()
    assert abs(gap.mean()) < 0.002 * way.abs().mean()  # and without a bias


def test_slices_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (2**26, 7):
        monkeypatch.setattr("grpo.adamw_bf16._SLICE", size)
        parameter = nn.Parameter(torch.linspace(-1, 1, 30).view(5, 6).clone())
        parameter.grad = torch.full((5, 6), 0.3)
        adamw(parameter).step()
        results.append(parameter.detach())
    assert torch.equal(*results)  # the first step reads no rounded moment, so no random number either


def test_moments_stay_bfloat16_through_a_restore() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = adamw(parameter)
    parameter.grad = torch.tensor([0.1, 0.2, 0.3, 0.4])
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = adamw(parameter)
    other.load_state_dict(state)
    for name in ("exp_avg", "exp_avg_sq"):
        restored = other.state[parameter][name]
        assert restored.dtype == torch.bfloat16
        assert torch.equal(restored, optimizer.state[parameter][name])
    assert torch.equal(other.noise.get_state(), optimizer.noise.get_state())
