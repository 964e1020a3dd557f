"""The whole loop around a fake server with a real tiny model: the laws, seen from the run folder and the server."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_faults import Fault
from fake_server import FakeServer
from loop import Scorer, Stream, length_reward, loop, prompt_ids
from oracle import synchronous_grpo
from tiny import save_tiny_model

from grpo import checkpoint
from grpo.checkpoint_folder import complete
from grpo.drift import DriftError
from grpo.groups import NothingToLearn
from grpo.losses import GRPO, PPOClip
from grpo.rollout import client as client_module
from grpo.rollout.errors import ServerError
from grpo.sync.verify import SyncNotProven
from grpo.types import Group, Prompt


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_max_staleness_0_is_the_plain_synchronous_loop(tiny_dir: Path, tmp_path: Path) -> None:
    """The oracle shares nothing with the framework but the seeds, and ends in the same parameters."""
    steps, groups, size = 4, 2, 4
    with FakeServer(tiny_dir) as server:
        expected, history = synchronous_grpo(
            server.url,
            tiny_dir,
            tmp_path,
            prompts=prompt_ids,
            reward=length_reward,
            steps=steps,
            groups=groups,
            group_size=size,
            max_tokens=6,
            temperature=0.8,
            stop_ids=[1],
            lr=1e-3,
            seed=0,
        )
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url], tiny_dir, tmp_path / "run", steps=steps, groups=groups, group_size=size, temperature=0.8
        ) as trainer,
    ):
        assert trainer.run() == "all steps made"
        ours = dict(trainer.step_fn.policy.model.named_parameters())
    rollouts = lines(tmp_path / "run", "rollouts.jsonl")
    for step in range(steps):
        texts = [r["completion"] for r in rollouts if r["step"] == step + 1 and r["outcome"] == "trained"]
        assert texts == [" ".join(map(str, ids)) for ids in history[step]]
    moved = 0.0
    start = dict(trainer.step_fn.policy.__class__(tiny_dir).model.named_parameters())
    for name, parameter in expected.items():
        assert torch.allclose(ours[name], parameter, atol=2e-6), name
        moved = max(moved, float((parameter - start[name].detach()).abs().max()))
    assert moved > 1e-3, "the run must have moved the parameters for the comparison to mean anything"
    assert all(line["lag/max"] == 0 for line in lines(tmp_path / "run"))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_laws_1_2_and_6_hold_in_every_line(tiny_dir: Path, tmp_path: Path, staleness: int) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=8, max_staleness=staleness) as trainer,
    ):
        trainer.run()
        accounts = trainer.ledger.totals()
    metrics, rollouts = lines(tmp_path), lines(tmp_path, "rollouts.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert [line["version"] for line in metrics] == list(range(8))
    for line in metrics:
        parts = [line[f"tokens/{name}"] for name in ("trained", "masked", "discarded", "in_flight")]
        assert line["tokens/generated"] == sum(parts)
        assert line["lag/max"] <= staleness
    trained = [r for r in rollouts if r["outcome"] == "trained"]
    assert max(r["lag"] for r in trained) <= staleness
    if staleness:
        assert max(r["lag"] for r in trained) > 0
    groups = [r["group"] for r in rollouts]
    assert groups == sorted(groups), "consumed in stream order"
    assert len({(r["group"], r["index"]) for r in rollouts}) == len(rollouts), "each completion once"
    assert set(groups) == set(range(max(groups) + 1)), "none left out"
    assert accounts["in_flight"] == 0, "nothing is generated past the last step"
    assert accounts["trained"] == sum(r["tokens"] for r in trained)


@pytest.mark.parametrize(("staleness", "lag"), [(0, 1), (2, 3), (2, -1)])
def test_a_completion_that_is_too_old_or_of_the_future_is_never_trained(
    tiny_dir: Path, tmp_path: Path, staleness: int, lag: int
) -> None:
    """The guard at the optimizer step: a bug elsewhere ends the run before the step."""
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, max_staleness=staleness, zero_variance="keep") as trainer,
    ):
        original = trainer.loader.next_groups

        def next_groups(count: int, timeout: float) -> list[Group]:
            groups = original(count, timeout)
            versions = groups[-1].completions[-1].versions
            versions[:] = [trainer.version - lag] * len(versions)
            return groups

        trainer.loader.next_groups = next_groups  # type: ignore[method-assign]
        with pytest.raises(
            AssertionError, match=rf"law 1 is broken.*has lag {lag}, rollout.max_staleness is {staleness}"
        ):
            trainer.run()
    assert trainer.step == 0


def test_the_lag_of_a_completion_is_that_of_its_oldest_token(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, zero_variance="keep") as trainer:
        original = trainer.loader.next_groups

        def next_groups(count: int, timeout: float) -> list[Group]:
            groups = original(count, timeout)
            groups[0].completions[0].versions[0] -= 1
            return groups

        trainer.loader.next_groups = next_groups  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match=r"law 1 is broken: completion 0/0 has lag 1"):
            trainer.run()


def test_a_token_that_is_on_no_account_ends_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    with (  # one step: nothing of a next one is held when its line is written
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=1, zero_variance="keep") as trainer,
    ):
        original = trainer.loader.next_groups

        def next_groups(count: int, timeout: float) -> list[Group]:
            groups = original(count, timeout)
            trainer.ledger.receive(1)  # generated, and held by nobody
            return groups

        trainer.loader.next_groups = next_groups  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match=r"law 6 is broken: 0 tokens are held, .*'in_flight': 1"):
            trainer.run()


def test_a_checkpoint_counts_all_groups_consumed_but_only_the_kept_ones_as_places(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """A resume begins in the stream behind every group consumed; the pacing knows only batches' places (law 2)."""
    unequal = Scorer(lambda ids: float(len(ids) if sum(ids) % 3 else 0))
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, max_tokens=2, checkpoint_every=1, scorer=unequal) as trainer,
    ):
        trainer.run()
    rollouts = lines(tmp_path, "rollouts.jsonl")
    discarded = {r["group"] for r in rollouts if r["outcome"].startswith("discarded")}
    assert discarded
    for saved in sorted((tmp_path / "checkpoints").glob("step_*")):
        position = checkpoint.load(saved)["progress"]
        consumed = {r["group"] for r in rollouts if r["step"] <= position["step"]}
        assert (position["groups"], position["places"]) == (len(consumed), len(consumed - discarded))


@pytest.mark.parametrize(("step", "evaluated"), [(0, [0, 3, 4]), (2, [3, 4])])
def test_evaluations_come_before_the_first_step_of_the_whole_run_and_after_the_last(
    tiny_dir: Path, tmp_path: Path, step: int, evaluated: list[int]
) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, zero_variance="keep", eval_every=3, max_staleness=2) as trainer,
    ):
        trainer.step = step
        asked: list[int] = []

        class Evaluator:
            sets = ("held_out",)

            def __call__(self, step: int, version: int) -> dict[str, Any]:
                asked.append(step)
                return {}

        trainer.evaluator = Evaluator()  # type: ignore[assignment]
        trainer.run()
    assert asked == evaluated


def test_staleness_does_not_change_which_prompts_are_trained_when(tiny_dir: Path, tmp_path: Path) -> None:
    orders = []
    for staleness in (0, 2):
        folder = tmp_path / str(staleness)
        with (
            FakeServer(tiny_dir) as server,
            loop([server.url], tiny_dir, folder, steps=5, max_staleness=staleness, zero_variance="keep") as trainer,
        ):
            trainer.run()
        orders.append([(r["step"], r["group"], r["index"]) for r in lines(folder, "rollouts.jsonl")])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_generation_goes_on_during_the_step_only_when_staleness_allows(
    tiny_dir: Path, tmp_path: Path, staleness: int
) -> None:
    """In each step the server's gate is closed until the step is over: requests must be open meanwhile."""
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, steps=3, max_staleness=staleness, zero_variance="keep") as trainer,
    ):
        inner, during = trainer.step_fn, []
        trainer.prove = lambda version: {}
        server.hold()
        loader = trainer.loader
        original = loader.next_groups

        def next_groups(count: int, timeout: float) -> list[Group]:
            first = trainer.step * 2
            wanted = {tuple(prompt_ids(first)), tuple(prompt_ids(first + 1))}
            server.wait_for(lambda s: sum(tuple(c.body["token_ids"]) in wanted for c in s.requests()) == 8)
            server.step(6, when=lambda call: tuple(call.body["token_ids"]) in wanted)
            return original(count, timeout)

        loader.next_groups = next_groups  # type: ignore[method-assign]

        def step_fn(groups: list[Group], version: int) -> dict[str, float]:
            if staleness and version + 1 < 3:
                server.wait_for(lambda s: s.open_now == 8)
            during.append(server.open_now)
            return inner(groups, version)

        step_fn.__dict__.update(loss=inner.loss, policy=inner.policy, optimizer=inner.optimizer)
        trainer.step_fn = step_fn  # type: ignore[assignment]
        trainer.run()
        assert during == ([8, 8, 0] if staleness else [0, 0, 0])


def test_every_group_equal_ends_with_a_message_that_says_of_which_kind(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, scorer=Scorer(lambda ids: 0.0), limit=6) as trainer,
        pytest.raises(NothingToLearn, match=r"6 groups in a row.*all_wrong.*No completion is right"),
    ):
        trainer.run()
    assert len(server.requests()) < 6 * 4 + 2 * 4 + 20, "a bounded number of tries"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_solved_task_is_a_good_ending_with_a_last_evaluation_and_checkpoint(
    tiny_dir: Path, tmp_path: Path, staleness: int
) -> None:
    prompts = [Prompt(-1 - i, f"held_out/{i}", "p", prompt_ids(i), {}) for i in range(2)]
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url],
            tiny_dir,
            tmp_path,
            scorer=Scorer(lambda ids: 1.0),
            limit=6,
            eval_every=1,
            checkpoint_every=10,
            max_staleness=staleness,
        ) as trainer,
    ):
        trainer.evaluator.sets = {"held_out": prompts}
        assert "the task is solved" in trainer.run()
    assert lines(tmp_path, "evals.jsonl")[-1]["step"] == lines(tmp_path)[-1]["step"] == trainer.step
    assert complete(tmp_path / "checkpoints")
    seen = lines(tmp_path, "rollouts.jsonl")
    assert {line["outcome"] for line in seen} == {"discarded:zero_variance:all_right"}, "what ended it can be read"


def test_the_run_ends_where_the_data_ends_with_a_short_last_batch(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url],
            tiny_dir,
            tmp_path,
            steps=50,
            groups=4,
            stream=Stream(size=30),
            zero_variance="keep",
            max_staleness=1,
        ) as trainer,
    ):
        assert trainer.run() == "the data ended"
    metrics = lines(tmp_path)
    assert [line["groups/trained"] for line in metrics] == [4] * 7 + [2]


def test_a_run_that_drift_stops_has_recorded_the_step_that_drifted(tiny_dir: Path, tmp_path: Path) -> None:
    loss = PPOClip(on_drift="stop", drift_ess=1.0)
    loss.drift.min_tokens = 1
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, loss=loss, max_staleness=1, lr=1e-2, checkpoint_every=10) as trainer,
    ):
        original = trainer.loader.next_groups

        def next_groups(count: int, timeout: float) -> list[Group]:
            groups = original(count, timeout)
            server.wait_for(lambda s: s.open_now == 0)  # so the second batch is of the first one's version
            return groups

        trainer.loader.next_groups = next_groups  # type: ignore[method-assign]
        with pytest.raises(DriftError, match=r"policy lag.*loss.on_drift=stop"):
            trainer.run()
        trainer.try_save()  # as run.py does
    recorded = lines(tmp_path)
    assert [line["drift"] for line in recorded] == [None, "lag"]
    assert recorded[-1]["lag_1/ess"] < 1
    assert {line["step"] for line in lines(tmp_path, "rollouts.jsonl")} == {1, 2}
    assert [folder.name for folder in complete(tmp_path / "checkpoints")] == ["step_000002"]


@pytest.mark.parametrize("call", ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"])
def test_a_sync_call_that_fails_ends_the_run_and_leaves_the_server_running(
    tiny_dir: Path, tmp_path: Path, call: str
) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, max_staleness=1) as trainer:
        server.add_fault(Fault(call, status=500, after=1, times=1))
        with pytest.raises(ServerError, match=rf"{call}.*status 500"):
            trainer.run()
        assert not server.engine.paused
        assert trainer.version <= 1
        assert server.calls.count("generate") > 0


@pytest.mark.parametrize("apply", ["nothing", "all_but_head"])
def test_a_sync_that_answers_200_and_does_not_do_it_is_detected(tiny_dir: Path, tmp_path: Path, apply: Any) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, lr=0.05, loss=GRPO(), zero_variance="keep") as trainer,
    ):
        server.add_fault(Fault("update_weights", apply=apply, after=1))
        with pytest.raises(SyncNotProven, match="logprob"):
            trainer.run()


def test_a_server_with_other_weights_gets_ours_before_the_first_rollout(tiny_dir: Path, tmp_path: Path) -> None:
    """Version 0 is sent, not assumed: the server here was started from another model."""
    other = save_tiny_model(tmp_path / "other", seed=5)
    with FakeServer(other) as server, loop([server.url], tiny_dir, tmp_path / "run") as trainer:
        trainer.run()
        calls = server.calls
    assert calls.index("finish_weight_update") < calls.index("generate")
    assert all(line["lag_0/kl"] < 1e-8 for line in lines(tmp_path / "run"))


def test_the_order_of_a_sync(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=1, verify_every=0) as trainer:
        trainer.run()
        control = [c for c in server.calls if c not in ("generate", "weight_info", "get_world_size", "health")]
    one = ["pause", "start_weight_update", "update_weights", "finish_weight_update"]
    without_reset = [c for c in control if c not in ("reset_prefix_cache", "init_weight_transfer_engine", "is_paused")]
    assert without_reset == [*one, "resume"] * 2
    assert [c.query for c in server.requests("pause")] == [{"mode": "keep", "clear_cache": "true"}] * 2


def test_two_servers_are_both_synced_and_both_used(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as one,
        FakeServer(tiny_dir) as two,
        loop([one.url, two.url], tiny_dir, tmp_path, steps=4, max_staleness=1, groups=4) as trainer,
    ):
        trainer.run()
        for server in (one, two):
            assert server.engine.version == "4"
            assert len(server.requests()) > 20
    assert all(line["kl/sampler"] < 0.2 for line in lines(tmp_path))


def test_tied_embeddings(tied_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tied_dir) as server, loop([server.url], tied_dir, tmp_path, lr=0.02) as trainer:
        trainer.run()


@pytest.mark.parametrize("minibatches", [1, 3])
def test_a_loss_with_a_reference_and_minibatches(tiny_dir: Path, tmp_path: Path, minibatches: int) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop(
            [server.url], tiny_dir, tmp_path, loss=PPOClip(kl_coefficient=0.1), minibatches=minibatches, max_staleness=1
        ) as trainer,
    ):
        trainer.run()
    assert all(line["optimizer_steps"] == minibatches for line in lines(tmp_path))


def test_a_checkpoint_is_a_model_directory_with_everything_else_beside_it(tiny_dir: Path, tmp_path: Path) -> None:
    from grpo import checkpoint
    from grpo.model import Policy

    with FakeServer(tiny_dir) as server, loop([server.url], tiny_dir, tmp_path, steps=4, checkpoint_every=2) as trainer:
        trainer.run()
        parameters = [p.detach().clone() for p in trainer.step_fn.policy.parameters()]
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_000002", "step_000004"]
    assert (folder / "latest").read_text().strip() == "step_000004"
    assert checkpoint.find(tmp_path) == folder / "step_000004"
    state = checkpoint.load(folder / "step_000004")
    assert state["progress"]["step"] == 4
    assert state["progress"]["ledger"] == trainer.ledger.accounts()
    loaded = Policy(folder / "step_000004").parameters()
    assert all(torch.equal(a, b) for a, b in zip(parameters, loaded, strict=True))
    shutil.rmtree(folder / "step_000004")
    assert checkpoint.find(tmp_path) == folder / "step_000002"
