"""A server that speaks vLLM 0.32's protocol around a tiny real model, and misbehaves on demand.

    with FakeServer(model_dir) as server:                # own thread, free port
        client(server.url)
        server.add_fault(Fault("pause", status=500, times=1))
        server.wait_for(lambda s: s.calls.count("resume") == 1, timeout=10)

    with FakeServerProcess(model_dir) as server: ...     # own process, to be killed; no faults, no records
    python tests/fake_server.py --model DIR --port N     # the same by hand; further arguments are ignored

Generation is by `fake_engine`, faults by `fake_faults`, what vLLM itself answers is in docs/server_protocol.md.

Everything public may be called from any thread. Time: tokens come as fast as they are computed, or at
`tokens_per_second` per request, or by hand: after `hold()` no request computes a token until `step()` or `release()`.
"""

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

from aiohttp import web
from fake_engine import Engine
from fake_faults import Call, Fault
from fake_refusals import Reply, error, invalid
from fake_vllm import ROUTES, VLLM


class FakeServer:
    """The server in a thread of this process. Use as a context manager."""

    def __init__(
        self,
        model_dir: Path,
        *,
        port: int = 0,
        tokens_per_second: float | None = None,
        max_model_len: int | None = None,
        logprobs_mode: str = "processed_logprobs",
        sampling_defaults: dict[str, Any] | None = None,
        keepalive: float = 5.0,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        """sampling_defaults: in force for a parameter that a request does not name, as a generation_config.json is.

        logprobs_mode="raw_logprobs" is a server started without the flag: logprobs without temperature.
        keepalive: seconds after which an idle connection is closed (vLLM's own).
        """
        self._engine_options: dict[str, Any] = {
            "max_model_len": max_model_len,
            "logprobs_mode": logprobs_mode,
            "sampling_defaults": sampling_defaults or {},
            "tokens_per_second": tokens_per_second,
        }
        self.model_dir = Path(model_dir)
        self.port = port
        self.records: list[Call] = []
        self.most_open = 0
        self.alive = False
        self._allowed = math.inf
        self._keepalive = keepalive
        self._on_death = on_death
        self._faults: list[Fault] = []
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._failure: BaseException | None = None

    # What happened

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def calls(self) -> list[str]:
        """Names of all calls in the order in which they arrived."""
        return [call.name for call in self.requests(None)]

    def requests(self, name: str | None = "generate") -> list[Call]:
        """The recorded calls of one name (None: of every name)."""
        with self._changed:
            return [call for call in self.records if name in (None, call.name)]

    @property
    def open_now(self) -> int:
        """Generate requests that have arrived and have no answer yet."""
        return sum(call.open for call in self.requests())

    def wait_for(self, predicate: Callable[["FakeServer"], bool], timeout: float = 90.0) -> None:
        """Return as soon as the predicate holds; TimeoutError with the calls so far if it does not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: predicate(self) or not self._thread.is_alive(), timeout):
                raise TimeoutError(f"not reached in {timeout} s; open: {self.open_now}; calls: {self.calls}")
            if not predicate(self):
                raise RuntimeError("the fake server ended") from self._failure

    # What goes wrong

    def add_fault(self, fault: Fault) -> Fault:
        with self._changed:
            self._faults.append(fault)
        return fault

    def clear_faults(self) -> None:
        """No fault from here on; calls that hang go on."""
        with self._changed:
            self._faults.clear()
        self._call(self.engine.notify)

    def die(self) -> None:
        """Stop listening and break every connection, as a killed process does."""
        self._call(self._die)

    def restart(self) -> None:
        """Listen again, on the same port, with base weights and the version of a fresh start."""
        assert not self.alive, "it listens already"
        self._call(self.engine.reset)
        self._call(self._listen)

    # When tokens come

    def hold(self) -> None:
        """From now on no request computes a token, those that arrive later included."""
        self._call(lambda: self._allow(0))

    def step(self, tokens: int = 1, when: Callable[[Call], bool] = lambda call: True) -> None:
        """Let each open held request that matches compute this many tokens; does not wait for them (`wait_for`)."""

        def allow() -> None:
            for call in self.requests():
                if call.open and when(call):
                    call.allowed += tokens
            self.engine.notify()

        self._call(allow)

    def release(self) -> None:
        """End of `hold`: everything runs freely."""
        self._call(lambda: self._allow(math.inf))

    def _allow(self, tokens: float) -> None:
        self._allowed = tokens
        for call in self.requests():
            call.allowed = tokens + max((len(s.token_ids) for s in call.sequences), default=0)
        self.engine.notify()

    # The thread

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for(lambda s: s.alive, timeout=60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "the fake server's thread does not end"
        if self._failure is not None and value is None:
            raise RuntimeError("a bug in the fake server, or in a fault's edit") from self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as problem:
            self._failure = problem  # raised by whoever waits
        finally:
            self._notify()

    async def _main(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self.engine = Engine(self.model_dir, changed=self._notify, **self._engine_options)
        self.vllm = VLLM(self.engine, str(self.model_dir))
        await self._listen()
        await self._closing.wait()
        await self._die()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**28)
        for name, route in ROUTES.items():
            method, path = route.split()
            app.router.add_route(method, path, self._handler(name))
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=self._keepalive, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024).start()
        self.port = self._runner.addresses[0][1]
        self.alive = True
        self._notify()

    async def _die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()
        self._notify()

    def _call(self, function: Callable[[], Any]) -> None:
        """Run a function or coroutine function on the server's loop and wait for it."""

        async def run() -> None:
            result = function()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=60)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # One call

    def _handler(self, name: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            text = await request.text()
            with self._changed:
                body, refusal = _parse(text)
                call = Call(
                    name, len(self.records), time.monotonic(), dict(request.query), body, request.headers, self._allowed
                )
                self.records.append(call)
                self.most_open = max(self.most_open, self.open_now)
                fault = next((f for f in self._faults if f.take(call)), None) or Fault(name)
            self._notify()
            try:
                return await self._answer(call, fault, refusal, request)
            except Exception as problem:
                self._failure = problem
                raise
            finally:
                call.open = False
                self._notify()

        return handle

    async def _answer(
        self, call: Call, fault: Fault, refusal: Reply | None, request: web.Request
    ) -> web.StreamResponse:
        await asyncio.sleep(fault.delay)
        work = getattr(self.vllm, call.name)
        reply: Reply | None = await work(call, fault.apply) if fault.late else None
        if fault.hang:
            await self.engine.until(lambda: fault not in self._faults)
        if fault.die:
            if self._on_death:
                self._on_death()
            self._dying = asyncio.create_task(self._die())
            await asyncio.Event().wait()  # until that cancels this very call
        if fault.drop:
            return self._hang_up(request)
        if fault.status is not None:
            reply = error("a fault that a test asked for", fault.status)
        status, answer = refusal or reply or await work(call, fault.apply)
        if fault.edit is not None and answer is not None and status == 200:
            fault.edit(answer)
        payload = fault.raw if fault.raw is not None else b"" if answer is None else json.dumps(answer).encode()
        call.status = status
        if fault.cut is None:
            return web.Response(status=status, body=payload, content_type="application/json")
        response = web.StreamResponse(status=status, headers={"Content-Length": str(len(payload))})
        await response.prepare(request)
        await response.write(payload[: int(len(payload) * fault.cut)])
        return self._hang_up(request)

    def _hang_up(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def _parse(text: str) -> tuple[dict[str, Any], Reply | None]:
    try:
        body = json.loads(text) if text else {}
    except json.JSONDecodeError as problem:
        return {}, invalid("body", f"JSON decode error: {problem}")
    return (body, None) if isinstance(body, dict) else ({}, invalid("body", "Input should be a valid dictionary"))


class FakeServerProcess:
    """The same server in a process of its own, for tests that kill it or start it again."""

    def __init__(self, model_dir: Path, *, port: int = 0, arguments: tuple[str, ...] = ()) -> None:
        self._command = [sys.executable, __file__, "--model", str(model_dir), *arguments]
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [*self._command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())  # printed once it listens
        with urlopen(f"{self.url}/health", timeout=10):
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-second", type=float)
    arguments, _ = parser.parse_known_args()
    server = FakeServer(
        arguments.model,
        port=arguments.port,
        tokens_per_second=arguments.tokens_per_second,
        on_death=lambda: os._exit(1),
    )
    with server:
        print(server.port, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
