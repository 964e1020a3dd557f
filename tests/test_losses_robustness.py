"""Losses under broken and extreme numbers, wrong configurations, and a loss from a user's own module."""

import copy
import importlib
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from loss_cases import CONF, NAMES, call, inputs, ragged, shipped

from grpo.losses import GRPO, PPOClip, Reinforce
from grpo.losses.regularizers import kl_penalty

# Broken and extreme numbers (CASES 10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("jump", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_token_leaves_loss_and_gradient_finite(name: str, jump: float, advantage: float) -> None:
    batch = ragged(0)
    batch[0].advantage = advantage
    batch[0].new[2] += jump
    out, gradient = call(shipped(name, kl_coefficient=0.1), batch)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert out.clamped_N.nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("name", ["tis", "icepop", "decoupled_ppo"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_extreme_correction_is_finite_too(name: str, level: str) -> None:
    batch = ragged(0, lengths=(40, 3))  # 40 times the clamp is 800, and exp(800) is infinite in float64 too
    for s in batch:
        s.proximal = s.sampler + 200.0
    changes = {"mask_high": None} if name == "icepop" else {}
    out, gradient = call(shipped(name, level=level, **changes), batch)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert out.clamped_N.all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["new", "sampler", "proximal", "reference"])
def test_nothing_hides_a_broken_logprob(name: str, bad: float, field: str) -> None:
    loss = shipped(name, kl_coefficient=0.1)
    batch = ragged(0)
    getattr(batch[2], field)[3] = bad
    micro = inputs(loss, batch)
    if field == "proximal" and not loss.needs_proximal:
        assert micro.nonfinite() == {}
        return
    names = {"new": "logprobs", "sampler": "sampler_logprobs"}
    assert micro.nonfinite() == {2: f"{names.get(field, f'{field}_logprobs')} (1 of 12 tokens)"}
    assert loss(micro).loss.isnan()


def test_nonfinite_names_every_tensor_and_counts_tokens() -> None:
    loss = shipped("reinforce")
    micro = inputs(loss, ragged(0))
    with torch.no_grad():
        micro.logprobs_N[:2] = math.nan
        micro.advantages_N[0] = math.inf
        micro.logprobs_N[-1] = -math.inf
    assert micro.nonfinite() == {
        0: "logprobs (2 of 5 tokens), advantages (1 of 5 tokens)",
        7: "logprobs (1 of 4 tokens)",
    }


def test_only_the_current_policy_gets_a_gradient() -> None:
    loss = shipped("tis", kl_coefficient=0.1)
    micro = inputs(loss, ragged(0))
    others = ("sampler_logprobs_N", "advantages_N", "weights_N", "proximal_logprobs_N", "reference_logprobs_N")
    for name in others:
        getattr(micro, name).requires_grad_()
    loss(micro).loss.backward()
    assert micro.logprobs_N.grad is not None
    assert all(getattr(micro, name).grad is None for name in others)


@pytest.mark.parametrize("d", [1e-1, 1e-3, 1e-6, -1e-6])
def test_k3_is_accurate_where_the_policies_nearly_agree(d: float) -> None:
    """exp(d) - 1 - d is off by 5 % at 1e-3 in float32, and by 2e-4 at 1e-6 in float64."""
    exact = sum(d**k / math.factorial(k) for k in range(2, 12))
    penalty_N = kl_penalty("k3", torch.zeros(1, dtype=torch.float64), torch.tensor([d], dtype=torch.float64))
    assert penalty_N.item() == pytest.approx(exact, rel=1e-8, abs=0)


def test_k1_has_the_gradient_of_k2() -> None:
    """The gradient of k1 itself would be 1 for every token: no pull towards the reference."""
    new = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    value_N = kl_penalty("k1", new, torch.tensor([-1.5, -1.0], dtype=torch.float64))
    value_N.sum().backward()
    assert value_N.tolist() == [0.5, -1.0]
    assert new.grad is not None
    assert new.grad.tolist() == [0.5, -1.0]


# Configuration


@pytest.mark.parametrize("name", NAMES)
def test_shipped_losses_carry_what_the_trainer_reads(name: str) -> None:
    loss = shipped(name)
    assert loss.mask_truncated is False
    assert not loss.needs_reference  # no coefficient, no memory for a reference model
    assert not loss.needs_entropy
    assert loss.needs_proximal == (name in ("tis", "icepop", "decoupled_ppo"))
    assert loss.advantage == ("mean" if name == "dr_grpo" else "mean_std")
    assert loss.length_penalty(16) == (-1.0 if name == "dapo" else 0.0)
    copy.deepcopy(loss)  # replay keeps several


def test_every_key_has_a_comment_above_it() -> None:
    for path in (CONF / "loss").glob("*.yaml"):
        lines = path.read_text().splitlines()
        for above, line in pairwise(lines):
            if re.match(r"\w+:", line) and not line.startswith(("_target_", "defaults")):
                assert above.startswith("#"), f"{path.name}: {line}"


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("ppo_clip", {"advantage": "gae"}, "loss.advantage='gae': choose one of mean_std"),
        ("ppo_clip", {"aggregation": "mean"}, "loss.aggregation='mean': choose one of token_mean"),
        ("ppo_clip", {"correction": "tis"}, "loss.correction='tis': choose one of none"),
        ("ppo_clip", {"clip_low": -0.1}, "loss.clip_low=-0.1"),
        ("ppo_clip", {"dual_clip": 0.5}, "loss.dual_clip=0.5"),
        ("ppo_clip", {"cap": 2.0}, "loss.cap=2.0 with loss.correction=none"),
        ("ppo_clip", {"level": "sequence"}, "loss.level=sequence has no effect"),
        ("ppo_clip", {"reject_low": 1.2}, "loss.reject_low=1.2"),
        ("ppo_clip", {"kl_coefficient": -1.0}, "loss.kl_coefficient=-1.0"),
        ("ppo_clip", {"kl_estimator": "k4"}, "loss.kl_estimator='k4'"),
        ("ppo_clip", {"on_drift": "panic"}, "loss.on_drift='panic'"),
        ("ppo_clip", {"drift_ess": 2.0}, "loss.drift_ess=2.0"),
        ("tis", {"cap": None}, "loss.cap=None with loss.correction=truncate"),
        ("tis", {"cap": 0.0}, "loss.cap=0.0"),
        ("tis", {"level": "batch"}, "loss.level='batch'"),
        ("icepop", {"mask_low": 6.0}, "loss.mask_low=6.0, loss.mask_high=5.0"),
        ("tis", {"mask_low": 0.5}, "loss.mask_low=0.5, loss.mask_high=None with loss.correction=truncate"),
        ("dr_grpo", {"max_tokens": None}, "loss.max_tokens=None"),
        ("dapo", {"overlong_share": 1.5}, "loss.overlong_share=1.5"),
        ("dapo", {"advantage": "maxrl"}, "loss.overlong_share=0.2 with loss.advantage=maxrl"),
        ("sapo", {"tau_negative": 0.0}, "loss.tau_negative=0.0"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=re.escape(says)) as refusal:
        shipped(name, **changes)
    assert isinstance(refusal.value.__cause__ or refusal.value, ValueError)


def test_a_missing_policy_is_named() -> None:
    loss = shipped("tis")
    micro = inputs(loss, ragged(0))
    micro.proximal_logprobs_N = None
    with pytest.raises(AssertionError, match="proximal_logprobs_N"):
        loss(micro)


def test_the_documented_custom_loss_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/losses.md shows a loss in the user's own module: at most 20 lines, reached through `_target_`."""
    text = (CONF.parent / "docs" / "losses.md").read_text()
    block = re.search(r"```python\n# my_losses\.py\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "my_losses.py").write_text(block[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    target = re.search(r"loss\._target_=(\S+)", text)
    value = re.search(r"\+loss\.(\w+)=(\S+)", text)
    assert target is not None
    assert value is not None
    try:
        loss = instantiate({"_target_": target[1], value[1]: float(value[2]), "aggregation": "sequence_mean"})
        batch = ragged(0)
        out, gradient = call(loss, batch)
        grpo, grpo_gradient = call(shipped("grpo", aggregation="sequence_mean"), batch)
    finally:
        sys.modules.pop("my_losses", None)
    negative = torch.cat([torch.full_like(s.new, s.advantage) for s in batch]) < 0
    torch.testing.assert_close(gradient[~negative], grpo_gradient[~negative])
    torch.testing.assert_close(gradient[negative], grpo_gradient[negative] * float(value[2]))
    assert out.loss != grpo.loss


def test_losses_can_be_made_without_a_configuration() -> None:
    assert GRPO().aggregation == "token_mean"
    assert PPOClip(clip_high=0.3, aggregation="fixed", max_tokens=8).high == 1.3
    assert Reinforce(advantage="rloo").advantage == "rloo"
