"""One worker process, seen from the run: started, called, watched, killed. Its own side is worker.py.

Never forked: a fork would inherit the run's descriptors, and locks that other threads hold.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

from grpo.rewards.base import RewardError, RewardTimeoutError
from grpo.rewards.worker import HEADER, pack

log = logging.getLogger("grpo.rewards")

T = TypeVar("T")

START_TIMEOUT = 120.0  # seconds for a worker to import what it needs, on a busy machine
PATIENCE = 10  # times its deadline that a call which only computes may take on a busy machine
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

    async def call(self, args: tuple[Any, ...], timeout: float, *, computes: bool = False) -> Any:
        """One call in one of the slots. computes: the deadline is in seconds of the worker's CPU, not of the clock."""
        if self.lost:
            raise WorkerLostError(self._how_it_ended())
        number = next(self._ids)
        answer = self._expect(number)
        try:
            self._writer.write(pack((number, args)))
            kind, value = await self._in_time(answer, timeout, computes)
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
        """Ends the process; calls that are open raise WorkerLostError."""
        await self._kill()
        self._settle_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    async def _in_time(self, answer: "asyncio.Future[T]", timeout: float, computes: bool) -> T:
        """The answer. Raises TimeoutError."""
        begin, used = time.monotonic(), self._cpu_s() if computes else 0.0
        left = timeout + self._grace
        while not (await asyncio.wait({answer}, timeout=left))[0]:
            if not computes or time.monotonic() - begin >= PATIENCE * timeout:
                raise TimeoutError
            left = timeout - (self._cpu_s() - used)
            if left <= 0:
                raise TimeoutError
            left = max(left, 0.05)
        return answer.result()

    def _cpu_s(self) -> float:
        """Seconds of CPU that the process has had; infinite when it is gone."""
        assert self._process is not None
        try:
            fields = Path("/proc", str(self._process.pid), "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return math.inf
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

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
            self._settle_all()
        finally:
            self._writer.close()

    def _settle(self, number: int, kind: str, value: Any) -> None:
        future = self._pending.get(number)  # none: the call was cancelled or late
        if future is not None and not future.done():
            future.set_result((kind, value))

    def _settle_all(self) -> None:
        for number in self._pending:
            self._settle(number, "lost", self._how_it_ended())

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
