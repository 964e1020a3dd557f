"""The client before servers that no vLLM is: one that redirects, one whose error never ends."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake_server import FakeServer

from grpo.rollout.client import Client
from grpo.rollout.errors import ServerError, TransientError
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
