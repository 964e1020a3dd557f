"""How busy the servers were: open requests over time. And whether the event loop that serves them kept up."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Activity:
    """Of some stretch of time. busy_s: seconds with at least one open request. open_s: integral of open requests.
    loop_lag_s: the longest that the event loop was late; by so much an answer may have been read too late."""

    requests: int = 0
    invalid: int = 0
    busy_s: float = 0.0
    open_s: float = 0.0
    loop_lag_s: float = 0.0


class Meter:
    """Counts requests as they open and close. Not thread-safe: the loader calls it under its lock."""

    def __init__(self) -> None:
        self._activity = Activity()
        self._open = 0
        self._last = time.monotonic()

    def opened(self) -> None:
        self._account()
        self._open += 1

    def closed(self) -> None:
        self._account()
        self._open -= 1
        self._activity.requests += 1

    def invalid(self) -> None:
        """An answer that cannot be used."""
        self._activity.invalid += 1

    def late(self, seconds: float) -> None:
        """The event loop came back from a sleep so much later than it was to."""
        self._activity.loop_lag_s = max(self._activity.loop_lag_s, seconds)

    def take(self) -> Activity:
        """What happened since the last call."""
        self._account()
        taken, self._activity = self._activity, Activity()
        return taken

    def _account(self) -> None:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        self._activity.open_s += elapsed * self._open
        self._activity.busy_s += elapsed * (self._open > 0)
