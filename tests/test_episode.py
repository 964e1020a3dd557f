"""Episodes of several turns against the fake server: ids only grow, observations are never trained, counted, booked."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_faults import Call, Fault, finish, missing
from fake_server import FakeServer
from test_loader import label, settle
from transformers import AutoModelForCausalLM

from grpo.batch import Sequence, pack
from grpo.ledger import Ledger
from grpo.losses import GSPO, Reinforce
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.rollout import client as client_module
from grpo.rollout.admission import Admission
from grpo.rollout.client import Client
from grpo.rollout.episode import EpisodeLost, Observation, Session, seeded
from grpo.rollout.loader import Loader
from grpo.step import TrainStep
from grpo.types import Completion, Group, Prompt, Sampling, Turn

GROUP = 2
SEEN = [7, 8, 9]  # an observation


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


class Scripted:
    """An environment that answers `steps` times with the same ids, and pays 1 for every answer."""

    def __init__(
        self, steps: int = 2, *, max_turns: int = 8, max_turn_tokens: int | None = 3, fails: Any = None
    ) -> None:
        self.steps = steps
        self.max_turns = max_turns
        self.max_turn_tokens = max_turn_tokens
        self.fails = fails
        self.answers: list[str] = []
        self.closed = 0

    @property
    def earned(self) -> float:
        return float(len(self.answers))

    async def step(self, answer: str, last_id: int) -> Observation | None:
        if self.fails is not None and len(self.answers) == 1:
            raise self.fails
        self.answers.append(answer)
        return Observation(SEEN, "<seen>") if len(self.answers) <= self.steps else None

    async def close(self) -> None:
        self.closed += 1


class World:
    """Makes a session for each completion, and remembers them."""

    def __init__(self, make: Callable[[], Scripted] = Scripted) -> None:
        self.make = make
        self.sessions: list[Scripted] = []

    async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
        made = [self.make() for _ in range(count)]
        self.sessions += made
        return prompt, [*made]


class Source:
    def prompt(self, index: int) -> Prompt:
        return Prompt(index, f"row/{index}", f"p{index}", [2 + index % 40, 3 + index // 40, 9], {})


class Earned:
    async def score(self, prompt: Prompt, completion: Completion) -> None:
        completion.reward = completion.earned


@contextmanager
def playing(server: FakeServer, world: Any, *, max_tokens: int = 30) -> Iterator[Loader]:
    loader = Loader(
        source=Source(),
        client=Client([server.url], vocab_size=64, request_timeout=20, retries=2),
        scorer=Earned(),
        environments=world,
        admission=Admission(groups_per_step=2, max_staleness=0, max_inflight=64, total_groups=200),
        ledger=Ledger(),
        sampling=Sampling(1.0, max_tokens, None, (), (1,)),
        group_size=GROUP,
        seed=5,
        decode=lambda ids: " ".join(map(str, ids)),
    )
    loader.start()
    try:
        label(server, loader, 0)
        loader.publish(0)
        yield loader
    finally:
        loader.close()


def stopping(answer: dict[str, Any]) -> None:
    """Every answer ends with a stop, as if its last token were one."""
    answer["choices"][0]["finish_reason"] = "stop"


@pytest.fixture
def stops(server: FakeServer) -> FakeServer:
    server.add_fault(Fault("generate", edit=stopping))
    return server


def played(loader: Loader) -> list[Completion]:
    groups = loader.next_groups(2, timeout=20)
    return [c for g in groups for c in g.completions]


def test_each_turn_sends_all_ids_so_far_and_ids_only_grow(stops: FakeServer) -> None:
    with playing(stops, World()) as loader:
        groups = loader.next_groups(2, timeout=20)
    by_id = {call.body["request_id"]: call for call in stops.requests()}
    for group in groups:
        for c in group.completions:
            sent = [by_id[f"5-{group.index}-{c.index}{turn}"] for turn in ("", "-1", "-2")]
            assert [t.by_policy for t in c.turns] == [True, False, True, False, True]
            place = 0
            for turn, call in zip(c.turns[::2], sent, strict=True):
                assert call.body["token_ids"] == group.prompt.token_ids + c.token_ids[:place]
                assert call.sequences[0].token_ids == c.token_ids[place : place + turn.tokens]
                place += turn.tokens + len(SEEN)
            assert c.text == " ".join(map(str, c.token_ids[-c.turns[-1].tokens :]))
            assert c.transcript.count("<seen>") == 2


def test_every_turn_has_a_seed_of_its_own(stops: FakeServer) -> None:
    with playing(stops, World()) as loader:
        played(loader)
    seeds = [call.body["sampling_params"]["seed"] for call in stops.requests()]
    assert len(set(seeds)) == len(seeds) == 2 * GROUP * 3
    assert {seeded(Sampling(1.0, 8, None), 5, 0, 1, turn).seed for turn in range(3)} <= set(seeds)


def test_observations_have_no_logprobs_and_are_in_no_account(stops: FakeServer) -> None:
    with playing(stops, World()) as loader:
        groups = loader.next_groups(2, timeout=20)
        for c in (c for g in groups for c in g.completions):
            assert len(c.token_ids) == c.tokens + 2 * len(SEEN)
            assert len(c.logprobs) == len(c.versions) == c.tokens == sum(c.mask)
            assert [i for i, sampled in zip(c.token_ids, c.mask, strict=True) if not sampled] == SEEN * 2
        held, totals = loader.balance()
        assert held == totals["in_flight"] - sum(c.tokens for g in groups for c in g.completions)
        sampled = sum(c.tokens for g in groups for c in g.completions)
        assert totals["generated"] == sampled == sum(len(call.sequences[0].token_ids) for call in stops.requests())
        settle(loader, groups)
        assert loader.ledger.totals()["trained"] == sampled


def test_limits_of_an_episode(server: FakeServer) -> None:
    cut = World(lambda: Scripted(max_turn_tokens=2))
    server.add_fault(Fault("generate", edit=finish("length"), times=2 * GROUP))
    with playing(server, cut) as loader:
        for c in played(loader):
            assert (c.finish_reason, len(c.turns), c.truncated, c.earned) == ("length", 1, True, 0.0)
    assert not any(s.answers for s in cut.sessions), "an answer that was cut is no action"
    server.add_fault(Fault("generate", edit=stopping))
    with playing(server, World(lambda: Scripted(steps=9, max_turns=3))) as loader:
        for c in played(loader):
            assert (c.finish_reason, sum(t.by_policy for t in c.turns), c.earned) == ("turns", 3, 3.0)
            assert c.turns[-1].by_policy, "what nobody answers is not there"
    with playing(server, World(lambda: Scripted(steps=9)), max_tokens=10) as loader:
        for c in played(loader):
            assert c.finish_reason == "length"
            assert len(c.token_ids) <= 10
            assert c.turns[-1].by_policy
    for call in server.requests():
        assert call.body["sampling_params"]["max_tokens"] <= 3


def test_one_turn_without_an_environment_is_as_before(server: FakeServer) -> None:
    with playing(server, None, max_tokens=4) as loader:
        for c in played(loader):
            assert (c.turns, c.earned) == ([], None)
            assert c.mask == [True] * len(c.token_ids)
            assert c.tokens == len(c.token_ids) == len(c.logprobs)
    assert {call.body["request_id"] for call in server.requests()} == {
        f"5-{g}-{i}" for g in range(2) for i in range(GROUP)
    }


def second_turn(call: Call) -> bool:
    return str(call.body.get("request_id", "")).count("-") == 3


@pytest.mark.parametrize(
    ("fault", "account"),
    [
        (Fault("generate", edit=missing("logprobs"), when=second_turn, times=1), "discarded:invalid:logprobs:missing"),
        (Fault("generate", status=400, when=second_turn, times=1), "discarded:refused"),
    ],
)
def test_a_later_turn_that_fails_books_the_earlier_ones(server: FakeServer, fault: Fault, account: str) -> None:
    server.add_fault(fault)
    server.add_fault(Fault("generate", edit=stopping))
    with playing(server, World()) as loader:
        groups = loader.next_groups(2, timeout=20)
        booked = loader.ledger.accounts()[account]
        assert booked > 0
        (dropped,) = (c for g in groups for c in g.dropped)
        assert (dropped.outcome, dropped.finish_reason, dropped.reward) == (account, "", None)
        assert dropped.tokens + dropped.unusable == booked, "what was booked has its line"
        assert [turn.by_policy for turn in dropped.turns] == [True, False], "the earlier turn is there to be read"
        assert dropped.tokens == len(dropped.versions) > 0
        settle(loader, groups)
        held, totals = loader.balance()
        assert held == totals["in_flight"] == 0
    assert sorted(len(g.completions) for g in groups)[0] == GROUP - 1


def test_a_dropped_episode_is_off_the_books_while_its_siblings_go_on(server: FakeServer) -> None:
    server.add_fault(Fault("generate", hang=True, when=lambda call: call.body["request_id"] == "5-0-1"))
    server.add_fault(Fault("generate", status=400, when=lambda call: call.body["request_id"] == "5-0-0-1"))
    server.add_fault(Fault("generate", edit=stopping))
    with playing(server, World()) as loader:
        deadline = time.monotonic() + 20
        while "discarded:refused" not in loader.ledger.accounts():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held, totals = loader.balance()
        assert held == totals["in_flight"]
        server.clear_faults()


def test_a_lost_episode_is_discarded_and_a_failing_environment_ends_the_run(stops: FakeServer) -> None:
    lost = iter([EpisodeLost("environment", "down")])
    world = World(lambda: Scripted(fails=next(lost, None)))
    with playing(stops, world) as loader:
        groups = loader.next_groups(2, timeout=20)
        assert sorted(len(g.completions) for g in groups) == [GROUP - 1, GROUP]
        assert loader.ledger.accounts()["discarded:environment"] > 0
    assert all(s.closed == 1 for s in world.sessions)
    with (
        playing(stops, World(lambda: Scripted(fails=RuntimeError("it broke")))) as loader,
        pytest.raises(RuntimeError, match="it broke"),
    ):
        loader.next_groups(2, timeout=20)


def test_a_lost_episode_is_missing_in_an_evaluation(stops: FakeServer) -> None:
    class Late(World):
        async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
            if prompt.index == 1:
                raise EpisodeLost("environment", "no")
            return await super().begin(prompt, count)

    with playing(stops, Late()) as loader:
        played(loader)
        world = loader.environments = Late(lambda: Scripted(fails=next(lost, None)))
        lost = iter([EpisodeLost("environment", "down")])
        prompts = [Source().prompt(i) for i in range(3)]
        answers = loader.sample(prompts, loader.sampling, GROUP, timeout=20)
        assert [len(g.completions) for g in answers] == [GROUP - 1, 0, GROUP]
        assert all(s.closed == 1 for s in world.sessions)


def test_an_environment_that_cannot_begin_hands_its_place_back(stops: FakeServer) -> None:
    class Refusing(World):
        async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
            if prompt.index == 1:
                raise EpisodeLost("environment", "no")
            return await super().begin(prompt, count)

    with playing(stops, Refusing()) as loader:
        groups = loader.next_groups(2, timeout=20)
        assert [(g.index, g.discarded) for g in groups] == [(0, None), (1, "environment"), (2, None)]
        assert loader.admission.open_requests == 0


def test_a_sync_between_two_turns_counts_from_the_oldest_token(stops: FakeServer) -> None:
    with playing(stops, World(lambda: Scripted(steps=1))) as loader:
        stops.hold()
        loader.publish(1)  # another two groups may start
        stops.wait_for(lambda s: s.open_now >= GROUP)
        stops.step(3)
        stops.wait_for(lambda s: sum(second_turn(call) for call in s.requests() if call.open) >= GROUP)
        label(stops, loader, 1)
        stops.release()
        mixed = [c for c in played(loader) if len(set(c.versions)) == 2]
        assert mixed
        assert all((c.version_first, c.version_last) == (0, 1) for c in mixed)


# ---- laws 4 and 5 with masked tokens ----


def with_turns(folder: Path, observed: list[int]) -> list[Group]:
    """Two groups of two with an observation in the middle of some; logprobs are the policy's own, off by a constant."""
    policy = Policy(folder)
    made = []
    for g in range(2):
        prompt = Prompt(g, f"r{g}", "p", [5 + g, 6, 7], {})
        completions = []
        for i in range(2):
            ids = [10 + g, 11 + i, *observed, 13, 14 + g] if (g + i) % 2 == 0 else [12, 13 + i, 14]
            turns = [Turn(True, 2, ""), Turn(False, len(observed), ""), Turn(True, 2, "")] if (g + i) % 2 == 0 else []
            c = Completion(g, i, ids, [], [], "stop", turns=turns, reward=float(i))
            mask = c.mask
            count = sum(mask)
            (mb,) = pack(
                [Sequence(prompt.token_ids, ids, [0.0] * count, [0] * count, 0.0, 0.0, mask)],
                tokens_per_microbatch=64,
                context=64,
            )
            c.logprobs = [x - 0.05 for x in policy.logprobs(mb, 1.0)[0].tolist()]
            c.versions = [0] * count
            completions.append(c)
        made.append(Group(g, prompt, completions))
    return made


def trained(folder: Path, loss: Any, groups: list[Group], budget: int) -> tuple[dict[str, float], list[torch.Tensor]]:
    policy = Policy(folder)
    ledger = Ledger()
    ledger.receive(sum(c.tokens for g in groups for c in g.completions))
    step = TrainStep(
        policy=policy,
        reference=None,
        optimizer=Optimizer(policy.parameters(), lr=1e-3, max_grad_norm=1.0),
        loss=loss,
        ledger=ledger,
        temperature=1.0,
        minibatches=1,
        tokens_per_microbatch=budget,
        reward_weights={},
    )
    metrics = step(groups, 0)
    assert ledger.totals()["in_flight"] == 0
    return metrics, [p.detach().clone() for p in policy.parameters()]


@pytest.mark.parametrize("loss", [Reinforce(aggregation="token_mean"), Reinforce(aggregation="sequence_mean"), GSPO()])
def test_splitting_a_batch_with_observations_changes_nothing(tiny_dir: Path, loss: Any) -> None:
    whole, after = trained(tiny_dir, loss, with_turns(tiny_dir, SEEN), 256)
    split, after_split = trained(tiny_dir, loss, with_turns(tiny_dir, SEEN), 1)
    assert split["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    for a, b in zip(after, after_split, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_denominators_and_diagnostics_count_sampled_tokens_only(tiny_dir: Path) -> None:
    groups = with_turns(tiny_dir, SEEN * 5)
    metrics, _ = trained(tiny_dir, Reinforce(aggregation="token_mean", advantage="mean"), groups, 256)
    tokens = [c.tokens for g in groups for c in g.completions]
    assert tokens == [4, 3, 3, 4]
    # by hand: -A * logprob summed over sampled tokens, over their number; A = -0.5, 0.5 in each group
    expected = 0.0
    for g in groups:
        for c in g.completions:
            assert c.advantage is not None
            expected -= c.advantage * sum(x + 0.05 for x in c.logprobs) / sum(tokens)
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["lag_0/tokens"] == sum(tokens)
    assert metrics["ratio/mean"] == pytest.approx(math.exp(0.05), abs=1e-4)


def test_an_observation_is_read_but_gives_no_gradient_of_its_own(tiny_dir: Path) -> None:
    """The packed arrays have a place for sampled tokens only, and predict each from the token before it."""
    prompt, ids, mask = [5, 6], [10, 11, *SEEN, 12, 13], [True, True, False, False, False, True, True]
    (mb,) = pack(
        [Sequence(prompt, ids, [-1.0, -2.0, -3.0, -4.0], [1, 1, 0, 0], 1.0, 0.25, mask)],
        tokens_per_microbatch=32,
        context=32,
    )
    assert mb.ids_T.tolist() == prompt + ids
    assert mb.targets_N.tolist() == [10, 11, 12, 13]
    assert mb.predict_N.tolist() == [1, 2, 6, 7]
    assert mb.lag_N.tolist() == [1, 1, 0, 0]
    assert mb.lengths == [4]
    policy = Policy(tiny_dir)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_dir)
        full = model(torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    expected = [float(full[p, t]) for p, t in zip(mb.predict_N.tolist(), mb.targets_N.tolist(), strict=True)]
    assert policy.logprobs(mb, 1.0)[0].tolist() == pytest.approx(expected, abs=1e-5)
