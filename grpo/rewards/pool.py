"""Worker processes that call one function for us, each call with a deadline that kills.

| what a call does | what follows |
| --- | --- |
| returns | its value |
| raises (SystemExit too) | RewardError with its traceback |
| is late | RewardTimeoutError; a plain function's worker is killed and replaced, a coroutine is cancelled |
| ends the process, or blocks its event loop | RewardError, RewardTimeoutError; the worker is replaced |

Calls that shared a worker with one that ended it run again, each in a worker of its own: so the one at fault is found
and no other suffers.

Everything here runs in one event loop (`side.py`). Workers are started as calls need them, never forked: a fork would
inherit descriptors and locks of the run. The deadline counts from when a worker takes the call, so a queue costs no one
their time.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from grpo.rewards.base import RewardError, RewardTimeoutError
from grpo.rewards.worker import HEADER, pack

log = logging.getLogger("grpo.rewards")

START_TIMEOUT = 120.0  # seconds for a worker to import what it needs, on a busy machine
GRACE = 1.0  # seconds beyond a coroutine's deadline before its worker counts as blocked
PRINTED = 200  # lines that a worker may print into the log
READY = -1  # the number of the answer to "load"
ENVIRONMENT = {
    "PYTHONIOENCODING": "utf-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # else numpy alone reserves gigabytes of address space
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",  # the GPU belongs to the run
}


class WorkerLostError(RewardError):
    """The worker ended during the call."""


@dataclass(slots=True)
class Pool:
    """`target` is `module:factory`; the function that factory(**options) returns in a worker is what `call` calls.

    workers: processes at most. slots: calls at once in each, for a coroutine (a plain function has one).
    timeout: seconds per call. memory_gb: address space of each worker, None for no limit.
    """

    name: str
    target: str
    options: dict[str, Any]
    workers: int
    timeout: float
    memory_gb: float | None = None
    slots: int = 64
    _live: list["Worker"] = field(default_factory=list)
    _first: "asyncio.Task[Worker] | None" = None
    _places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    _alone: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(4))

    def start(self) -> None:
        """Start the first worker, without waiting for it."""
        if self._first is None:
            self._first = asyncio.create_task(self._start_first())

    async def ready(self) -> None:
        """Wait for the first worker. Raises RewardError when the function cannot be loaded."""
        self.start()
        assert self._first is not None
        await asyncio.shield(self._first)

    async def call(self, *args: Any, timeout: float | None = None) -> Any:
        """The function's value. Raises RewardError for whatever went wrong."""
        await self.ready()
        async with self._places:
            worker = await self._take_worker()
            try:
                return await worker.call(args, timeout or self.timeout)
            except WorkerLostError:
                if worker.slots == 1:
                    raise
            finally:
                worker.taken -= 1
                self._live = [w for w in self._live if not w.lost]
        async with self._alone:
            worker = await self._spawn(Worker(self.name), slots=1)
            try:
                return await worker.call(args, timeout or self.timeout)
            finally:
                await worker.close()

    async def close(self) -> None:
        """Kill every worker."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await asyncio.gather(*(w.close() for w in self._live))
        self._live.clear()

    async def _start_first(self) -> "Worker":
        worker = await self._spawn(Worker(self.name), self.slots)
        self._live.append(worker)
        for _ in range(self.workers * worker.slots):
            self._places.release()
        return worker

    async def _take_worker(self) -> "Worker":
        """A worker with a free slot, the least busy one. `_places` admits as many calls as there can be slots."""
        free = [w for w in self._live if w.taken < w.slots]
        worker = min(free, key=lambda w: w.taken) if free else Worker(self.name)
        worker.taken += 1
        if not free:
            self._live.append(worker)  # before it has started, so that no other call takes its place
            try:
                await self._spawn(worker, self.slots)
            except BaseException:
                self._live.remove(worker)
                raise
        return worker

    async def _spawn(self, worker: "Worker", slots: int) -> "Worker":
        try:
            await worker.start(("load", self.target, self.options, self.memory_gb, self.timeout), slots)
        except BaseException:
            await worker.close()
            raise
        return worker


class Worker:
    """One process. `taken`: calls that it has now, of `slots`. `lost`: it is gone, or going."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.slots = 1
        self.taken = 0
        self.lost = False
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, asyncio.Future[tuple[str, Any]]] = {}
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, request: tuple[Any, ...], slots: int) -> None:
        """Returns when the worker has loaded its function. Raises RewardError when it cannot."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (milliseconds, and this loop has no requests)
                [sys.executable, "-m", "grpo.rewards.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that what it starts is killed with it
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        ready = self._expect(READY)
        self._tasks = [asyncio.create_task(self._read(reader)), asyncio.create_task(self._log_prints())]
        self._writer.write(pack(request))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                kind, value = await ready
        except TimeoutError:
            raise RewardTimeoutError(f"its worker did not start within {START_TIMEOUT:g} s (a slow import?)") from None
        finally:
            del self._pending[READY]
        if kind != "ready":
            raise RewardError(value)
        self._grace = GRACE if value == "coroutine" else 0.0
        self.slots = slots if value == "coroutine" else 1

    async def call(self, args: tuple[Any, ...], timeout: float) -> Any:
        """One call in one of the slots."""
        if self.lost:
            raise WorkerLostError(self._how_it_ended())
        number = next(self._ids)
        answer = self._expect(number)
        try:
            self._writer.write(pack((number, args)))
            async with asyncio.timeout(timeout + self._grace):
                kind, value = await answer
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise RewardError(f"a column cannot be sent to a worker: {error}") from error
        except TimeoutError:
            await self._kill()
            raise (WorkerLostError if self.slots > 1 else RewardTimeoutError)(
                f"no answer within {timeout:g} s"
            ) from None
        except asyncio.CancelledError:
            if self.slots == 1:
                await self._kill()  # nobody wants its answer, and it may go on for ever
            raise
        finally:
            del self._pending[number]
        if kind == "ok":
            return value
        if kind == "late":
            raise RewardTimeoutError(f"no answer within {timeout:g} s")
        raise (WorkerLostError if kind == "lost" else RewardError)(value)

    async def close(self) -> None:
        await self._kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def _expect(self, number: int) -> "asyncio.Future[tuple[str, Any]]":
        self._pending[number] = future = asyncio.get_running_loop().create_future()
        return future

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
                number, kind, value = pickle.loads(await reader.readexactly(size))
                self._settle(number, kind, value)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._ended(1.0)  # its socket closes a moment before it has ended
            await self._kill()
            for number in list(self._pending):
                self._settle(number, "lost", self._how_it_ended())
        finally:
            self._writer.close()

    def _settle(self, number: int, kind: str, value: Any) -> None:
        future = self._pending.get(number)  # none: the call was cancelled or late
        if future is not None and not future.done():
            future.set_result((kind, value))

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name} (a crash, or out of memory?)"
        return f"its process ended (exit code {code}); a reward must return, not exit"

    async def _ended(self, seconds: float) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.002)
        return self._process.returncode is not None

    async def _kill(self) -> None:
        """Kill the process, if it has not ended by itself, and whatever it has started."""
        self.lost = True
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not await self._ended(10.0):
            log.warning("[%s] process %d does not end", self.name, self._process.pid)

    async def _log_prints(self) -> None:
        """What the worker prints goes to the log, up to PRINTED lines; the rest is read and dropped."""
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            reader = asyncio.StreamReader()
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), pipe
            )
            count, line = 0, b""
            try:
                while data := await reader.read(2**14):
                    *lines, line = (line[-(2**14) :] + data).split(b"\n")
                    for text in lines[: max(0, PRINTED - count)]:
                        log.info("[%s] %s", self.name, text.decode(errors="replace")[:500])
                    count += len(lines)
                    if count - len(lines) < PRINTED <= count:
                        log.info("[%s] has printed %d lines; the rest is dropped", self.name, PRINTED)
            finally:
                transport.close()
