"""Where each side waits, when nothing moves; and every thread's stack on SIGUSR1. Neither ends or changes anything.

The deadlines of the waits themselves end a run that hangs (law 7); some of them are long, since a generation may be.
The watchdog speaks up earlier: one line of the log with what the trainer is doing, the sync's phase, open requests,
groups out of order, the rewards, the servers that are out; every thread's stack at debug level (hydra.verbose=true).
"""

import contextlib
import faulthandler
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

LOOKS = 4  # per `seconds`


class Watchdog:
    """seconds: without progress until it speaks, and again so often; 0: never. progress: anything that differs after
    progress. where: what it then says. Both are called in a thread of its own, and must not wait for a lock."""

    def __init__(self, seconds: float, *, progress: Callable[[], Any], where: Callable[[], str]) -> None:
        self.seconds = seconds
        self.progress = progress
        self.where = where
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self.seconds > 0:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _run(self) -> None:
        last, since, told = self.progress(), time.monotonic(), 0
        while not self._over.wait(self.seconds / LOOKS):
            now = self.progress()
            if now != last:
                last, since, told = now, time.monotonic(), 0
            elif time.monotonic() - since >= self.seconds * (told + 1):
                told += 1
                log.warning("no progress for %.0f s: %s", time.monotonic() - since, self.where())
                log.debug("stacks:\n%s", stacks())


def stacks() -> str:
    """Every thread's stack, as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


@contextlib.contextmanager
def stacks_on_signal(file: Path) -> Iterator[None]:
    """SIGUSR1 appends every thread's stack to this file, whatever the threads are doing (faulthandler)."""
    with file.open("a") as out:
        faulthandler.register(signal.SIGUSR1, file=out, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # one that comes late ends nothing either
