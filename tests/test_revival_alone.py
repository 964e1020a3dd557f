"""Revival's decisions one by one, its neighbours played by the test. What they add up to: test_revival.py."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.rollout import revival as revival_module
from grpo.rollout.errors import ServerError
from grpo.rollout.revival import Revival
from grpo.rollout.roster import Roster
from grpo.rollout.server import ServerDied
from grpo.signals import Interrupted

A, B = "http://a:1", "http://b:1"


def nothing() -> None:
    pass


@dataclass
class Weights:
    """A sync that does what the test says; as the real one it asks which servers are lost when it fails."""

    work: Callable[[], None] = nothing
    used: list[list[str]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    lost: Callable[[list[str]], list[str]] = lambda urls: []

    def reattach(self) -> None:
        pass

    def use(self, urls: list[str]) -> None:
        self.used.append(urls)

    def sync(self, version: int) -> str:
        try:
            self.work()
        except ServerError:
            self.lost(self.used[-1])
            raise
        self.synced.append(version)
        return "timings"


@dataclass
class Launched:
    """A process; `check` does what the test says."""

    url: str = A
    check: Callable[[], None] = nothing
    launches: int = 0

    def stop(self) -> None:
        pass

    def launch(self) -> None:
        self.launches += 1

    def wait_ready(self, timeout: float) -> None:
        pass


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server answers /health, and nobody waits."""
    monkeypatch.setattr(revival_module, "healthy", lambda url, timeout: True)
    for name in ("POLL", "NOTICED", "HEALTH_EVERY"):
        monkeypatch.setattr(revival_module, name, 0.0)


def revival(
    *,
    launched: Launched | None = None,
    weights: Weights | None = None,
    interrupted: Callable[[], None] = nothing,
    labels: dict[str, str] | None = None,
    restarts: int = 2,
) -> Revival:
    """Of one launched server, or of the attached ones whose labels are given."""
    urls = [launched.url] if launched is not None else list(labels or {})

    async def call(url: str, method: str, path: str, *, timeout: float) -> dict[str, str]:
        return {"weight_version": (labels or {})[url]} if path == "/weight_info" else {}

    def run(work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        return asyncio.run(work)

    client: Any = SimpleNamespace(roster=Roster(urls), call=call, waiting=0)
    loader: Any = SimpleNamespace(run=run, check=nothing, interrupted=interrupted)
    servers: Any = SimpleNamespace(launched=[launched] if launched is not None else [])
    syncs: Any = weights or Weights()
    return Revival(
        servers=servers,
        client=client,
        loader=loader,
        weights=syncs,
        proof=lambda version, urls=None: {},
        restarts=restarts,
        startup_timeout=60.0,
        reattach_timeout=60.0,
    )


def died() -> None:
    raise ServerDied("died")


def test_the_loop_leaves_alone_the_process_of_a_server_that_is_out() -> None:
    """The trainer's thread may just be starting it again, for the last time."""
    server = Launched(check=died)
    of = revival(launched=server, restarts=0)
    of.roster.exclude(A, "died")
    of.watch()
    of.roster.readmit(A)
    with pytest.raises(ServerDied):
        of.watch()


def test_nothing_is_tended_before_the_first_sync() -> None:
    """There is no version yet that a server could come back with."""
    server, weights = Launched(), Weights()
    of = revival(launched=server, weights=weights)
    of.roster.exclude(A, "died")
    for _ in range(2):
        of.tend()
    assert (server.launches, weights.synced) == (0, [])
    of.roster.confirm(3)
    for _ in range(2):
        of.tend()
    assert (server.launches, weights.synced) == (1, [3])
    assert of.roster.live == [A]


def test_a_server_that_dies_in_the_sync_of_its_return_is_started_once_more() -> None:
    server, deaths = Launched(), iter([True])

    def dies() -> None:
        if next(deaths, False):
            server.check = died
            raise ServerError("no connection")

    launch = server.launch

    def live() -> None:
        launch()
        server.check = nothing

    server.launch = live  # type: ignore[method-assign]
    weights = Weights(dies)
    of = revival(launched=server, weights=weights)
    of.roster.confirm(0)
    of.roster.exclude(A, "died")
    of.sync(1)
    assert (server.launches, of.starts[A], weights.used, weights.synced) == (2, 2, [[A], [A]], [1])
    assert of.roster.live == [A]


def test_a_signal_ends_the_wait_of_a_sync_that_no_server_is_left_for() -> None:
    looks: list[int] = []

    def interrupted() -> None:
        looks.append(1)
        raise Interrupted(15)

    def absent() -> None:
        assert not looks, "the wait went on after the signal"

    weights = Weights()
    of = revival(launched=Launched(check=absent), weights=weights, interrupted=interrupted)
    of.roster.exclude(A, "died")
    with pytest.raises(Interrupted):
        of.sync(1)
    assert weights.synced == []


@pytest.mark.parametrize(("label", "gone"), [("4", False), ("5", False), ("3", True), ("6", True), ("default", True)])
def test_an_attached_server_may_have_the_confirmed_version_or_the_announced_one(label: str, gone: bool) -> None:
    """One whose update is finished has the new number while the sync goes on with the others."""
    of = revival(labels={A: label, B: "4"})
    of.roster.confirm(4)
    of.roster.announce(5)
    assert (asyncio.run(of.gone(A, True)) is not None) == gone
    assert asyncio.run(of.gone(B, True)) is None
