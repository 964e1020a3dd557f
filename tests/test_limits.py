"""How much may be open and for how long (CASES 5), and that nothing in the loader's loop is silent (CASES 12)."""

import asyncio
import selectors
from typing import Any

import pytest
from composed import composed
from fake_faults import Fault
from fake_server import FakeServer
from test_client import PROMPT, SAMPLING, VOCAB, sync
from test_loader import GROUP, PATIENCE, running

from grpo.rollout import client as client_module
from grpo.rollout.activity import Meter
from grpo.rollout.client import Client

SCALE = 400.0


class HastySelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None else timeout / SCALE)


class HastyLoop(asyncio.SelectorEventLoop):
    """A loop whose clock runs SCALE times as fast as ours."""

    def __init__(self) -> None:
        super().__init__(HastySelector())

    def time(self) -> float:
        return super().time() * SCALE


def test_a_generation_of_more_than_five_minutes_is_not_cut(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp would cut it after 300 s unless told otherwise; nothing but `request_timeout` may."""
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT", 1e9)
    sync(server)
    server.add_fault(Fault("generate", delay=1.0, times=1))

    async def generate() -> float:
        begin = asyncio.get_running_loop().time()
        async with Client([server.url], vocab_size=VOCAB, request_timeout=1e9, retries=0) as client:
            await client.generate(PROMPT, SAMPLING, request_id="long")
        return asyncio.get_running_loop().time() - begin

    with asyncio.Runner(loop_factory=HastyLoop) as runner:
        assert runner.run(generate()) > 300
    assert composed().rollout.request_timeout > 600, "as shipped"


def test_max_inflight_requests_are_open_at_once_and_no_more(server: FakeServer) -> None:
    server.hold()
    with running(server, per_step=200, staleness=0, max_inflight=256) as loader:
        server.wait_for(lambda s: s.open_now == 256, timeout=PATIENCE)
        loader.run(asyncio.sleep(0.1), timeout=PATIENCE)
        assert (loader.admission.open_requests, len(server.requests())) == (256, 256)
        assert loader.admission.places == 256 // GROUP
    server.release()


def test_a_version_that_goes_back_reaches_the_trainer(server: FakeServer) -> None:
    with running(server, staleness=0) as loader:
        loader.next_groups(2, timeout=PATIENCE)
        loader.publish(1)
        loader.publish(0)
        with pytest.raises(AssertionError, match="version went back from 1 to 0"):
            loader.next_groups(50, timeout=PATIENCE)


def test_a_failure_of_the_account_of_lateness_reaches_the_trainer(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the clock broke")

    server.hold()
    with running(server) as loader:
        monkeypatch.setattr(Meter, "late", broken)
        with pytest.raises(RuntimeError, match="the clock broke"):
            loader.next_groups(2, timeout=PATIENCE)
    server.release()
