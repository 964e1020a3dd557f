"""Laws and identities of the losses: one denominator under any split, what is clipped and what is not.

Values and gradients against the papers' equations are in test_losses_reference.py, broken numbers and wrong
configurations in test_losses_robustness.py.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import NAMES, Sequence, call, inputs, ragged, shipped
from torch import Tensor, nn

from grpo.losses import Loss, LossInputs

AGGREGATIONS = ("token_mean", "sequence_mean", "fixed")
RATIO_LOSSES = [name for name in NAMES if name != "reinforce"]
EVERYTHING = {"kl_coefficient": 0.1, "entropy_coefficient": 0.05}


def one(
    loss: Loss, new: list[float], old: list[float], advantages: list[float]
) -> tuple[float, list[float], list[bool]]:
    """Value, gradient and clipped tokens of sequences of one token each, every weight 1."""
    n = len(new)
    logprobs_N = torch.tensor(new, requires_grad=True)
    proximal_N = torch.tensor(old) if loss.needs_proximal else None
    out = loss(
        LossInputs(
            logprobs_N, torch.tensor(old), torch.tensor(advantages), torch.ones(n), torch.arange(n), n, proximal_N
        )
    )
    out.loss.backward()
    assert logprobs_N.grad is not None
    return out.loss.item(), logprobs_N.grad.tolist(), out.clipped_N.tolist()


# Aggregation


def test_weights_of_each_aggregation_by_hand() -> None:
    lengths = [2, 0, 4]
    assert shipped("grpo", aggregation="token_mean").sequence_weights(lengths, 3) == [1 / 6, 0.0, 1 / 6]
    assert shipped("grpo", aggregation="sequence_mean").sequence_weights(lengths, 3) == [1 / 4, 0.0, 1 / 8]
    fixed = shipped("grpo", aggregation="fixed", max_tokens=10)
    assert fixed.sequence_weights(lengths, 3) == [1 / 30, 0.0, 1 / 30]
    assert fixed.sequence_weights([2, 4], 3) == [1 / 30, 1 / 30]  # rows that are not listed still count


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_masked_sequence_is_as_if_it_had_not_been_sampled(aggregation: str) -> None:
    loss = shipped("grpo", aggregation=aggregation)
    weights = loss.sequence_weights([3, 0, 5, 0], 4)
    assert [weights[0], weights[2]] == loss.sequence_weights([3, 5], 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_that_is_masked_entirely_has_a_loss_of_zero(aggregation: str) -> None:
    loss = shipped("ppo_clip", aggregation=aggregation, **EVERYTHING)
    assert loss.sequence_weights([0, 0], 2) == [0.0, 0.0]
    empty = torch.zeros(0, requires_grad=True)
    rest = [torch.zeros(0) for _ in range(3)]
    out = loss(LossInputs(empty, *rest, torch.zeros(0).long(), 0, None, torch.zeros(0), torch.zeros(0)))
    out.loss.backward()
    assert out.loss.item() == 0.0


def test_the_token_mean_is_not_a_mean_of_micro_batch_means() -> None:
    """Micro-batches of 1 and 4 tokens with losses 2 and 0.5: the token mean is 0.8, the mean of means 1.25."""
    loss = shipped("reinforce", aggregation="token_mean")
    zeros = torch.zeros(4)
    sequences = [
        Sequence(torch.tensor([-2.0]), torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1), advantage=1.0),
        Sequence(torch.full((4,), -0.5), zeros, zeros, zeros, zeros, advantage=1.0),
    ]
    parts = [loss(inputs(loss, sequences, [i])).loss.item() for i in range(2)]
    assert sum(parts) == pytest.approx((2 + 4 * 0.5) / 5)


# Law 5: the split into micro-batches changes nothing (CASES 8)

SPLITS = {
    "1": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "2": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "4": [[0, 1], [2, 3], [4, 5], [6, 7]],
    "8": [[0], [1], [2], [3], [4], [5], [6], [7]],
    "ragged": [[0, 4, 2], [7, 1, 6], [5, 3]],
}


class TinyPolicy(nn.Module):
    """Logprobs and entropies of each token from the mean embedding of the tokens before it, float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(ids).cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]
        logprobs = self.head(torch.tanh(hidden[:-1])).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, ids[1:, None]).squeeze(-1), entropy


def step(loss: Loss, split: list[list[int]], optimizer: str) -> tuple[float, list[Tensor], list[Tensor]]:
    """Loss, gradients and parameters after one optimizer step on eight ragged sequences, accumulated over `split`."""
    model = TinyPolicy()
    sequences = ragged(3)
    g = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 13, (len(s.new) + 1,), generator=g) for s in sequences]
    with torch.no_grad():
        for s, row in zip(sequences, ids, strict=True):
            shift = model(row)[0].double() - s.new  # the log-ratios of `ragged`, around this model
            s.new, s.sampler, s.proximal, s.reference = (x + shift for x in (s.new, s.sampler, s.proximal, s.reference))
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    step = kinds[optimizer](model.parameters(), lr=1e-2)
    total = 0.0
    for chosen in split:
        batch = inputs(loss, sequences, chosen)
        passes = [model(ids[i]) for i in chosen]
        batch.logprobs_N = torch.cat([p[0] for p in passes])
        if loss.needs_entropy:
            batch.entropy_N = torch.cat([p[1] for p in passes])
        out = loss(batch)
        assert sum(out.terms.values()).item() == pytest.approx(out.loss.item(), rel=1e-12)
        out.loss.backward()
        total += out.loss.item()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    step.step()
    return total, gradients, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_the_split_changes_nothing(name: str, aggregation: str) -> None:
    loss = shipped(name, aggregation=aggregation, **EVERYTHING)
    for optimizer in ("sgd", "adamw"):
        whole = step(loss, SPLITS["1"], optimizer)
        assert max(g.abs().max() for g in whole[1]) > 1e-3
        for split in SPLITS.values():
            part = step(loss, split, optimizer)
            assert part[0] == pytest.approx(whole[0], rel=1e-6)
            torch.testing.assert_close(part[1], whole[1], rtol=0, atol=1e-6)
            torch.testing.assert_close(part[2], whole[2], rtol=0, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    owner=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    name=st.sampled_from(NAMES),
    aggregation=st.sampled_from(AGGREGATIONS),
)
def test_any_split_of_any_batch(lengths: list[int], owner: list[int], name: str, aggregation: str) -> None:
    loss = shipped(name, aggregation=aggregation)
    sequences = ragged(len(lengths), extreme=True, lengths=tuple(lengths))
    whole, gradient = call(loss, sequences)
    total, found = 0.0, torch.zeros_like(gradient)
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for micro in range(4):
        chosen = [i for i in range(len(lengths)) if owner[i] == micro]
        if chosen:
            batch = inputs(loss, sequences, chosen)
            out = loss(batch)
            out.loss.backward()
            total += out.loss.item()
            assert batch.logprobs_N.grad is not None
            places = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in chosen])
            found[places] = batch.logprobs_N.grad
    assert total == pytest.approx(whole.loss.item(), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=0)


# Identities


@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_on_policy_every_ratio_loss_has_the_gradient_of_reinforce(name: str) -> None:
    batch = ragged(0)
    for s in batch:
        s.sampler, s.proximal = s.new.clone(), s.new.clone()
    _, expected = call(shipped("reinforce", aggregation="token_mean"), batch)
    out, gradient = call(shipped(name, aggregation="token_mean"), batch)
    if name == "gspo":  # every token of a sequence carries its mean gradient, so only the sequence's sum is the same
        sequence_N = inputs(shipped(name), batch).sequence_N
        gradient, expected = (torch.zeros(8).index_add(0, sequence_N, g) for g in (gradient, expected))
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert not out.clipped_N.any()


def test_an_infinite_clip_range_is_no_clip() -> None:
    for extreme in (False, True):
        batch = ragged(1, extreme)
        unclipped, unclipped_gradient = call(shipped("grpo"), batch)
        out, gradient = call(shipped("ppo_clip", clip_low=math.inf, clip_high=math.inf), batch)
        assert out.loss.item() == unclipped.loss.item()
        assert torch.equal(gradient, unclipped_gradient)
        assert not out.clipped_N.any()


def test_gspo_on_sequences_of_one_token_is_ppo_clip() -> None:
    batch = ragged(2, lengths=(1,) * 8)
    ranges = {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token_mean"}
    expected, expected_gradient = call(shipped("ppo_clip", **ranges), batch)
    out, gradient = call(shipped("gspo", **ranges), batch)
    assert out.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert torch.equal(gradient, expected_gradient)
    assert torch.equal(out.clipped_N, expected.clipped_N)
    assert expected.clipped_N.any()


def test_tis_and_decoupled_ppo_are_one_form_with_two_caps() -> None:
    batch = ragged(4, extreme=True)
    assert call(shipped("tis", cap=5.0), batch)[0].loss == call(shipped("decoupled_ppo"), batch)[0].loss
    assert call(shipped("tis"), batch)[0].loss != call(shipped("decoupled_ppo"), batch)[0].loss


@pytest.mark.parametrize("name", ["tis", "icepop", "decoupled_ppo"])
def test_a_correction_is_nothing_where_the_sampler_is_the_proximal_policy(name: str) -> None:
    batch = ragged(5)
    for s in batch:
        s.proximal = s.sampler.clone()
    expected, expected_gradient = call(shipped("ppo_clip"), batch)
    out, gradient = call(shipped(name), batch)
    assert out.loss.item() == expected.loss.item()
    assert torch.equal(gradient, expected_gradient)


def test_terms_are_parts_of_the_loss() -> None:
    loss = shipped("ppo_clip", **EVERYTHING)
    out = loss(inputs(loss, ragged(0)))
    assert set(out.terms) == {"policy", "kl_reference", "entropy_bonus"}
    assert sum(out.terms.values()).item() == pytest.approx(out.loss.item(), rel=1e-12)
    assert out.terms["kl_reference"] > 0
    assert out.terms["entropy_bonus"] < 0
    assert not any(term.requires_grad for term in out.terms.values())


# Signs, and sides of the clip


@pytest.mark.parametrize("name", NAMES)
def test_a_step_raises_the_better_completion(name: str) -> None:
    """Two completions of one prompt: gradient steps must move probability from the worse to the better."""
    logits = torch.zeros(2, requires_grad=True)
    loss = shipped(name)
    for _ in range(3):
        logprobs_N = logits.log_softmax(-1)
        old_N = logprobs_N.detach()
        batch = LossInputs(logprobs_N, old_N, torch.tensor([0.7, -0.7]), torch.ones(2), torch.arange(2), 2, old_N)
        (gradient,) = torch.autograd.grad(loss(batch).loss, logits)
        logits = (logits - 0.1 * gradient).detach().requires_grad_()
    assert logits.softmax(-1)[0] > 0.55


def test_ppo_clips_only_the_side_that_would_go_on() -> None:
    """r = 2, 0.5 with A = 1 and -1: the clipped are (2, +) at 1.28 and (0.5, -) at 0.8; the other two keep gradient."""
    log2 = math.log(2)
    loss = shipped("ppo_clip")
    cases = [(log2, 1.0), (-log2, -1.0), (-log2, 1.0), (log2, -1.0)]
    value, gradient, clipped = one(loss, [x for x, _ in cases], [0.0] * 4, [a for _, a in cases])
    assert clipped == [True, True, False, False]
    assert gradient == pytest.approx([0.0, 0.0, -0.5, 2.0], rel=1e-6)
    assert value == pytest.approx(-1.28 + 0.8 - 0.5 + 2.0, rel=1e-6)


def test_dual_clip_bounds_negative_advantages_only() -> None:
    log4 = math.log(4)
    value, gradient, clipped = one(shipped("ppo_clip", dual_clip=3.0), [log4, log4], [0.0, 0.0], [-1.0, 1.0])
    assert clipped == [True, True]
    assert gradient == [0.0, 0.0]
    assert value == pytest.approx(3.0 - 1.28)
    assert one(shipped("ppo_clip"), [log4], [0.0], [-1.0])[:2] == (pytest.approx(4.0), pytest.approx([4.0]))


def test_a_zero_advantage_is_never_clipped() -> None:
    assert one(shipped("ppo_clip"), [2.0, -2.0], [0.0, 0.0], [0.0, 0.0])[2] == [False, False]


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    _, gradient, clipped = one(shipped("cispo"), [3.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    assert gradient == pytest.approx([-5.0, -1.0])
    assert clipped == [True, False]


def test_icepop_bounds_are_on_the_ratio_and_keep_the_denominator() -> None:
    """proximal / sampler = 0.4, 2, 6 in [0.5, 5]: only the middle one counts. Bounds on the inverse would keep 0.4."""
    loss = shipped("icepop")
    proximal_N = torch.tensor([-2.0, -2.0, -2.0])
    sampler_N = proximal_N - torch.tensor([0.4, 2.0, 6.0]).log()
    new_N = proximal_N.clone().requires_grad_()
    weights_N = torch.full((3,), 1 / 3)
    ones = torch.ones(3)
    out = loss(LossInputs(new_N, sampler_N, ones, weights_N, torch.arange(3), 3, proximal_N))
    out.loss.backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == pytest.approx([0.0, -2 / 3, 0.0], rel=1e-6)
    assert out.clipped_N.tolist() == [True, False, True]


def test_rejection_drops_whole_sequences() -> None:
    loss = shipped("ppo_clip", reject_low=0.9, reject_high=1.1)
    assert loss.needs_proximal
    proximal_N = torch.full((4,), -1.0)
    sampler_N = proximal_N - torch.tensor([0.5, -0.5, 0.5, 0.0])  # geometric means 1 and exp(0.25)
    new_N = proximal_N.clone().requires_grad_()
    sequence_N = torch.tensor([0, 0, 1, 1])
    out = loss(LossInputs(new_N, sampler_N, torch.ones(4), torch.ones(4), sequence_N, 2, proximal_N))
    out.loss.backward()
    assert new_N.grad is not None
    assert new_N.grad.tolist() == [-1.0, -1.0, 0.0, 0.0]
    assert out.clipped_N.tolist() == [False, False, True, True]
