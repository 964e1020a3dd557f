"""The loader against the fake server: order, pacing, accounts, failures. The trainer is played by the test."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_faults import Fault, finish, missing
from fake_server import FakeServer

from grpo.ledger import Ledger
from grpo.rollout import client as client_module
from grpo.rollout.activity import Meter
from grpo.rollout.admission import Admission
from grpo.rollout.client import Client
from grpo.rollout.errors import InvalidAnswer, ServersLost
from grpo.rollout.loader import INVALID_IN_A_ROW, Loader, StreamEnded
from grpo.types import Completion, Group, Prompt, Sampling

GROUP = 2
PATIENCE = 60.0  # seconds; a test that needs them has failed, or the machine is busy


class Numbered:
    """A stream whose prompt says its index. `size` None: endless."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size

    def prompt(self, index: int) -> Prompt | None:
        if self.size is not None and index >= self.size:
            return None
        return Prompt(index, f"row/{index}", f"p{index}", [2 + index % 40, 3 + index // 40, 9], {})


class ByLength:
    """Scores a completion by its length."""

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        completion.reward = float(len(completion.token_ids))


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


def label(server: FakeServer, loader: Loader, version: int) -> None:
    """What a weight sync leaves behind on the server, without weights."""

    async def go() -> None:
        await loader.client.call(server.url, "POST", "/start_weight_update", timeout=PATIENCE)
        await loader.client.call(
            server.url, "POST", "/finish_weight_update", body={"weight_version": str(version)}, timeout=PATIENCE
        )

    loader.run(go(), 20)


@contextmanager
def running(
    server: FakeServer,
    *,
    size: int | None = None,
    per_step: int = 2,
    staleness: int = 1,
    steps: int = 100,
    max_inflight: int = 64,
    retries: int = 2,
    start_group: int = 0,
    version: int = 0,
    places: int = 0,
    **options: Any,
) -> Iterator[Loader]:
    loader = Loader(
        source=Numbered(size),
        client=Client([server.url], vocab_size=57, request_timeout=PATIENCE, retries=retries),
        scorer=options.pop("scorer", ByLength()),
        admission=Admission(
            groups_per_step=per_step,
            max_staleness=staleness,
            max_inflight=max_inflight,
            total_groups=steps * per_step,
            version=version,
            places=places,
        ),
        ledger=Ledger(),
        sampling=Sampling(1.0, 4, None, (), (1,)),
        group_size=GROUP,
        seed=0,
        start_group=start_group,
        decode=lambda ids: " ".join(map(str, ids)),
        **options,
    )
    try:
        loader.start()
        label(server, loader, version)
        loader.publish(version)
        yield loader
    finally:
        loader.close()


def indices(groups: list[Group]) -> list[int]:
    return [g.index for g in groups]


def settle(loader: Loader, groups: list[Group]) -> None:
    for g in groups:
        for c in g.completions:
            loader.ledger.settle_completion(c, f"discarded:{g.discarded}" if g.discarded else "trained")


def test_groups_come_in_stream_order_however_they_finish(server: FakeServer) -> None:
    server.hold()
    with running(server) as loader:
        server.wait_for(lambda s: s.open_now == 4 * GROUP)
        first = loader.source.prompt(0)
        assert first is not None
        # everything but group 0 finishes; nothing can be delivered
        server.step(4, when=lambda call: call.body["token_ids"] != first.token_ids)
        server.wait_for(lambda s: s.open_now == GROUP)
        with pytest.raises(TimeoutError, match="next in order is group 0"):
            loader.next_groups(2, timeout=0.2)
        server.release()
        assert indices(loader.next_groups(2, timeout=PATIENCE)) == [0, 1]
        assert indices(loader.next_groups(2, timeout=PATIENCE)) == [2, 3]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_more_groups_start_than_the_version_allows(server: FakeServer, staleness: int) -> None:
    with running(server, staleness=staleness) as loader:
        for version in range(4):
            allowed = (version + 1 + staleness) * 2 * GROUP
            server.wait_for(lambda s, n=allowed: len(s.requests()) == n and s.open_now == 0)
            loader.next_groups(2, timeout=PATIENCE)
            assert len(server.requests()) == allowed, "consuming alone must admit nothing"
            label(server, loader, version + 1)
            loader.publish(version + 1)


def test_a_slow_sampler_and_a_fast_trainer_keep_the_bound(server: FakeServer) -> None:
    for staleness in (0, 1, 4):
        with running(server, staleness=staleness) as loader:
            lags = []
            for version in range(6):
                groups = loader.next_groups(2, timeout=PATIENCE)
                lags += [version - c.version_first for g in groups for c in g.completions]
                label(server, loader, version + 1)
                loader.publish(version + 1)
            assert max(lags) <= staleness
            assert min(lags) >= 0


def test_a_resumed_stream_keeps_the_bound_at_a_high_version(server: FakeServer) -> None:
    with running(server, staleness=1, version=50, start_group=105, places=100) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        assert indices(groups) == [105, 106]
        assert {v for g in groups for c in g.completions for v in c.versions} == {50}
        server.wait_for(lambda s: s.open_now == 0 and len(s.requests()) == 4 * GROUP)


def test_a_discarded_group_comes_along_and_another_prompt_takes_its_place(server: FakeServer) -> None:
    def judge(group: Group) -> str | None:
        return "zero_variance:other" if group.index in (0, 2) else None

    with running(server, staleness=0, judge=judge) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        assert indices(groups) == [0, 1, 2, 3]
        assert [g.discarded for g in groups] == ["zero_variance:other", None, "zero_variance:other", None]
        assert len(server.requests()) == 4 * GROUP
        settle(loader, groups)
        held, totals = loader.balance()
        assert held == totals["in_flight"] == 0
        assert totals["discarded"] == sum(len(c.token_ids) for g in groups if g.discarded for c in g.completions)


def test_the_ledger_balances_at_every_moment(server: FakeServer) -> None:
    server.hold()
    with running(server, staleness=1) as loader:
        for _ in range(4):
            server.step(1)
            held, totals = loader.balance()
            assert held == totals["in_flight"]
        server.release()
        groups = loader.next_groups(2, timeout=PATIENCE)
        settle(loader, groups)
        server.wait_for(lambda s: s.open_now == 0)
        held, totals = loader.balance()
        assert held == totals["in_flight"] == totals["generated"] - totals["trained"]
        assert totals["trained"] == sum(len(c.token_ids) for g in groups for c in g.completions)


def test_the_stream_ends_with_a_short_batch_then_stops(server: FakeServer) -> None:
    with running(server, size=3, per_step=2, staleness=4) as loader:
        assert indices(loader.next_groups(2, timeout=PATIENCE)) == [0, 1]
        assert indices(loader.next_groups(2, timeout=PATIENCE)) == [2]
        with pytest.raises(StreamEnded):
            loader.next_groups(2, timeout=PATIENCE)


def test_a_refused_prompt_is_left_out_and_counted_and_not_sent_again(server: FakeServer) -> None:
    refused = Numbered().prompt(1)
    assert refused is not None
    server.add_fault(Fault("generate", status=400, when=lambda call: call.body["token_ids"] == refused.token_ids))
    with running(server, staleness=0) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        assert indices(groups) == [0, 1, 2]
        assert groups[1].discarded == "refused"
        assert sum(c.body["token_ids"] == refused.token_ids for c in server.requests()) == GROUP


def test_an_unusable_answer_is_discarded_by_reason_and_its_siblings_stay(server: FakeServer) -> None:
    server.add_fault(Fault("generate", edit=missing("logprobs"), times=1))
    with running(server, staleness=0) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        assert sorted(len(g.completions) for g in groups) == [1, 2]
        assert loader.ledger.accounts()["discarded:invalid:logprobs:missing"] > 0
        settle(loader, groups)
        held, totals = loader.balance()
        assert held == totals["in_flight"] == 0


def test_unusable_answers_in_a_row_stop_the_run_and_name_the_field(server: FakeServer) -> None:
    server.add_fault(Fault("generate", edit=missing("weight_versions")))
    with (
        running(server, staleness=4) as loader,
        pytest.raises(InvalidAnswer, match=rf"^{INVALID_IN_A_ROW} .*weight_vers.*VLLM_SERVER_DEV"),
    ):
        loader.next_groups(2, timeout=PATIENCE)


def test_an_aborted_generation_is_sampled_again_and_trained_once(server: FakeServer) -> None:
    server.add_fault(Fault("generate", edit=finish("abort"), times=3))
    with running(server, staleness=0) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        assert [len(g.completions) for g in groups] == [GROUP, GROUP]
        assert {c.finish_reason for g in groups for c in g.completions} <= {"stop", "length"}
        assert loader.client.retried == 3


def test_a_server_that_stays_down_ends_the_wait_with_its_address(server: FakeServer) -> None:
    with running(server, staleness=0) as loader:
        loader.next_groups(2, timeout=PATIENCE)
        server.die()
        loader.publish(1)
        with pytest.raises(ServersLost, match=rf"{2 * GROUP} open request\(s\) lost.*{server.port}"):
            loader.next_groups(2, timeout=PATIENCE)


class Failing:
    """A reward that raises for one group."""

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        completion.reward = 1.0
        if completion.group == 1:
            raise RuntimeError("the verifier broke")


def test_an_exception_in_a_reward_reaches_the_trainer_with_its_own_traceback(server: FakeServer) -> None:
    with running(server, scorer=Failing()) as loader:
        with pytest.raises(RuntimeError, match="the verifier broke") as caught:
            loader.next_groups(2, timeout=PATIENCE)
        assert any(entry.name == "score" for entry in caught.traceback)


class FirstFails:
    """A reward that raises for a group's first completion, while the group's others are being scored."""

    async def score(self, prompt: Prompt, completion: Completion) -> None:
        if completion.index == 0:
            raise RuntimeError("the verifier broke")
        await asyncio.sleep(60)


def test_the_end_leaves_no_task_behind_in_the_loop(server: FakeServer) -> None:
    """A group that failed no longer waits for its other completions; the loop's end has to."""
    with running(server, scorer=FirstFails()) as loader, pytest.raises(RuntimeError, match="the verifier broke"):
        loader.next_groups(2, timeout=PATIENCE)
    assert asyncio.all_tasks(loader._loop) == set()


def test_an_account_of_lateness_is_the_longest_and_begins_anew() -> None:
    meter = Meter()
    for seconds in (0.1, 2.0, 0.3):
        meter.late(seconds)
    assert [meter.take().loop_lag_s, meter.take().loop_lag_s] == [2.0, 0.0]


def test_the_account_tells_that_the_event_loop_was_held_up(server: FakeServer) -> None:
    with running(server, staleness=0) as loader:
        loader.next_groups(2, timeout=PATIENCE)
        loader.take_activity()
        loader._loop.call_soon_threadsafe(time.sleep, 0.4)
        loader.run(asyncio.sleep(0.1), timeout=PATIENCE)
        assert loader.take_activity().loop_lag_s > 0.3


@pytest.mark.parametrize("where", ["source", "judge", "watch", "decode"])
def test_an_exception_anywhere_in_the_loop_reaches_the_trainer(server: FakeServer, where: str) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError(f"{where} broke")

    options: dict[str, Any] = {} if where in ("source", "decode") else {where: broken}
    with pytest.raises(RuntimeError, match=f"{where} broke"), running(server, **options) as loader:  # noqa: PT012
        if where == "source":
            loader.source = type("Broken", (), {"prompt": broken})()
        if where == "decode":
            loader.decode = broken
        loader.publish(2)
        loader.next_groups(50, timeout=PATIENCE)


def test_a_failure_ends_a_wait_for_a_coroutine_too(server: FakeServer) -> None:
    with running(server, staleness=0) as loader:
        loader.next_groups(2, timeout=PATIENCE)
        server.die()
        loader.publish(1)
        with pytest.raises(ServersLost):
            loader.run(asyncio.sleep(60), timeout=60)


def test_an_interruption_ends_the_wait(server: FakeServer) -> None:
    server.hold()
    interrupt = threading.Event()

    def interrupted() -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt

    with running(server, interrupted=interrupted) as loader:
        threading.Timer(0.1, interrupt.set).start()
        with pytest.raises(KeyboardInterrupt):
            loader.next_groups(2, timeout=PATIENCE)
        server.release()


def test_completions_of_one_prompt_have_seeds_of_their_own_that_repeat_with_the_run(server: FakeServer) -> None:
    def seeds() -> list[int]:
        seen = len(server.requests())
        with running(server, staleness=0) as loader:
            loader.next_groups(2, timeout=PATIENCE)
        calls = sorted(server.requests()[seen:], key=lambda call: call.body["request_id"])
        return [call.body["sampling_params"]["seed"] for call in calls]

    first = seeds()
    assert len(set(first)) == 2 * GROUP
    assert seeds() == first


def test_a_stream_that_the_judge_ends_is_no_failure_and_nothing_follows_a_short_batch(server: FakeServer) -> None:
    """Group 2 ends it while group 1 is being scored: 0 is handed over; 1, then a version older, no more."""
    hold, third = asyncio.Event(), threading.Event()

    class Slow(ByLength):
        async def score(self, prompt: Prompt, completion: Completion) -> None:
            if completion.group == 1:
                await hold.wait()
            await super().score(prompt, completion)

    def judge(group: Group) -> str | None:
        if group.index == 2:
            third.set()
            raise StreamEnded("enough")
        return None

    with running(server, staleness=1, scorer=Slow(), judge=judge) as loader:
        assert third.wait(PATIENCE)
        assert [g.index for g in loader.next_groups(2, timeout=PATIENCE)] == [0]
        loader._loop.call_soon_threadsafe(hold.set)
        deadline = time.monotonic() + PATIENCE
        while 1 not in loader._done and time.monotonic() < deadline:
            time.sleep(0.01)
        loader.check()
        prompt = loader.source.prompt(0)
        assert prompt is not None
        assert len(loader.sample([prompt], Sampling(1.0, 4, None, (), (1,)), 2, timeout=PATIENCE)) == 1
        with pytest.raises(StreamEnded, match="enough"):
            loader.next_groups(2, timeout=PATIENCE)


def test_what_is_sampled_for_evaluation_never_enters_the_stream_or_the_ledger(server: FakeServer) -> None:
    with running(server, staleness=0) as loader:
        groups = loader.next_groups(2, timeout=PATIENCE)
        settle(loader, groups)
        before = loader.ledger.totals()
        prompts = [p for i in range(3) if (p := loader.source.prompt(i)) is not None]
        answers = loader.sample(prompts, Sampling(1.0, 4, None, (), (1,)), 2, timeout=PATIENCE)
        assert [len(g.completions) for g in answers] == [2, 2, 2]
        assert all(c.reward == len(c.token_ids) for g in answers for c in g.completions)
        assert loader.ledger.totals() == before


def test_an_answer_that_cannot_be_used_is_missing_in_an_evaluation_and_fails_a_probe(server: FakeServer) -> None:
    sampling = Sampling(1.0, 4, None, (), (1,))
    with running(server, staleness=0) as loader:
        settle(loader, loader.next_groups(2, timeout=PATIENCE))
        prompts = [p for i in range(3) if (p := loader.source.prompt(i)) is not None]
        server.add_fault(Fault("generate", edit=missing("weight_versions"), times=1))
        server.add_fault(Fault("generate", status=400, times=1))
        answers = loader.sample(prompts, sampling, 2, timeout=PATIENCE)
        assert sum(len(g.completions) for g in answers) == 4
        assert [g.prompt.row for g in answers] == [p.row for p in prompts]
        server.add_fault(Fault("generate", edit=missing("weight_versions"), times=1))
        with pytest.raises(InvalidAnswer, match="weight_vers"):
            loader.sample(prompts, sampling, 1, timeout=PATIENCE, probe=True)
        server.add_fault(Fault("generate", edit=missing("weight_versions")))
        with pytest.raises(InvalidAnswer, match="weight_vers"):
            loader.sample(prompts, sampling, 2, timeout=PATIENCE)
        server.clear_faults()


def test_closing_twice_or_with_open_requests_leaves_no_thread(server: FakeServer) -> None:
    server.hold()
    with running(server) as loader:
        server.wait_for(lambda s: s.open_now > 0)
        loader.close()
        loader.close()
        assert not any(t.name == "rollout-loader" for t in threading.enumerate())
    server.release()


def test_activity_counts_open_requests_over_time(server: FakeServer) -> None:
    server.hold()
    with running(server, staleness=0) as loader:
        server.wait_for(lambda s: s.open_now == 2 * GROUP)
        loader.take_activity()
        server.release()
        loader.next_groups(2, timeout=PATIENCE)
        activity = loader.take_activity()
        assert activity.requests == 2 * GROUP
        assert 0 < activity.busy_s <= activity.open_s
        assert loader.take_activity().busy_s == 0
