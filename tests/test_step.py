"""The training step on a real tiny model: one denominator, refusals, accounts."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from grpo.ledger import Ledger
from grpo.losses import GRPO, PPOClip, Reinforce
from grpo.losses.base import Loss
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.step import NonFiniteStep, TrainStep
from grpo.types import Completion, Group, Prompt

LENGTHS = (3, 9, 1, 6, 4, 12, 2, 5)  # eight ragged completions, two groups


def logprobs(model: nn.Module, prompt: list[int], ids: list[int], temperature: float = 1.0) -> list[float]:
    """Of the completion, by transformers' own forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)[torch.arange(len(ids)), ids].tolist()


def groups(folder: Path, *, temperature: float = 1.0, version: int = 0) -> list[Group]:
    """Two groups of four, sampled by nobody: random ids, and the policy's own logprobs off by known amounts."""
    draw = torch.Generator().manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = []
    for g in range(2):
        prompt = Prompt(g, f"r{g}", "p", [5 + g, 6, 7 + g], {})
        completions = []
        for i in range(4):
            n = LENGTHS[4 * g + i]
            ids = torch.randint(2, model.config.vocab_size, (n,), generator=draw).tolist()
            noise = (0.2 * torch.randn(n, generator=draw)).tolist()
            exact = logprobs(model, prompt.token_ids, ids, temperature)
            completions.append(
                Completion(
                    g,
                    i,
                    ids,
                    [min(a + b, 0.0) for a, b in zip(exact, noise, strict=True)],
                    [version] * n,
                    "length" if i == 0 else "stop",
                    reward=float(i % 2),
                )
            )
        made.append(Group(g, prompt, completions))
    return made


def step_on(
    folder: Path,
    loss: Loss,
    budget: int,
    *,
    minibatches: int = 1,
    temperature: float = 1.0,
    change: Any = None,
    dtype: str = "float32",
    keep_logprobs: bool = False,
    share_prompts: bool = False,
) -> tuple[dict[str, float], list[torch.Tensor], Ledger]:
    """One step on a fresh policy: metrics, parameters afterwards, ledger."""
    policy = Policy(folder, dtype=dtype)
    batch = groups(folder, temperature=temperature)
    if change is not None:
        change(batch)
    ledger = Ledger()
    ledger.receive(sum(len(c.token_ids) for g in batch for c in g.completions))
    step = TrainStep(
        policy=policy,
        reference=Policy(folder, dtype=dtype, trainable=False) if loss.needs_reference else None,
        optimizer=Optimizer(policy.parameters(), lr=1e-2, max_grad_norm=1.0),
        loss=loss,
        ledger=ledger,
        temperature=temperature,
        minibatches=minibatches,
        tokens_per_microbatch=budget,
        reward_weights={},
        keep_logprobs=keep_logprobs,
        share_prompts=share_prompts,
    )
    metrics = step(batch, version=2)
    return metrics, [p.detach().clone() for p in policy.parameters()], ledger


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed"])
def test_splitting_the_batch_changes_nothing(tiny_dir: Path, aggregation: str, share_prompts: bool) -> None:
    """In float64, because AdamW's first step is nearly the gradient's sign: it shows rounding at full size."""
    loss = PPOClip(aggregation=aggregation, max_tokens=12, kl_coefficient=0.1)
    whole = step_on(tiny_dir, loss, 1000, dtype="float64")
    for budget in (1, 16, 20, 40):
        split = step_on(tiny_dir, loss, budget, dtype="float64", share_prompts=share_prompts)
        assert split[0]["loss"] == pytest.approx(whole[0]["loss"], abs=1e-9)
        assert split[0]["grad_norm"] == pytest.approx(whole[0]["grad_norm"], rel=1e-7 if share_prompts else 1e-9)
        for a, b in zip(split[1], whole[1], strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_a_temperature_that_is_left_out_shows_in_the_ratio(tiny_dir: Path) -> None:
    """Law 4: the trainer computes the tempered distribution; the raw one is far off."""

    model = AutoModelForCausalLM.from_pretrained(tiny_dir)

    def exact(batch: list[Group]) -> None:
        for g in batch:
            for c in g.completions:
                c.logprobs = logprobs(model, g.prompt.token_ids, c.token_ids, 0.6)

    metrics, _, _ = step_on(tiny_dir, GRPO(), 1000, temperature=0.6, change=exact)
    assert max(abs(metrics["ratio/max"] - 1), abs(metrics["ratio/min"] - 1)) < 1e-4

    wrong, _, _ = step_on(tiny_dir, GRPO(), 1000, temperature=1.0, change=exact)
    assert abs(wrong["ratio/mean"] - 1) > 0.01


def test_a_step_raises_the_probability_of_the_better_completions(tiny_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    batch = groups(tiny_dir)

    def margin() -> float:
        """Logprob of the right completions less that of the wrong ones."""
        signs = {1.0: 1, 0.0: -1}
        return sum(
            signs[c.reward or 0.0] * sum(logprobs(model, g.prompt.token_ids, c.token_ids))
            for g in batch
            for c in g.completions
        )

    before = margin()
    _, parameters, _ = step_on(tiny_dir, Reinforce(), 1000)
    with torch.no_grad():
        for p, q in zip(model.parameters(), parameters, strict=True):
            p.copy_(q)
    assert margin() > before + 0.1


def test_lag_counts_from_each_tokens_own_version(tiny_dir: Path) -> None:
    def mixed(batch: list[Group]) -> None:
        c = batch[0].completions[1]
        c.versions = [0, 0, 1, 1, 1, 2, 2, 2, 2]

    metrics, _, _ = step_on(tiny_dir, PPOClip(), 1000, change=mixed)
    total = sum(LENGTHS)
    assert (metrics["lag_0/tokens"], metrics["lag_1/tokens"], metrics["lag_2/tokens"]) == (4, 3, total - 7)
    assert metrics["lag/max"] == 2


def test_truncated_completions_are_out_of_numerator_and_denominator(tiny_dir: Path) -> None:
    _, parameters, ledger = step_on(tiny_dir, PPOClip(mask_truncated=True), 1000)
    assert ledger.totals()["masked"] == LENGTHS[0] + LENGTHS[4]
    assert ledger.totals()["trained"] == sum(LENGTHS) - LENGTHS[0] - LENGTHS[4]

    def other_ids(batch: list[Group]) -> None:  # what a masked completion holds has no influence
        for g in batch:
            g.completions[0].token_ids = [2] * len(g.completions[0].token_ids)
            g.completions[0].logprobs = [-700.0] * len(g.completions[0].token_ids)

    _, same, _ = step_on(tiny_dir, PPOClip(mask_truncated=True), 1000, change=other_ids)
    assert all(torch.equal(a, b) for a, b in zip(parameters, same, strict=True))


def test_a_batch_that_is_masked_entirely_makes_no_step_and_no_nan(tiny_dir: Path) -> None:
    def all_truncated(batch: list[Group]) -> None:
        for g in batch:
            for c in g.completions:
                c.finish_reason = "length"

    metrics, parameters, ledger = step_on(tiny_dir, PPOClip(mask_truncated=True), 1000, change=all_truncated)
    assert metrics["optimizer_steps"] == 0
    assert metrics["loss"] == metrics["grad_norm"] == metrics["update_size"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(parameters, Policy(tiny_dir).parameters(), strict=True))
    assert ledger.totals()["masked"] == sum(LENGTHS)


@pytest.mark.parametrize("value", [-200.0, 0.0])
def test_an_extreme_log_ratio_stays_finite_and_is_counted(tiny_dir: Path, value: float) -> None:
    def extreme(batch: list[Group]) -> None:
        batch[0].completions[1].logprobs[2] = value

    metrics, parameters, _ = step_on(tiny_dir, GRPO(), 1000, change=extreme)
    assert math.isfinite(metrics["loss"])
    assert math.isfinite(metrics["grad_norm"])
    assert all(p.isfinite().all() for p in parameters)
    if value == -200.0:
        assert metrics["ratio/clamped_fraction"] == pytest.approx(1 / sum(LENGTHS))


def test_a_nan_is_refused_by_the_name_of_its_sample_and_changes_nothing(tiny_dir: Path) -> None:
    policy = Policy(tiny_dir)
    batch = groups(tiny_dir)
    batch[1].completions[2].logprobs[1] = math.nan
    before = [p.detach().clone() for p in policy.parameters()]
    ledger = Ledger()
    ledger.receive(sum(LENGTHS))
    step = TrainStep(
        policy=policy,
        reference=None,
        optimizer=Optimizer(policy.parameters(), lr=1e-2),
        loss=PPOClip(),
        ledger=ledger,
        temperature=1.0,
        minibatches=1,
        tokens_per_microbatch=16,
        reward_weights={},
    )
    with pytest.raises(NonFiniteStep, match=r"sample 1/2: sampler_logprobs \(1 of 2 tokens\)"):
        step(batch, version=2)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert ledger.totals()["trained"] == 0
    assert step.optimizer.steps == 0


def test_a_nan_in_the_models_own_weights_is_refused(tiny_dir: Path) -> None:
    policy = Policy(tiny_dir)
    batch = groups(tiny_dir)
    with torch.no_grad():
        next(iter(policy.parameters()))[5, 0] = math.nan
    ledger = Ledger()
    ledger.receive(sum(LENGTHS))
    step = TrainStep(
        policy=policy,
        reference=None,
        optimizer=Optimizer(policy.parameters(), lr=1e-2),
        loss=PPOClip(),
        ledger=ledger,
        temperature=1.0,
        minibatches=1,
        tokens_per_microbatch=1000,
        reward_weights={},
    )
    with pytest.raises(NonFiniteStep, match=r"sample 0/0: logprobs"):
        step(batch, version=2)


def test_minibatches_make_that_many_steps_and_diagnose_the_policy_before_the_first(tiny_dir: Path) -> None:
    one, _, _ = step_on(tiny_dir, PPOClip(), 1000)
    four, _, ledger = step_on(tiny_dir, PPOClip(), 1000, minibatches=4)
    assert (one["optimizer_steps"], four["optimizer_steps"]) == (1, 4)
    for key in ("kl/sampler", "ratio/mean", "ess", "lag_2/kl"):
        assert four[key] == pytest.approx(one[key], rel=1e-5), key
    assert ledger.totals()["trained"] == sum(LENGTHS)


@pytest.mark.parametrize(("budget", "minibatches"), [(1000, 1), (16, 1), (20, 3)])
def test_logprobs_that_are_kept_are_those_before_the_first_update(
    tiny_dir: Path, budget: int, minibatches: int
) -> None:
    """Each completion's own, by transformers' own forward pass; none for what was not trained, none unasked."""
    batches = []

    def change(batch: list[Group]) -> None:
        batch[0].completions[2].reward = None  # not scored
        batches.append(batch)

    for keep in (False, True):
        step_on(
            tiny_dir, PPOClip(), budget, minibatches=minibatches, temperature=0.7, change=change, keep_logprobs=keep
        )
    assert not any(c.policy_logprobs for g in batches[0] for c in g.completions)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    for group in batches[1]:
        for c in group.completions:
            exact = logprobs(model, group.prompt.token_ids, c.token_ids, 0.7) if c.reward is not None else []
            assert c.policy_logprobs == pytest.approx(exact, abs=1e-4), (c.group, c.index)


def test_update_size_is_the_mean_over_the_batchs_steps(tiny_dir: Path) -> None:
    start = torch.cat([p.detach().flatten() for p in Policy(tiny_dir).parameters()])
    one, parameters, _ = step_on(tiny_dir, PPOClip(), 1000)
    moved = torch.cat([p.flatten() for p in parameters]) - start
    assert one["update_size"] == pytest.approx(float(moved.norm() / start.norm()), rel=1e-4)
    four, _, _ = step_on(tiny_dir, PPOClip(), 1000, minibatches=4)
    assert 0.3 * one["update_size"] < four["update_size"] < 1.5 * one["update_size"], "a mean, not the sum"


def test_a_failure_elsewhere_ends_the_step_between_micro_batches(tiny_dir: Path) -> None:
    policy = Policy(tiny_dir)
    ledger = Ledger()
    ledger.receive(sum(LENGTHS))
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the server died")

    step = TrainStep(
        policy=policy,
        reference=None,
        optimizer=Optimizer(policy.parameters(), lr=1e-2),
        loss=PPOClip(),
        ledger=ledger,
        temperature=1.0,
        minibatches=1,
        tokens_per_microbatch=1,
        reward_weights={},
        check=check,
    )
    with pytest.raises(RuntimeError, match="the server died"):
        step(groups(tiny_dir), version=2)
