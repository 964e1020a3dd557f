"""Revival's decisions one by one, its neighbours played by the test. What they add up to: test_revival.py."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from revival_parts import REATTACH, STARTUP, A, B, Rig

from grpo.rollout.errors import ServerError, ServersLost
from grpo.rollout.revival import HEALTH_EVERY, LOOK_TIMEOUT, NOTICED, POLL
from grpo.rollout.server import ServerDied
from grpo.signals import Interrupted
from grpo.sync.verify import LogprobsDiffer, SyncNotProven

Make = Callable[..., Rig]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    def rig(**servers: Any) -> Rig:
        return Rig(**servers).play(monkeypatch)

    return rig


def once(error: Exception, before: Callable[[], Any] = lambda: None) -> Callable[..., None]:
    """Fails the first time."""
    left = [error]

    def work(*_: Any) -> None:
        if left:
            before()
            raise left.pop()

    return work


# ---- in the loader's loop: who is gone ----


def test_a_process_that_died_is_out_for_that_reason(make: Make) -> None:
    rig = make(launched=(A, B)).at(0)
    rig.world.kill(B)
    rig.loader.watch()
    assert rig.roster.live == [A]
    assert "died (signal 9)" in rig.roster.out[B]


def test_the_loop_leaves_alone_the_process_of_a_server_that_is_out(make: Make) -> None:
    """The trainer's thread may just be starting it again, for the last time."""
    rig = make(launched=(A,), restarts=0).out(A)
    rig.world.kill(A)
    rig.of.watch()
    rig.roster.readmit(A)
    with pytest.raises(ServerDied, match=r"died \(signal 9\).*\n.*rollout.restarts=0; 3 open request"):
        rig.of.watch()


@pytest.mark.parametrize(("after", "patient", "gone"), [(0, False, True), (1, False, False), (1, True, True)])
def test_a_death_may_show_a_little_after_the_failed_call(make: Make, after: int, patient: bool, gone: bool) -> None:
    """A process is looked at once where the caller tries again, and for NOTICED seconds where it has given up."""
    rig = make(launched=(A,)).at(0)
    rig.world.dead[A] = rig.world.now + after
    began = rig.world.now
    why = asyncio.run(rig.client.gone(A, patient))
    assert (why is not None) == gone
    assert rig.world.now - began == pytest.approx(after if patient else 0, abs=2 * POLL)


def test_a_process_that_lives_is_looked_at_for_a_while_and_is_there(make: Make) -> None:
    rig = make(launched=(A,)).at(0)
    began = rig.world.now
    assert asyncio.run(rig.client.gone(A, True)) is None
    assert NOTICED <= rig.world.now - began < NOTICED + 2 * POLL


@pytest.mark.parametrize(("label", "gone"), [("4", False), ("5", False), ("3", True), ("6", True), ("default", True)])
def test_an_attached_server_may_have_the_confirmed_version_or_the_announced_one(
    make: Make, label: str, gone: bool
) -> None:
    """One whose update is finished has the new number while the sync goes on with the others."""
    rig = make(attached=(A, B)).at(4)
    rig.roster.announce(5)
    rig.world.labels[A] = label
    why = asyncio.run(rig.client.gone(A, True))
    assert (why is not None) == gone
    if why is not None:
        assert f"{A}: reports weights of version {label!r}, ours is 4" in why
    assert asyncio.run(rig.client.gone(B, True)) is None


def test_an_attached_server_is_asked_for_its_health_and_then_its_version_each_with_a_deadline(make: Make) -> None:
    rig = make(attached=(A,)).at(0)
    assert asyncio.run(rig.client.gone(A, False)) is None, "a try that failed is no reason to ask"
    assert rig.world.log == []
    assert asyncio.run(rig.client.gone(A, True)) is None
    asked = [("call", A, "GET", path, LOOK_TIMEOUT) for path in ("/health", "/weight_info")]
    assert rig.world.log == asked
    rig.world.deaf.add(A)
    assert asyncio.run(rig.client.gone(A, True)) == f"{A}/health: nothing answers"


def test_before_the_first_sync_any_weights_will_do(make: Make) -> None:
    rig = make(attached=(A,))
    rig.world.labels[A] = "default"
    assert asyncio.run(rig.client.gone(A, True)) is None


def test_one_that_is_gone_and_may_not_come_back_ends_the_run(make: Make) -> None:
    rig = make(attached=(A,), launched=(B,), restarts=0).at(0)
    rig.world.deaf.add(A)
    rig.world.kill(B)
    with pytest.raises(ServersLost, match=r"nothing answers \(it may not come back: rollout.restarts=0; 3 open requ"):
        asyncio.run(rig.client.gone(A, True))
    with pytest.raises(ServerDied, match=r"may not come back: rollout.restarts=0"):
        asyncio.run(rig.client.gone(B, False))


# ---- in the trainer's thread: started again, waited for ----


def test_nothing_is_tended_before_the_first_sync(make: Make) -> None:
    """There is no version yet that a server could come back with."""
    rig = make(launched=(A,)).out(A)
    for _ in range(2):
        rig.loader.tend()
    assert rig.world.log == []


def test_one_that_is_out_is_started_synced_proven_and_only_then_in(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The order is the law: no request before the current weights are sent and proven."""
    rig = make(launched=(A,)).at(3).out(A, "died (signal 9)\nand more")
    rig.world.kill(A)
    inside: list[Any] = []
    rig.weights.work = lambda: inside.append((rig.roster.live, rig.roster.announced))
    rig.proof = lambda urls: inside.append((rig.roster.live, rig.roster.confirmed))
    rig.loader.tend()
    assert rig.world.log == [("stop", A), ("launch", A)]
    rig.world.now += 7.0
    rig.loader.tend()
    after = [("check", A), ("health", A), ("ready", A), ("reattach",), ("sync", 3, [A]), ("prove", 3, [A])]
    assert rig.world.log[2:] == after
    assert inside == [([], 3), ([], 3)]
    assert rig.roster.live == [A]
    assert rig.told == [{A: "died (signal 9)\nand more"}, {}]
    first, last = (record.getMessage() for record in caplog.records)
    assert first == f"{A}: out (died (signal 9)); started again (rollout.restarts, 1 of 2)"
    assert last == f"{A}: in again after 7.0 s, with version 3"
    # gone once more: everything from the beginning
    rig.out(A, "again")
    rig.loader.tend()
    assert rig.world.log[8:] == [("stop", A), ("launch", A)]
    assert rig.of.starts[A] == 2


def test_one_that_comes_back_is_synced_together_with_those_that_are_in(make: Make) -> None:
    """So the label and the caches of all are of one moment."""
    rig = make(launched=(A, B)).at(3).out(B)
    rig.loader.tend()
    rig.world.now += HEALTH_EVERY
    rig.loader.tend()
    assert rig.world.done("sync", "prove") == [("sync", 3, [A, B]), ("prove", 3, [B])]
    assert rig.roster.live == [A, B]


def test_while_others_work_a_look_is_taken_now_and_then_only(make: Make) -> None:
    rig = make(launched=(A, B)).at(0)
    rig.loader.tend()  # nothing is out: this is no look, and the next one need not wait
    rig.out(B)
    rig.loader.tend()
    assert rig.world.done("launch") == [("launch", B)]
    rig.world.deaf.add(B)
    for _ in range(100):
        rig.world.now += HEALTH_EVERY / 10
        rig.loader.tend()
    assert 9 <= len(rig.world.done("health")) <= 11


def test_where_none_is_left_every_look_counts(make: Make) -> None:
    rig = make(launched=(A,)).at(0).out(A)
    rig.loader.tend()
    rig.world.deaf.add(A)
    for _ in range(5):
        rig.loader.tend()
    assert len(rig.world.done("health")) == 5


@pytest.mark.parametrize("launched", [True, False])
def test_one_that_stays_away_ends_the_run_by_its_own_deadline(make: Make, launched: bool) -> None:
    kind, key, limit = ("launched", "startup", STARTUP) if launched else ("attached", "reattach", REATTACH)
    rig = make(**{kind: (A,)}).at(0).out(A, "the socket broke")
    rig.loader.tend()
    assert rig.told == [{A: "the socket broke"}]
    rig.world.deaf.add(A)
    rig.world.now += limit
    rig.loader.tend()
    rig.world.now += 1.0
    lost = rf"{A} did not come back within rollout.{key}_timeout={limit:g} s, 3 open request.*it was: the socket broke"
    with pytest.raises(ServersLost, match=lost):
        rig.loader.tend()
    assert rig.world.done("sync") == []
    assert bool(rig.world.done("launch")) == launched


def test_an_attached_server_is_waited_for_and_never_started(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make(attached=(A,)).at(2).out(A, "nothing answers")
    rig.world.deaf.add(A)
    rig.loader.tend()
    rig.loader.tend()
    message = f"{A}: out (nothing answers); waiting for it (rollout.reattach_timeout, 1 of 2)"
    assert [record.getMessage() for record in caplog.records] == [message]
    assert rig.world.done("sync") == []
    rig.world.deaf.clear()
    rig.loader.tend()
    assert rig.world.done("reattach", "sync", "prove") == [("reattach",), ("sync", 2, [A]), ("prove", 2, [A])]


def test_one_that_may_not_come_back_is_not_started(make: Make) -> None:
    """Put out by its tokens: nobody has asked yet whether it may return."""
    rig = make(launched=(A,), restarts=1).at(0).out(A)
    rig.loader.tend()
    rig.loader.tend()
    rig.out(A, "tokens of other weights")
    with pytest.raises(ServersLost, match=r"tokens of other weights \(it may not come back: rollout.restarts=1"):
        rig.loader.tend()
    assert rig.world.done("launch") == [("launch", A)]


def test_one_that_dies_while_it_starts_is_started_again_until_it_may_not(make: Make) -> None:
    """Not waited for until its deadline, and said with its own last words."""
    rig = make(launched=(A,), restarts=2).at(0).out(A, "the first death")
    rig.world.dies_at_start.add(A)
    rig.loader.tend()
    rig.loader.tend()
    assert rig.world.done("stop", "launch") == [("stop", A), ("launch", A)] * 2
    with pytest.raises(ServerDied, match=r"(?s)died \(signal 9\).*rollout.restarts=2"):
        rig.loader.tend()
    assert rig.world.done("sync", "prove", "ready") == []


def test_one_that_answers_though_its_process_died_is_somebody_else(make: Make) -> None:
    rig = make(launched=(A,)).at(0).out(A)
    rig.loader.tend()
    rig.world.dead[A] = rig.world.now
    rig.loader.tend()
    assert rig.world.done("sync") == []
    assert rig.of.starts[A] == 2


# ---- a sync ----


def test_a_sync_of_all_that_are_in(make: Make) -> None:
    rig = make(launched=(A, B)).at(0)
    announced: list[Any] = []
    rig.weights.work = lambda: announced.append((rig.roster.announced, rig.roster.confirmed))
    began = rig.world.now
    assert rig.of.sync(1) == "timings"  # type: ignore[comparison-overlap]
    assert announced == [(1, 0)], "confirmed is what every server has, announced what one may have"
    assert rig.roster.confirmed == 1
    assert rig.world.log == [("sync", 1, [A, B])], "no handshake again, nobody looked for"
    assert rig.world.now == began


def test_the_first_sync_looks_for_nobody(make: Make) -> None:
    """It tells itself whether a server is there; waiting for one that never was is preflight's."""
    rig = make(attached=(A,))
    rig.of.sync(0)
    assert rig.world.log == [("sync", 0, [A])]


def test_an_attached_server_that_was_started_again_unseen_begins_with_the_handshake(make: Make) -> None:
    rig = make(attached=(A, B)).at(4)
    rig.world.labels[B] = "default"
    rig.of.sync(5)
    assert rig.told[0].keys() == {B}
    assert rig.world.done("sync") == [("sync", 5, [A])]
    rig.world.now += HEALTH_EVERY
    rig.of.tend()
    assert ("prove", 5, [B]) in rig.world.log
    assert rig.world.log.index(("reattach",)) < rig.world.log.index(("prove", 5, [B]))
    assert rig.roster.live == [A, B]


def test_a_sync_that_a_living_server_refuses_is_an_error(make: Make) -> None:
    for back in (False, True):
        rig = make(launched=(A,)).at(0)
        if back:
            rig.out(A)
            rig.of.tend()
        rig.weights.work = once(ServerError("update_weights: status 500"))
        with pytest.raises(ServerError, match="status 500"):
            rig.of.sync(1)
        assert rig.roster.confirmed == 0


def test_a_server_that_dies_in_a_sync_is_left_out_and_comes_back_with_what_the_others_have(make: Make) -> None:
    rig = make(launched=(A, B)).at(0)
    rig.weights.work = once(ServerError("no connection"), lambda: rig.world.kill(B))
    assert rig.of.sync(1) == "timings"  # type: ignore[comparison-overlap]
    assert rig.world.done("sync") == [("sync", 1, [A, B]), ("sync", 1, [A])]
    assert rig.roster.live == [A]
    for _ in range(2):
        rig.world.now += HEALTH_EVERY
        rig.of.tend()
    assert rig.world.done("sync")[2:] == [("sync", 1, [A, B])]
    assert rig.world.done("prove") == [("prove", 1, [B])]
    assert rig.roster.live == [A, B]


def test_a_server_that_dies_in_the_sync_of_its_return_is_started_once_more(make: Make) -> None:
    rig = make(launched=(A,)).at(0).out(A)
    rig.weights.work = once(ServerError("no connection"), lambda: rig.world.kill(A))
    rig.of.sync(1)
    assert rig.world.done("launch", "sync") == [("launch", A), ("sync", 1, [A])] * 2
    assert rig.world.sleeps > 0, "a wait that does not rest takes the machine from the server that starts"
    assert rig.of.starts[A] == 2
    assert rig.roster.live == [A]


def test_one_that_dies_in_the_sync_of_its_return_is_not_let_in_with_the_others(make: Make) -> None:
    rig = make(launched=(A, B)).at(3).out(B)
    rig.of.tend()
    rig.weights.work = once(ServerError("no connection"), lambda: rig.world.kill(B))
    rig.world.now += HEALTH_EVERY
    rig.of.tend()
    assert rig.world.done("sync", "prove") == [("sync", 3, [A, B]), ("sync", 3, [A])]
    assert rig.roster.live == [A]


def test_a_sync_is_not_over_while_no_server_is_in(make: Make) -> None:
    """The only one was synced and died in its proof: a trainer that went on would wait for nobody."""
    rig = make(launched=(A,)).at(0).out(A)
    rig.proof = once(ServerError("no connection"), lambda: rig.world.kill(A))
    rig.of.sync(1)
    assert rig.world.done("launch", "sync", "prove") == [("launch", A), ("sync", 1, [A]), ("prove", 1, [A])] * 2
    assert rig.roster.live == [A]


def test_a_signal_ends_the_wait_of_a_sync_that_no_server_is_left_for(make: Make) -> None:
    for method, error in (("interrupted", Interrupted(15)), ("check", RuntimeError("a reward raised"))):
        rig = make(launched=(A,)).out(A)
        rig.world.deaf.add(A)
        setattr(rig.loader, method, once(error))
        with pytest.raises(type(error)):
            rig.of.sync(1)
        assert rig.world.done("sync") == []
        assert rig.world.sleeps == 0


# ---- a proof ----


@pytest.mark.parametrize("error", [ServerError("no connection"), SyncNotProven("labelled with versions [0]")])
def test_a_proof_goes_on_without_what_is_gone(make: Make, error: Exception) -> None:
    rig = make(launched=(A, B)).at(2)
    rig.proof = once(error, lambda: rig.world.kill(B))
    assert rig.of.prove(2) == {"sync/probe_max": 0.0}
    assert rig.world.done("prove") == [("prove", 2, [A, B]), ("prove", 2, [A])]


@pytest.mark.parametrize("error", [ServerError("status 500"), LogprobsDiffer("the logprobs are off")])
def test_a_proof_that_a_living_server_fails_ends_the_run(make: Make, error: Exception) -> None:
    rig = make(launched=(A,)).at(2)
    rig.proof = once(error)
    with pytest.raises(type(error), match=str(error)):
        rig.of.prove(2)
    assert rig.roster.live == [A]


def test_a_proof_whose_only_server_is_gone_waits_for_its_return(make: Make) -> None:
    rig = make(launched=(A,)).at(2)
    rig.proof = once(ServerError("no connection"), lambda: rig.world.kill(A))
    rig.of.prove(2)
    done = rig.world.done("launch", "sync", "prove")
    assert done == [("prove", 2, [A]), ("launch", A), ("sync", 2, [A]), ("prove", 2, [A]), ("prove", 2, [A])]


def test_the_wait_of_a_proof_ends_with_a_signal(make: Make) -> None:
    rig = make(attached=(A,)).at(2).out(A)
    rig.world.deaf.add(A)
    rig.loader.interrupted = once(Interrupted(15))
    with pytest.raises(Interrupted):
        rig.of.prove(2)


@pytest.mark.parametrize("dies", [True, False])
def test_one_that_fails_the_proof_of_its_return_stays_out_if_it_is_gone_and_else_ends_the_run(
    make: Make, dies: bool
) -> None:
    rig = make(launched=(A, B)).at(2).out(B)
    rig.of.tend()
    rig.world.now += HEALTH_EVERY
    rig.proof = once(SyncNotProven("other weights"), lambda: rig.world.kill(B) if dies else None)
    if dies:
        rig.of.tend()
    else:
        with pytest.raises(SyncNotProven, match="other weights"):
            rig.of.tend()
    assert rig.roster.live == [A]


# ---- what a failed sync asks ----


def test_those_that_are_lost_are_out_and_those_that_wait_are_not_lost(make: Make) -> None:
    rig = make(attached=(A, B)).at(2).out(B)
    rig.of.tend()  # from now on B is waited for
    assert rig.weights.lost([A, B]) == []
    rig.world.deaf.add(A)
    assert rig.weights.lost([A, B]) == [A]
    assert rig.roster.out == {A: f"{A}/health: nothing answers", B: "died"}


def test_what_the_watchdog_and_the_ending_ask_is_the_syncs_own(make: Make) -> None:
    rig = make(launched=(A,))
    for phase, broken_off in (("none", False), ("update", True)):
        rig.weights.phase, rig.weights.broken_off = phase, broken_off
        assert (rig.of.phase, rig.of.broken_off) == (phase, broken_off)
