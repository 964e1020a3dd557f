"""A thread with an event loop for whatever must not run in the loader's: worker processes, connections to services.

A reward that blocks here delays other rewards at worst, never an open request.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SideLoop:
    """Starts with the object, ends with `close`; `run` waits in a thread, `submit` in another loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """From another thread: wait for the result, at most `timeout` seconds (TimeoutError)."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        finally:
            future.cancel()

    async def submit(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """From another loop: await the result. Cancelling the wait cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self) -> None:
        """Ends the thread. What still runs may end by itself for a moment, then it is cancelled."""
        if not self._thread.is_alive():
            return
        self.run(self._cancel_all(), timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the rewards' thread does not end"

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=0.5)  # they have been told that their worker is gone
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
