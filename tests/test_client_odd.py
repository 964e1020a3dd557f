"""The client before servers that no vLLM is, one that redirects, one whose error never ends; and how often it tries."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from fake_faults import Fault
from fake_server import FakeServer

from grpo.rollout import client as client_module
from grpo.rollout.client import Client
from grpo.rollout.errors import ServerError, ServersLost, TransientError
from grpo.types import Sampling

SAMPLING = Sampling(temperature=1.0, max_tokens=6, seed=11, stop_token_ids=(1,))


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_refused_and_named(server: FakeServer, status: int) -> None:
    class Redirects(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Location", server.url + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    async def generate(url: str) -> None:
        async with Client([url], vocab_size=57, api_key="secret") as client:
            await client.generate([3, 4], SAMPLING, request_id="r")

    named = rf"^POST http://.*/generate: status {status}: .*to {server.url}/.*rollout\.urls name the server itself"
    with serving(Redirects) as url, pytest.raises(ServerError, match=named) as refused:
        asyncio.run(generate(url))
    assert type(refused.value) is ServerError  # no reason to send it again
    assert server.calls == []


def test_an_error_whose_body_never_ends_is_shown_and_its_connection_closed() -> None:
    closed = threading.Event()

    class Endless(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.send_header("Content-Length", str(10**9))
            self.end_headers()
            self.wfile.write(b"out of order")
            if self.rfile.read(1) == b"":  # until the client goes
                closed.set()

        def log_message(self, *args: Any) -> None: ...

    async def ask(url: str) -> None:
        async with Client([url], vocab_size=57) as client:
            with pytest.raises(TransientError, match=r"GET http://.*/health: status 503: out of order"):
                await client.call(url, "GET", "/health", timeout=60)
            assert await asyncio.to_thread(closed.wait, 30), "the connection is still open"

    with serving(Endless) as url:
        asyncio.run(ask(url))


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client waited between its tries; nobody waits."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=sleep))
    return waits


def tried(server: FakeServer, times: int, retries: int, gone: int = 0) -> Client:
    """One request to a server that fails so often. gone: how many failures are a death; it is back at once."""

    async def go() -> Client:
        async with Client([server.url], vocab_size=57, retries=retries) as client:
            for call, body in (("start", {}), ("finish", {"weight_version": "0"})):
                await client.call(server.url, "POST", f"/{call}_weight_update", body=body, timeout=30)
            deaths = iter(["died"] * gone)

            async def look(url: str, patient: bool) -> str | None:
                if (why := next(deaths, None)) is not None:
                    asyncio.get_running_loop().call_soon(client.roster.readmit, url)
                return why

            client.gone = look if gone else None
            server.add_fault(Fault("generate", status=503, times=times))
            try:
                await client.generate([3, 4], SAMPLING, request_id="r")
            finally:
                assert client.roster.member(server.url).open == 0
            return client

    return asyncio.run(go())


def test_as_many_retries_as_are_allowed_and_no_more(server: FakeServer, slept: list[float]) -> None:
    assert tried(server, 2, retries=2).roster.members[0].failures == 0, "an answer clears the count"
    assert len(server.requests()) == 3
    with pytest.raises(ServersLost, match="given up after 3 tries"):
        tried(server, 3, retries=2)
    assert len(server.requests()) == 6


def test_a_death_costs_no_try(server: FakeServer, slept: list[float]) -> None:
    tried(server, 4, retries=2, gone=2)
    assert len(server.requests()) == 5


def test_waits_double_with_jitter_up_to_a_bound(server: FakeServer, slept: list[float]) -> None:
    tried(server, 9, retries=9)
    first, most = client_module.BACKOFF_FIRST, client_module.BACKOFF_MOST
    factors = [wait / min(first * 2**n, most) for n, wait in enumerate(slept)]
    assert len(factors) == 9
    assert all(0.5 <= factor <= 1.5 for factor in factors)
    assert max(factors) - min(factors) > 0.1, "no two clients in step"
