"""Calls to a function that runs in worker processes, each call with a deadline that kills.

| what a call does | what follows |
| --- | --- |
| returns | its value |
| raises (SystemExit too) | RewardError with its traceback |
| is late | RewardTimeoutError; a plain function's worker is killed and replaced, a coroutine is cancelled |
| ends the process, or blocks its event loop | RewardError, RewardTimeoutError; the worker is replaced |

Calls that shared a worker with one that ended it run again, each in a worker of its own: so the one at fault is found
and no other suffers. Everything here runs in one event loop (side.py). The deadline counts from when a worker takes the
call, so a queue costs no one their time.
"""

import asyncio
from collections import deque
from typing import Any

from grpo.rewards.base import RewardError
from grpo.rewards.process import Worker, WorkerLostError

STARTING = 2  # workers that start at the same time: more would starve the run of its cores


class Pool:
    """`target` is `module:factory`; the function that factory(**options) returns in a worker is what `call` calls.

    workers: processes at most. slots: calls at once in each, for a coroutine (a plain function has one).
    timeout: seconds per call; of the worker's CPU where the function only computes (`computes`), so that a busy machine
    changes no verdict. memory_gb: address space of each worker, None for no limit.

    A call that finds no free slot waits in line, and starts another worker if there may be one. A worker that has
    started, or has a slot free again, takes the first in line.
    """

    def __init__(
        self,
        *,
        name: str,
        target: str,
        options: dict[str, Any],
        workers: int,
        timeout: float,
        computes: bool = False,
        memory_gb: float | None = None,
        slots: int = 64,
    ) -> None:
        self.name = name
        self.workers = workers
        self.timeout = timeout
        self.computes = computes
        self.slots = slots
        self._request = ("load", target, options, memory_gb, timeout)
        self._live: list[Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._line: deque[asyncio.Future[Worker]] = deque()
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._alone = asyncio.Semaphore(STARTING)
        self._closed = False

    def start(self) -> None:
        """Start the first worker, without waiting for it."""
        if not self._live:
            self._grow()

    async def ready(self) -> None:
        """Wait for the first worker. Raises RewardError when the function cannot be loaded."""
        self.start()
        await asyncio.shield(self._loaded)

    async def call(self, *args: Any, timeout: float | None = None) -> Any:
        """The function's value. Raises RewardError for whatever went wrong."""
        worker = await self._take()
        try:
            return await worker.call(args, timeout or self.timeout, computes=self.computes)
        except WorkerLostError:
            if worker.slots == 1:
                raise
        finally:
            self._give_back(worker)
        async with self._alone:
            worker = await self._spawn(slots=1)
            try:
                return await worker.call(args, timeout or self.timeout, computes=self.computes)
            finally:
                await worker.close()

    async def close(self) -> None:
        """Kill every worker. Calls that are open raise RewardError."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(w.close() for w in self._live))
        self._live.clear()
        self._loaded.cancel()

    async def _take(self) -> "Worker":
        """A worker with a slot for the caller, the least busy one."""
        free = [w for w in self._live if w.taken < w.slots and not w.lost]
        if free:
            worker = min(free, key=lambda w: w.taken)
            worker.taken += 1
            return worker
        turn: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        self._grow()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(turn.result())  # it came at the same moment
            raise

    def _give_back(self, worker: "Worker") -> None:
        worker.taken -= 1
        if worker.lost:
            self._live = [w for w in self._live if w is not worker]
            self._grow()
        else:
            self._serve_line(worker)

    def _serve_line(self, worker: "Worker") -> None:
        while self._line and worker.taken < worker.slots:
            turn = self._line.popleft()
            if not turn.done():
                worker.taken += 1
                turn.set_result(worker)

    def _grow(self) -> None:
        """Start one more worker, if anyone waits (or it is the first) and there may be one."""
        wanted = bool(self._line) or not self._loaded.done()
        if wanted and len(self._live) + len(self._starting) < self.workers and len(self._starting) < STARTING:
            task = asyncio.create_task(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._started_one)

    async def _start_one(self) -> None:
        try:
            worker = await self._spawn(self.slots)
        except RewardError as error:
            if not self._loaded.done():
                self._loaded.set_exception(error)
                self._loaded.exception()  # seen: not everyone asks whether we are ready
            for turn in self._line:
                if not turn.done():
                    turn.set_exception(error)
            self._line.clear()
            return
        self._live.append(worker)
        if not self._loaded.done():
            self._loaded.set_result(None)
        self._serve_line(worker)

    def _started_one(self, task: "asyncio.Task[None]") -> None:
        self._starting.discard(task)
        if not task.cancelled():
            task.result()  # nothing but RewardError is expected
            self._grow()

    async def _spawn(self, slots: int) -> "Worker":
        if self._closed:
            raise RewardError("the rewards are closed")
        worker = Worker(self.name)
        try:
            await worker.start(self._request, slots)
        except BaseException:
            await worker.close()
            raise
        return worker
