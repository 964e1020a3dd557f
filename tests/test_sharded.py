"""Two and three ranks over gloo: the same numbers, checkpoints and refusals as one process; a rank that fails ends it.

In float64 where parameters are compared: AdamW's first steps are nearly the gradient's sign, and show rounding at full
size.
"""

import json
import math
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ENDED, team_of
from safetensors.torch import load_file
from test_step import LENGTHS, groups
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from grpo import checkpoint
from grpo.checkpoint import Checkpoints, Progress
from grpo.ledger import Ledger
from grpo.losses import PPOClip
from grpo.losses.base import Loss
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.sharded import ShardedOptimizer, ShardedPolicy
from grpo.step import NonFiniteStep, TrainStep
from grpo.team import Team, TeamError
from grpo.types import Group

pytestmark = pytest.mark.slow

Followers = list["subprocess.Popen[bytes]"]
Change = Callable[[list[Group]], None]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Team, Followers]]:
    """Two ranks, or as many as the test asks for."""
    with team_of(getattr(request, "param", 2)) as both:
        yield both


two_and_three = pytest.mark.parametrize("both", [2, 3], indirect=True, ids=["2 ranks", "3 ranks"])


@pytest.fixture
def team(both: tuple[Team, Followers]) -> Team:
    return both[0]


def trainer(
    folder: Path,
    team: Team | None,
    *,
    dtype: str = "float64",
    loss: Loss | None = None,
    minibatches: int = 1,
    budget: int = 16,
    reference: Path | None = None,
    **settings: Any,
) -> TrainStep:
    """A fresh policy and optimizer, of one process or of the team."""
    settings = {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1, **settings}
    loss = loss or PPOClip()
    frozen: Any = None
    if team is None:
        policy = Policy(folder, dtype=dtype)
        optimizer = Optimizer(policy.parameters(), **settings)
        frozen = Policy(reference, dtype=dtype, trainable=False) if reference else None
    else:
        policy = team.make("policy", ShardedPolicy, folder, dtype=dtype)
        optimizer = team.make("optimizer", ShardedOptimizer, **settings)
        frozen = team.make("reference", ShardedPolicy, reference, dtype=dtype, trainable=False) if reference else None
    return TrainStep(
        policy=policy,
        reference=frozen,
        optimizer=optimizer,
        loss=loss,
        ledger=Ledger(),
        temperature=0.8,
        minibatches=minibatches,
        tokens_per_microbatch=budget,
        reward_weights={},
        share_prompts=team is not None and dtype == "float32",
    )


def train(step: TrainStep, folder: Path, steps: range, change: Change | None = None) -> list[dict[str, float]]:
    """The metrics of `steps`; every step has the same two ragged groups, with other rewards."""
    lines = []
    for number in steps:
        batch = groups(folder, temperature=0.8)
        for group in batch:
            for completion in group.completions:
                completion.reward = float((completion.index + number) % 3)
                completion.versions = [1 + token % 2 for token in range(completion.tokens)]
        if change is not None:
            change(batch)
        step.ledger.receive(sum(LENGTHS))
        lines.append(step(batch, version=2))
    return lines


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in policy.named_weights(policy.dtype)}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    assert list(ours) == list(theirs)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=atol, msg=name)


@two_and_three
@pytest.mark.parametrize(("dtype", "minibatches"), [("float64", 1), ("float64", 2), ("float32", 2)])
def test_the_numbers_are_those_of_one_process(team: Team, tiny_dir: Path, dtype: str, minibatches: int) -> None:
    """Losses, norms, sizes of updates, every figure by lag; and the parameters after five steps."""
    other = PPOClip(kl_coefficient=0.1, entropy_coefficient=0.01)
    runs = []
    for which in (None, team):
        step = trainer(tiny_dir, which, dtype=dtype, loss=other, minibatches=minibatches, reference=tiny_dir)
        runs.append((train(step, tiny_dir, range(5)), weights(step.policy)))
    (alone, expected), (together, sharded) = runs
    bound = 1e-9 if dtype == "float64" else 1e-5
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key] == pytest.approx(value, rel=10 * bound, abs=bound), key
    assert max(line["grad_norm"] for line in alone) > 0.5, "some step must be clipped"
    assert together[0]["lag_0/tokens"] + together[0]["lag_1/tokens"] == sum(LENGTHS)
    if dtype == "float64":
        assert_equal(sharded, expected, 1e-9)
        start = weights(Policy(tiny_dir, dtype=dtype))
        assert max(float((sharded[name] - start[name]).abs().max()) for name in start) > 1e-2


@two_and_three
def test_a_rank_without_tokens_changes_nothing(team: Team, tiny_dir: Path) -> None:
    def only_two(batch: list[Group]) -> None:
        for group in batch:
            for completion in group.completions[1:]:
                completion.finish_reason = "length"
            group.completions[0].finish_reason = "stop" if group.index == 0 else "length"

    loss = PPOClip(mask_truncated=True)
    runs = []
    for which in (None, team):
        step = trainer(tiny_dir, which, loss=loss, budget=1000)
        runs.append((train(step, tiny_dir, range(2), only_two), weights(step.policy)))
    (alone, expected), (together, sharded) = runs
    assert [line["grad_norm"] for line in together] == pytest.approx([line["grad_norm"] for line in alone], rel=1e-9)
    assert alone[0]["grad_norm"] > 0
    assert_equal(sharded, expected, 1e-9)


@two_and_three
def test_every_rank_has_a_like_share_of_every_pass(team: Team, tiny_dir: Path) -> None:
    step = trainer(tiny_dir, team, budget=20)
    (part,) = step.prepare(groups(tiny_dir), 2).parts
    for mb, names in part:
        loads = [len(shard.ids_T) for shard in mb.shards]
        assert len(loads) == team.ranks
        assert sum(loads) == len(mb.ids_T)
        assert max(loads) - min(loads) <= max(LENGTHS)
        assert len(names) == mb.num_sequences
    assert sorted(name for _, names in part for name in names) == [f"{g}/{i}" for g in range(2) for i in range(4)]


def test_a_step_with_a_nan_is_refused_on_every_rank(team: Team, tiny_dir: Path) -> None:
    def broken(batch: list[Group]) -> None:
        batch[1].completions[2].logprobs[1] = math.nan

    step = trainer(tiny_dir, team)
    with pytest.raises(NonFiniteStep, match=r"sample 1/2: sampler_logprobs \(1 of 2 tokens\)"):
        train(step, tiny_dir, range(1), broken)
    assert_equal(weights(step.policy), weights(Policy(tiny_dir, dtype="float64")), 0.0)
    step.ledger = Ledger()
    (after,) = train(step, tiny_dir, range(1))  # nothing of it is left in a gradient
    assert after["grad_norm"] == pytest.approx(train(trainer(tiny_dir, None), tiny_dir, range(1))[0]["grad_norm"])


def test_a_gradient_that_is_broken_on_one_rank_is_refused_on_all(team: Team, tiny_dir: Path) -> None:
    step = trainer(tiny_dir, team)
    before = weights(step.policy)
    sound = step.optimizer.gradients

    def broken() -> list[torch.Tensor]:
        grads = sound()
        grads[-1][0] = math.inf
        return grads

    step.optimizer.gradients = broken  # type: ignore[method-assign]  # of rank 0 alone
    with pytest.raises(NonFiniteStep, match="its gradient's norm is inf"):
        train(step, tiny_dir, range(1))
    assert_equal(weights(step.policy), before, 0.0)
    assert step.optimizer.steps == 0


def test_a_pass_without_gradients_leaves_no_old_weights_behind(team: Team, tiny_dir: Path) -> None:
    """Embedding and head stay gathered between a forward and a backward pass; here none follows before the step."""
    after = []
    for which in (None, team):
        step = trainer(tiny_dir, which, budget=1000)
        ((mb, _),) = step.prepare(groups(tiny_dir), 2).parts[0]
        step.policy.logprobs(mb, 1.0)[0].sum().backward()
        with torch.no_grad():
            step.policy.logprobs(mb, 1.0)
            step.optimizer.step()
            values_N = step.policy.logprobs(mb, 1.0)[0]
        after.append(dict(zip(mb.rows, values_N.split(mb.lengths), strict=True)))
    for row, values in after[0].items():
        torch.testing.assert_close(after[1][row], values, rtol=0, atol=1e-9)


def test_weights_are_announced_without_being_gathered(team: Team, tied_dir: Path) -> None:
    policy = team.make("policy", ShardedPolicy, tied_dir, dtype="float32")
    alone = Policy(tied_dir)
    announced = dict(policy.named_weights())
    assert {n: w.shape for n, w in announced.items()} == {n: w.shape for n, w in alone.named_weights()}
    assert max(w.untyped_storage().nbytes() for w in announced.values()) <= 8
    assert_equal(weights(policy), weights(alone), 0.0)
    assert policy.vocab_size == alone.vocab_size


@two_and_three
def test_checkpoints_do_not_depend_on_the_number_of_ranks(team: Team, tiny_dir: Path, tmp_path: Path) -> None:
    """2 (3) ranks, then one process, then ranks again: the parameters of one unbroken process."""
    unbroken = trainer(tiny_dir, None)
    expected = train(unbroken, tiny_dir, range(6))
    lines, folder = [], tiny_dir
    for number, which in enumerate((team, None, team)):
        step = trainer(folder, which)
        if number:
            step.optimizer.load_state_dict(checkpoint.load(folder)["optimizer"])
        lines += train(step, tiny_dir, range(2 * number, 2 * number + 2))
        saved = Checkpoints(tmp_path / str(number), keep=0, config={})
        saved.save(step.policy, step.optimizer, Progress(2, 2, 4, 4, {}))
        folder = tmp_path / str(number) / "step_000002"
        assert checkpoint.inspect(folder)["groups"] == 4
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-9)
    assert_equal(weights(step.policy), weights(unbroken.policy), 1e-9)
    assert_equal(load_file(folder / "model.safetensors"), weights(unbroken.policy), 1e-9)

    alone = Checkpoints(tmp_path / "alone", keep=0, config={})
    alone.save(unbroken.policy, unbroken.optimizer, Progress(2, 2, 4, 4, {}))
    theirs = tmp_path / "alone" / "step_000002"
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in theirs.iterdir())
    for file in ("config.json", "generation_config.json"):
        assert json.loads((folder / file).read_text()) == json.loads((theirs / file).read_text())
    ours_state, state = (checkpoint.load(path)["optimizer"]["adamw"] for path in (folder, theirs))
    assert ours_state["param_groups"] == state["param_groups"]
    for i, moments in state["state"].items():
        for name, value in moments.items():
            torch.testing.assert_close(ours_state["state"][i][name], value, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["adamw", "adamw_bf16"])
def test_bfloat16_keeps_float32_masters_that_survive_a_checkpoint(team: Team, tmp_path: Path, kind: str) -> None:
    """Steps below what bfloat16 resolves add up in the shards."""
    folder = save_tiny_model(tmp_path / "model", tied=True)
    settings = {"dtype": "bfloat16", "kind": kind, "lr": 1e-5, "max_grad_norm": 0.0, "weight_decay": 0.0}
    alone, together = trainer(folder, None, **settings), trainer(folder, team, **settings)
    ours, theirs = train(together, folder, range(3)), train(alone, folder, range(3))
    for line, expected in zip(ours, theirs, strict=True):
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.02)
        assert line["update_size"] == pytest.approx(expected["update_size"], rel=0.05)
    state = together.optimizer.state_dict()
    assert all(m.dtype == torch.float32 for m in state["masters"])
    moment = state["adamw"]["state"][0]["exp_avg"]
    assert moment.dtype == (torch.bfloat16 if kind == "adamw_bf16" else torch.float32)
    start = [p.detach().float() for p in Policy(folder, dtype="bfloat16").parameters()]
    apart, moved = (
        sum(float((a - b.detach()).norm() ** 2) for a, b in zip(state["masters"], others, strict=True))
        for others in (alone.optimizer.masters, start)
    )
    assert 0 < apart < 0.25 * moved, "both go the same way"
    one = trainer(folder, None, **settings)
    one.optimizer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(one.optimizer.masters, state["masters"], strict=True))
    again = trainer(folder, team, **settings)
    again.optimizer.load_state_dict(one.optimizer.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(again.optimizer.state_dict()["masters"], state["masters"], strict=True)
    )
    with pytest.raises(ValueError, match=r"another model\.dtype"):
        trainer(folder, team, dtype="float32", kind=kind).optimizer.load_state_dict(state)


def test_checkpointing_changes_nothing_and_transformers_reads_what_is_saved(
    team: Team, tiny_dir: Path, tmp_path: Path
) -> None:
    plain = train(trainer(tiny_dir, team), tiny_dir, range(1))
    step = trainer(tiny_dir, team)
    policy = team.make("policy", ShardedPolicy, tiny_dir, dtype="float64", checkpointing="full")
    step.policy, step.optimizer = policy, team.make("optimizer", ShardedOptimizer, lr=1e-2, max_grad_norm=0.5)
    assert train(step, tiny_dir, range(1))[0]["grad_norm"] == pytest.approx(plain[0]["grad_norm"], rel=1e-9)
    policy.save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(dict(model.named_parameters()), weights(policy), 0.0)


# ---- the end of a rank; these tests end their team, so they stay last ----


def test_a_rank_that_fails_says_why_and_ends_all(both: tuple[Team, Followers], tiny_dir: Path) -> None:
    team, followers = both
    team.make("policy", ShardedPolicy, tiny_dir, dtype="float32")
    last = team.ranks - 1
    arguments = [("lm_head.weight" if rank < last else "no_such_weight", torch.float32) for rank in range(team.ranks)]
    with pytest.raises(
        TeamError, match=rf"rank {last} of {team.ranks} failed: Traceback[^$]*KeyError: 'no_such_weight'"
    ):
        team.each("policy", "_gather", arguments)
    with pytest.raises(TeamError, match="no_such_weight"):
        team.check()
    followers[-1].send_signal(signal.SIGKILL)
    for follower in followers:
        assert follower.wait(ENDED) != 0
