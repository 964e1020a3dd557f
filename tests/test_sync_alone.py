"""The order of a sync without a server: who is called, who is left out, what is closed and resumed after a failure."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo.rollout.errors import ServerError, TransientError
from grpo.sync.base import WeightSync, insist

A, B = "http://a:1", "http://b:1"


class Weights:
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.zeros(3)


class FakeControl:
    """Answers as a server that works, unless a path is among `failing`; notes each call with its deadline."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = "none"
        self.calls: list[tuple[str, float]] = []
        self.failing: dict[str, Callable[[], Exception]] = {}
        self.entered: dict[str, Callable[[], None]] = {}

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        return self._call(path, timeout)

    def post(
        self, path: str, *, json: dict[str, Any] | None = None, params: dict[str, str] | None = None, timeout: float
    ) -> dict[str, Any]:
        if path == "/finish_weight_update" and json:
            self.version = json["weight_version"]
        return self._call(path, timeout)

    def _call(self, path: str, timeout: float) -> dict[str, Any]:
        self.calls.append((path, timeout))
        self.entered.get(path, lambda: None)()
        if path in self.failing:
            raise self.failing[path]()
        return {"weight_version": self.version, "success": True}

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


class FakeSync(WeightSync):
    backend = "fake"

    def __init__(self, *urls: str, timeout: float = 7.0) -> None:
        self.fakes = [FakeControl(url) for url in urls]
        controls: list[Any] = list(self.fakes)
        super().__init__(controls=controls, policy=Weights(), dtype=torch.float32, pause="keep", timeout=timeout)
        self.attached = 0
        self.phases: list[str] = []

    def attach(self) -> None:
        self.attached += 1

    def transfer(self, version: int) -> None:
        self.phases.append(self.phase)
        self.everywhere(self.start)
        self.everywhere(
            lambda c: c.post("/finish_weight_update", json={"weight_version": str(version)}, timeout=self.timeout)
        )


ORDER = ["/pause", "/start_weight_update", "/finish_weight_update", "/reset_prefix_cache", "/resume", "/weight_info"]


def gone(path: str, cause: Exception | None = None) -> Callable[[], Exception]:
    def make() -> Exception:
        error = TransientError(f"{path}: connection lost")
        error.__cause__ = cause
        return error

    return make


def test_the_order_the_deadline_and_what_is_said_meanwhile() -> None:
    sync = FakeSync(A, B)
    assert (sync.phase, sync.broken_off) == ("none", False)
    seen = []
    sync.fakes[0].entered["/pause"] = lambda: seen.append((sync.phase, sync.broken_off))
    sync.sync(4)
    for fake in sync.fakes:
        assert fake.paths() == ORDER
        assert {deadline for path, deadline in fake.calls if path != "/weight_info"} == {7.0}
    assert (seen, sync.phases) == ([("pause", True)], ["update"])
    assert (sync.phase, sync.broken_off, sync.attached) == ("none", False, 1)


def test_a_failure_is_raised_with_those_of_the_others_and_every_server_is_resumed() -> None:
    sync = FakeSync(A, B)
    for fake in sync.fakes:
        fake.failing["/start_weight_update"] = lambda url=fake.url: ServerError(f"{url} refuses")
    with pytest.raises(ServerError, match=f"{A} refuses") as caught:
        sync.sync(4)
    assert caught.value.__notes__ == [f"besides: {B} refuses"]
    for fake in sync.fakes:
        # the update is closed before requests go on; nothing is confirmed
        assert fake.paths() == ["/pause", "/start_weight_update", "/finish_weight_update", "/resume"]
    assert sync.broken_off, "what the servers hold is unknown"


def test_every_server_has_ended_its_call_before_the_failure_of_one_is_raised() -> None:
    sync = FakeSync(A, B)
    failed, ended = threading.Event(), threading.Event()

    def slow() -> None:
        assert failed.wait(60)
        ended.set()

    def fail() -> Exception:
        failed.set()
        return ServerError("no")

    sync.fakes[0].failing["/pause"] = fail
    sync.fakes[1].entered["/pause"] = slow
    with pytest.raises(ServerError, match="no"):
        sync.everywhere(lambda c: c.post("/pause", timeout=1.0))
    assert ended.is_set()


def test_a_sync_begins_again_without_a_server_that_is_gone() -> None:
    sync = FakeSync(A, B)
    sync.sync(1)
    for fake in sync.fakes:
        fake.calls.clear()
    sync.fakes[0].failing["/start_weight_update"] = gone("/start_weight_update")
    asked = []

    def lost(urls: list[str]) -> list[str]:
        asked.append(urls)
        return [A]

    sync.lost = lost
    sync.sync(2)
    assert asked == [[A, B]]
    assert sync.fakes[0].paths() == ["/pause", "/start_weight_update"], "one that is gone is not called again"
    # of the other what was begun is closed, and then everything comes once more
    first = ["/pause", "/start_weight_update", "/finish_weight_update"]
    assert sync.fakes[1].paths() == [*first, *ORDER]
    assert sync.fakes[1].version == "2"
    assert [c.url for c in sync.controls] == [B]
    assert sync.attached == 2, "another set of servers begins with the handshake"
    assert not sync.broken_off


def test_where_the_last_server_is_gone_the_failure_is_raised() -> None:
    sync = FakeSync(A)
    sync.fakes[0].failing["/pause"] = gone("/pause")
    sync.lost = lambda urls: urls
    with pytest.raises(TransientError, match="/pause: connection lost"):
        sync.sync(1)


def test_what_asking_for_the_lost_raises_comes_after_the_servers_were_resumed() -> None:
    sync = FakeSync(A)
    sync.fakes[0].failing["/start_weight_update"] = gone("/start_weight_update")

    def lost(urls: list[str]) -> list[str]:
        raise RuntimeError("started too often")

    sync.lost = lost
    with pytest.raises(RuntimeError, match="started too often") as caught:
        sync.sync(1)
    assert isinstance(caught.value.__cause__, TransientError)
    assert sync.fakes[0].paths()[-1] == "/resume"


def test_a_signal_asks_nobody_who_is_lost() -> None:
    sync = FakeSync(A)

    def interrupt() -> None:
        raise KeyboardInterrupt

    sync.fakes[0].entered["/start_weight_update"] = interrupt
    sync.lost = lambda urls: pytest.fail("asked")
    with pytest.raises(KeyboardInterrupt):
        sync.sync(1)
    assert sync.fakes[0].paths()[-1] == "/resume"


def test_one_that_cannot_be_resumed_is_said() -> None:
    sync = FakeSync(A)
    sync.fakes[0].failing = {
        "/start_weight_update": lambda: ServerError("no"),
        "/resume": lambda: ServerError("neither"),
    }
    with pytest.raises(ServerError, match="no") as caught:
        sync.sync(1)
    assert caught.value.__notes__ == ["and it could not be resumed: neither"]


@pytest.mark.parametrize(
    ("cause", "calls"),
    [
        (ConnectionResetError("reset"), 2),  # the connection broke: once more
        (None, 1),  # it was answered
        (TimeoutError(), 1),  # it was waited for
    ],
)
def test_a_call_is_made_again_only_if_its_connection_broke(cause: Exception | None, calls: int) -> None:
    made = []

    def call() -> str:
        made.append(1)
        if len(made) == 1:
            raise gone("/resume", cause)()
        return "done"

    if calls == 2:
        assert insist(call) == "done"
    else:
        with pytest.raises(TransientError):
            insist(call)
    assert len(made) == calls


def test_closing_does_not_wait_for_a_call_that_hangs() -> None:
    sync = FakeSync(A, B)
    release, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert release.wait(60)

    sync.fakes[0].entered["/pause"] = hang
    caller = threading.Thread(target=lambda: sync.everywhere(lambda c: c.post("/pause", timeout=1.0)))
    caller.start()
    assert entered.wait(60)
    closing = threading.Thread(target=sync.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    release.set()
    caller.join(60)
    assert not caller.is_alive()
