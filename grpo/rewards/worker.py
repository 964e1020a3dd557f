"""A worker process: loads one function and calls it for the run, until the run is gone.

    python -m grpo.rewards.worker <socket fd>

Protocol, pickles behind a 4-byte length. The run sends ("load", target, options, memory_gb, timeout) once, then
(id, args). The worker answers (-1, "ready", "function" or "coroutine") or (-1, "broken", traceback), then (id, "ok",
value), (id, "error", traceback) or (id, "late", ""). A plain function has one call at a time, in the main thread
(signals, sympy and most libraries expect that); coroutines share one event loop.

Deadlines of plain functions are kept by the run, which kills this process: nothing inside it could stop a loop in C.
Left out: a sandbox. A reward is the user's own code; this only keeps its accidents away from the run.
"""

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import io
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.tracebacks import own_traceback

PACKAGE = Path(__file__).parent
HEADER = struct.Struct("!I")
PR_SET_PDEATHSIG = 1


def load(target: str, options: dict[str, Any]) -> Callable[..., Any]:
    """`module:factory` called with the options gives the function to call."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)(**options)
    return function


def pack(message: Any) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def _receive(connection: socket.socket) -> Any:
    """The next message; None when the run is gone."""
    header = _exactly(connection, HEADER.size)
    body = header and _exactly(connection, HEADER.unpack(header)[0])
    return pickle.loads(body) if body else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _answer(call: int, function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, str, Any]:
    try:
        return call, "ok", function(*args)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: a reward does not end the worker
        return call, "error", own_traceback(error, PACKAGE)


async def _serve_coroutines(connection: socket.socket, function: Callable[..., Any], timeout: float) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: set[asyncio.Task[None]] = set()

    async def one(call: int, args: tuple[Any, ...]) -> None:
        try:
            async with asyncio.timeout(timeout) as deadline:
                message = (call, "ok", await function(*args))
        except BaseException as error:
            message = (call, "late", "") if deadline.expired() else (call, "error", own_traceback(error, PACKAGE))
        writer.write(pack(message))

    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
            call, args = pickle.loads(await reader.readexactly(size))
            task = asyncio.create_task(one(call, args))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    os._exit(0)


def _settle(memory_gb: float | None) -> None:
    """The process as a user's function finds it: it dies with the run, and its prints do not reach the terminal."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the closed socket ends us, if anything
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's to answer
    if memory_gb is not None:
        limit = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)  # not for the processes that a reward starts
    request = _receive(connection)
    if request is None:
        return
    _, target, options, memory_gb, timeout = request
    _settle(memory_gb)
    try:
        function = load(target, options)
    except BaseException as error:  # SystemExit too
        connection.sendall(pack((-1, "broken", own_traceback(error, PACKAGE))))
        return
    is_coroutine = inspect.iscoroutinefunction(function)
    connection.sendall(pack((-1, "ready", "coroutine" if is_coroutine else "function")))
    if is_coroutine:
        asyncio.run(_serve_coroutines(connection, function, timeout))
    while (request := _receive(connection)) is not None:
        connection.sendall(pack(_answer(request[0], function, request[1])))


if __name__ == "__main__":
    main()
