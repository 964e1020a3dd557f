"""SIGTERM and SIGINT: end in order. A second one ends at once.

While the run starts, the first signal raises `Interrupted` where it strikes. While it trains, it sets a flag: the step
in hand is finished, so that the checkpoint that follows is of a whole step, and the loop ends at the next look.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

LAST_WORDS = 0.5  # seconds that a second signal waits for them


class Interrupted(BaseException):
    """A signal asked the run to end. `signum` gives the exit code, 128 + signum."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


class Signals:
    """Handlers for the time of a `with` block, in the main thread. `deferred` is set while a step must not be torn.

    also: called at every `check`, and may raise what else ends the run. echo_s: seconds in which a second signal is
    taken for the first one again (torchrun hands on what every process may have got already). last_words: called with
    the signal when a second one ends the process; whatever comes of it, the process ends.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.deferred = False
        self.also: Callable[[], None] = lambda: None
        self.last_words: Callable[[int], None] = lambda signum: None
        self.echo_s = 0.0
        self._received_at = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        self.also()
        if self.received is not None:
            raise Interrupted(self.received)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() - self._received_at < self.echo_s:
                return
            try:  # in a thread: a disk that does not answer must not keep us
                thread = threading.Thread(target=self.last_words, args=(signum,), daemon=True)
                thread.start()
                thread.join(LAST_WORDS)
            finally:
                # Children end with us: their guards see the pipe close.
                os._exit(128 + signum)
        self.received, self._received_at = signum, time.monotonic()
        if not self.deferred:
            raise Interrupted(signum)
