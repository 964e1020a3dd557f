"""Every shipped loss against a float64 reference, written here sequence by sequence from its paper's equation.

The references share no code with `grpo.losses` and are not flat: each sums over sequences y_i and their tokens, with
the paper's own denominator. Inputs are float32 numbers; the references compute in float64 and are differentiated by
autograd, which `test_reference_gradients_by_finite_differences` checks against central differences.

`python tests/test_losses_reference.py` prints the table loss x (value error, gradient error).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loss_cases import MAX_TOKENS, NAMES, Sequence, call, inputs, ragged, shipped
from torch import Tensor

TOLERANCE = 1e-6


def bound(x: Tensor) -> Tensor:
    """The one thing that is not in the papers: log-ratios are held to +-20."""
    return x.clamp(-20.0, 20.0)


def token_mean(terms: list[Tensor]) -> Tensor:
    """1 / sum_i |y_i| * sum_i sum_t"""
    return torch.stack([t.sum() for t in terms]).sum() / sum(len(t) for t in terms)


def sequence_mean(terms: list[Tensor]) -> Tensor:
    """1 / G * sum_i 1 / |y_i| * sum_t"""
    return torch.stack([t.sum() / len(t) for t in terms]).sum() / len(terms)


def constant(terms: list[Tensor]) -> Tensor:
    """1 / (G * L) * sum_i sum_t"""
    return torch.stack([t.sum() for t in terms]).sum() / (len(terms) * MAX_TOKENS)


def clipped_surrogate(r: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A)"""
    return torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage)


def reinforce(batch: list[Sequence]) -> Tensor:
    return -token_mean([s.advantage * s.new for s in batch])


def grpo(batch: list[Sequence]) -> Tensor:
    return -token_mean([bound(s.new - s.sampler).exp() * s.advantage for s in batch])


def ppo_clip(batch: list[Sequence]) -> Tensor:
    return -token_mean([clipped_surrogate(bound(s.new - s.sampler).exp(), s.advantage, 0.2, 0.28) for s in batch])


def dr_grpo(batch: list[Sequence]) -> Tensor:
    return -constant([clipped_surrogate(bound(s.new - s.sampler).exp(), s.advantage, 0.2, 0.2) for s in batch])


def gspo(batch: list[Sequence]) -> Tensor:
    objective = 0.0
    for s in batch:
        s_i = torch.exp(bound(s.new - s.sampler).sum() / len(s.new))
        objective = objective + clipped_surrogate(s_i, s.advantage, 3e-4, 4e-4)
    return -objective / len(batch)


def cispo(batch: list[Sequence]) -> Tensor:
    terms = []
    for s in batch:
        weight = bound(s.new - s.sampler).exp().clamp(0.0, 5.0).detach()
        terms.append(weight * s.advantage * s.new)
    return -token_mean(terms)


def decoupled(batch: list[Sequence], behaviour_weight: Callable[[Tensor], Tensor]) -> Tensor:
    terms = []
    for s in batch:
        w = behaviour_weight(bound(s.proximal - s.sampler).exp())
        terms.append(w * clipped_surrogate(bound(s.new - s.proximal).exp(), s.advantage, 0.2, 0.28))
    return -token_mean(terms)


def tis(batch: list[Sequence]) -> Tensor:
    return decoupled(batch, lambda w: torch.minimum(w, torch.tensor(2.0, dtype=w.dtype)))


def decoupled_ppo(batch: list[Sequence]) -> Tensor:
    return decoupled(batch, lambda w: torch.minimum(w, torch.tensor(5.0, dtype=w.dtype)))


def icepop(batch: list[Sequence]) -> Tensor:
    """M(k) = k if k in [alpha, beta], else 0"""
    return decoupled(batch, lambda w: torch.stack([k if 0.5 <= k <= 5.0 else torch.zeros_like(k) for k in w]))


def sapo(batch: list[Sequence]) -> Tensor:
    """f(x) = sigmoid(tau (x - 1)) * 4 / tau"""
    terms = []
    for s in batch:
        tau = 1.0 if s.advantage > 0 else 1.05
        r = bound(s.new - s.sampler).exp()
        terms.append(4 / tau / (1 + torch.exp(-tau * (r - 1))) * s.advantage)
    return -sequence_mean(terms)


REFERENCES: dict[str, Callable[[list[Sequence]], Tensor]] = {
    "reinforce": reinforce,
    "grpo": grpo,
    "ppo_clip": ppo_clip,
    "dapo": ppo_clip,  # its penalty on long completions is part of the reward
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
    "tis": tis,
    "icepop": icepop,
    "decoupled_ppo": decoupled_ppo,
    "sapo": sapo,
}


def differentiate(reference: Callable[[list[Sequence]], Tensor], batch: list[Sequence]) -> tuple[float, Tensor]:
    for s in batch:
        s.new = s.new.detach().requires_grad_()
    value = reference(batch)
    value.backward()
    return value.item(), torch.cat([torch.zeros_like(s.new) if s.new.grad is None else s.new.grad for s in batch])


def errors(
    name: str, changes: dict[str, Any], reference: Callable[[list[Sequence]], Tensor], batch: list[Sequence]
) -> tuple[float, float]:
    """Relative error of the value, and of the worst token's gradient. A gradient that is cut must be exactly 0."""
    value, gradient = differentiate(reference, batch)
    out, ours = call(shipped(name, **changes), batch)
    typical = gradient[gradient != 0].abs().median()
    # A saturated sigmoid (SAPO) is not cut: it has a gradient of 1e-17, and float64 rounding decides whether that is 0.
    assert torch.equal(gradient.abs() < 1e-12 * typical, ours.abs() < 1e-12 * typical), f"{name}: other tokens are cut"
    error = (ours.double() - gradient).abs() / (gradient.abs() + 1e-3 * typical)
    return abs(out.loss.item() - value) / abs(value), error.max().item()


def table() -> list[tuple[str, float, float, float, float]]:
    """Loss, then value and gradient error on moderate batches, then on extreme ones: the worst of five seeds each."""
    rows = []
    for name in NAMES:
        figures: list[float] = []
        for extreme in (False, True):
            found = [errors(name, {}, REFERENCES[name], ragged(seed, extreme)) for seed in range(5)]
            figures += [max(value for value, _ in found), max(gradient for _, gradient in found)]
        rows.append((name, *figures))
    return rows


def test_there_is_a_reference_for_every_shipped_loss() -> None:
    assert sorted(REFERENCES) == NAMES
    assert set(NAMES) >= {"reinforce", "grpo", "ppo_clip", "dapo", "dr_grpo", "gspo", "cispo", "tis", "icepop"}
    assert set(NAMES) >= {"decoupled_ppo", "sapo"}


@pytest.mark.parametrize("extreme", [False, True], ids=["moderate", "extreme"])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_the_papers(name: str, extreme: bool) -> None:
    for seed in range(3):
        value_error, gradient_error = errors(name, {}, REFERENCES[name], ragged(seed, extreme))
        assert value_error < TOLERANCE
        assert gradient_error < TOLERANCE


def test_the_batches_reach_every_branch() -> None:
    """Otherwise the comparison above would pass with a branch that is wrong."""
    for name in ("ppo_clip", "gspo", "cispo", "tis", "icepop", "decoupled_ppo"):
        batches = [ragged(seed, extreme) for seed in range(3) for extreme in (False, True)]
        clipped = torch.cat([call(shipped(name), batch)[0].clipped_N for batch in batches])
        assert 0.01 < clipped.double().mean() < 0.98, name
    out, _ = call(shipped("tis"), ragged(0, extreme=True))
    assert 0 < int(out.clamped_N.sum()) < len(out.clamped_N)


@pytest.mark.parametrize("name", NAMES)
def test_reference_gradients_by_finite_differences(name: str) -> None:
    """Central differences of the reference; what the paper puts under a stop gradient is held at the base point."""
    if name == "cispo":

        def frozen(batch: list[Sequence]) -> Tensor:
            weights = [bound(s.new - s.sampler).exp().clamp(0.0, 5.0) for s in ragged(1)]
            return -token_mean([w * s.advantage * s.new for w, s in zip(weights, batch, strict=True)])

        function: Callable[[list[Sequence]], Tensor] = frozen
    else:
        function = REFERENCES[name]
    check_finite_differences(function, *call(shipped(name), ragged(1), dtype=torch.float64)[1:])


def check_finite_differences(
    function: Callable[[list[Sequence]], Tensor], gradient: Tensor, step: float = 1e-6
) -> None:
    n = 0
    for i, length in enumerate(len(s.new) for s in ragged(1)):
        for t in range(length):
            values = []
            for sign in (1, -1):
                moved = ragged(1)
                moved[i].new[t] += sign * step
                values.append(function(moved).item())
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[n].item(), rel=1e-6, abs=1e-9)
            n += 1
    assert n == len(gradient)


PRODUCT = {"correction": "truncate", "cap": 2.0, "level": "sequence"}
GEOMETRIC = {"correction": "truncate", "cap": 1.05, "level": "geometric"}


def sequence_tis(batch: list[Sequence], cap: float, geometric: bool) -> Tensor:
    terms = []
    for s in batch:
        log_w = bound(s.proximal - s.sampler).sum()
        w = torch.exp(log_w / len(s.new) if geometric else bound(log_w)).clamp(max=cap)
        terms.append(w * clipped_surrogate(bound(s.new - s.proximal).exp(), s.advantage, 0.2, 0.28))
    return -token_mean(terms)


def rejected_icepop(batch: list[Sequence]) -> Tensor:
    terms = []
    for s in batch:
        w = bound(s.proximal - s.sampler).exp()
        keep = 0.95 <= torch.exp(bound(s.proximal - s.sampler).mean()) <= 1.1
        w = torch.where((w >= 0.5) & (w <= 5.0), w, 0.0) * float(keep)
        terms.append(w * clipped_surrogate(bound(s.new - s.proximal).exp(), s.advantage, 0.2, 0.28))
    return -token_mean(terms)


def dual_clip(batch: list[Sequence]) -> Tensor:
    """max(min(r A, clip(r) A), c A) for A < 0"""
    terms = []
    for s in batch:
        r = bound(s.new - s.sampler).exp()
        term = clipped_surrogate(r, s.advantage, 0.2, 0.28)
        if s.advantage < 0:
            term = torch.maximum(term, torch.full_like(term, 1.5 * s.advantage))
        terms.append(term)
    return -token_mean(terms)


def with_kl(penalty: Callable[[Tensor], Tensor]) -> Callable[[list[Sequence]], Tensor]:
    """GRPO's paper: the penalty is inside the mean over tokens. `penalty` is a function of d = reference - new."""

    def loss(batch: list[Sequence]) -> Tensor:
        return grpo(batch) + 0.3 * token_mean([penalty(bound(s.reference - s.new)) for s in batch])

    return loss


def k1_with_the_gradient_of_k2(d: Tensor) -> Tensor:
    return d**2 / 2 - (d**2 / 2).detach() - d.detach()


VARIANTS: dict[str, tuple[str, dict[str, Any], Callable[[list[Sequence]], Tensor]]] = {
    "tis_sequence": ("tis", PRODUCT, lambda batch: sequence_tis(batch, 2.0, geometric=False)),
    "tis_geometric": ("tis", GEOMETRIC, lambda batch: sequence_tis(batch, 1.05, geometric=True)),
    "icepop_reject": ("icepop", {"reject_low": 0.95, "reject_high": 1.1}, rejected_icepop),
    "dual_clip": ("ppo_clip", {"dual_clip": 1.5}, dual_clip),
    "kl_k1": ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k1"}, with_kl(k1_with_the_gradient_of_k2)),
    "kl_k2": ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k2"}, with_kl(lambda d: d**2 / 2)),
    "kl_k3": ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k3"}, with_kl(lambda d: d.exp() - 1 - d)),
}


@pytest.mark.parametrize("extreme", [False, True], ids=["moderate", "extreme"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_are_their_equations(variant: str, extreme: bool) -> None:
    name, changes, reference = VARIANTS[variant]
    for seed in range(3):
        value_error, gradient_error = errors(name, changes, reference, ragged(seed, extreme))
        assert value_error < TOLERANCE
        assert gradient_error < TOLERANCE


@pytest.mark.parametrize("variant", ["kl_k2", "kl_k3", "dual_clip", "tis_sequence", "icepop_reject"])
def test_option_gradients_by_finite_differences(variant: str) -> None:
    name, changes, reference = VARIANTS[variant]
    check_finite_differences(reference, call(shipped(name, **changes), ragged(1), dtype=torch.float64)[1])


def test_the_entropy_bonus_is_the_mean_entropy() -> None:
    batch = ragged(0)
    loss = shipped("reinforce", entropy_coefficient=0.25)
    micro = inputs(loss, batch)
    out = loss(micro)
    out.loss.backward()
    expected = reinforce(batch) - 0.25 * token_mean([s.entropy for s in batch])
    assert out.loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert micro.entropy_N is not None
    assert micro.entropy_N.grad is not None
    assert micro.entropy_N.grad.tolist() == pytest.approx([-0.25 / 43] * 43, rel=TOLERANCE)


if __name__ == "__main__":
    print("| loss | value error | gradient error | value, extreme | gradient, extreme |\n|---|---|---|---|---|")
    for row in table():
        print("| " + " | ".join([row[0], *(f"{figure:.1e}" for figure in row[1:])]) + " |")
