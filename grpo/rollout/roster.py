"""Which servers get requests: the one object that knows of each whether it is in or out, and which weights it may have.

A server that is out gets no request until it has been synced again (`grpo.rollout.revival`); requests that are open
there are cut and sent to another, or wait until one is in. So a death costs no request a try, and a server that came
back with the weights of its own files cannot put its tokens into a batch.

Changed in the loader's event loop only; read from any thread.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from grpo.rollout.errors import TransientError

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Member:
    """One server. out: why it gets no requests, None while it does. failures: in a row, to prefer those that answer."""

    url: str
    open: int = 0
    failures: int = 0
    out: str | None = None
    _excluded: asyncio.Event = field(default_factory=asyncio.Event)

    async def while_in(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. Raises TransientError, and cancels it, as soon as the server is out."""
        call = asyncio.ensure_future(work)
        cut = asyncio.ensure_future(self._excluded.wait())
        try:
            await asyncio.wait((call, cut), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise TransientError(f"{self.url}: cut off: {self.out}")
            return call.result()
        finally:
            call.cancel()
            cut.cancel()


class Roster:
    """confirmed: the version that every server that is in has confirmed; None before the first sync.
    announced: the newest version that a server may have, from the moment that a sync begins. returns: servers that
    were out and are in again."""

    def __init__(self, urls: list[str]) -> None:
        self.members = [Member(url.rstrip("/")) for url in urls]
        self.confirmed: int | None = None
        self.announced: int | None = None
        self.returns = 0
        self._back = asyncio.Event()

    @property
    def live(self) -> list[str]:
        return [m.url for m in self.members if m.out is None]

    @property
    def out(self) -> dict[str, str]:
        """Why, by url."""
        return {m.url: m.out for m in self.members if m.out is not None}

    def member(self, url: str) -> Member:
        return next(m for m in self.members if m.url == url)

    async def choose(self) -> Member:
        """The server with the fewest open requests. Waits while all are out: their return has a deadline of its own."""
        while not (live := [m for m in self.members if m.out is None]):
            self._back.clear()
            await self._back.wait()
        return min(live, key=lambda m: (m.failures > 0, m.open))

    def exclude(self, url: str, why: str) -> None:
        member = self.member(url)
        if member.out is None:
            member.out = why
            member._excluded.set()

    def readmit(self, url: str) -> None:
        """It has confirmed the version and has been proven."""
        member = self.member(url)
        if member.out is not None:
            member.out, member.failures = None, 0
            member._excluded = asyncio.Event()
            self.returns += 1
        self._back.set()

    def announce(self, version: int) -> None:
        self.announced = version

    def confirm(self, version: int) -> None:
        self.confirmed = version

    def foreign(self, versions: list[int], floor: int | None) -> bool:
        """Whether tokens are of other weights than ours. floor: `confirmed` when the request was sent."""
        if floor is None or self.announced is None:
            return False
        return not floor <= min(versions) <= max(versions) <= self.announced
