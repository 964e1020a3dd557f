"""What happens when a server is gone: it is out, started again or waited for, synced, proven, and in again.

| who | does | where |
| --- | --- | --- |
| `watch`, `gone` | notice a death, put the server out | the loader's loop: twice a second, and after a failure |
| `tend` | starts it again, waits for it, syncs and proves it, puts it in | the trainer's thread, waiting for groups |
| `sync`, `prove` | go on without what is gone; wait where nothing is left | the trainer's thread, between two steps |

The trainer's thread starts servers because a server ends with the thread that launched it. It syncs a returning server
only where the policy's parameters are those of the confirmed version: while it waits for groups or an evaluation, never
inside a step. So laws 1, 2 and 8 hold as if nothing had happened: the server gets the version that the others have, its
logprobs are compared with the trainer's, and only then it gets requests. What it had open is sampled again.

Which server is in or out is the roster's alone; the loop looks at processes of servers that are in, the trainer's
thread at those that are out. Both kinds come back `restarts` times each: one that the run launched is started again, an
attached one (`rollout.urls`) is waited for. After that, and after a deadline, the run ends with the reason.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from grpo.rollout.client import Client
from grpo.rollout.errors import ServerError, ServersLost
from grpo.rollout.loader import Loader
from grpo.rollout.server import ServerDied, Servers, healthy
from grpo.sync.base import SyncTimings, WeightSync
from grpo.sync.verify import SyncNotProven

log = logging.getLogger(__name__)

NOTICED = 2.0  # seconds in which a death shows after a failed call
POLL = 0.1
LOOK_TIMEOUT = 15.0  # seconds for a control call that tells whether a server is there
PORT_PATIENCE = 10.0  # seconds for a dead server's port, which another process may use for a moment
HEALTH_EVERY = 2.0  # seconds between looks for a server that is out, while others work


class Proof(Protocol):
    """Compares these servers' logprobs with the trainer's (law 8); None: of all that are in."""

    def __call__(self, version: int, urls: list[str] | None = None) -> dict[str, float]: ...


class Revival:
    """restarts: how often each server may come back. startup_timeout, reattach_timeout: seconds for a launched server,
    and an attached one, to do so. changed: told which servers are out, and why, whenever that changes."""

    def __init__(
        self,
        *,
        servers: Servers,
        client: Client,
        loader: Loader,
        weights: WeightSync,
        proof: Proof,
        restarts: int,
        startup_timeout: float,
        reattach_timeout: float,
        changed: Callable[[dict[str, str]], None] = lambda out: None,
    ) -> None:
        self.servers = servers
        self.client = client
        self.roster = client.roster
        self.loader = loader
        self.weights = weights
        self.proof = proof
        self.restarts = restarts
        self.startup_timeout = startup_timeout
        self.reattach_timeout = reattach_timeout
        self.changed = changed
        self.starts: Counter[str] = Counter()  # how often each server was started again, or waited for
        self._launched = {server.url: server for server in servers.launched}
        self._since: dict[str, float] = {}  # when the wait for a server that is out began
        self._looked = 0.0
        client.gone = self.gone
        weights.lost = self._lost
        loader.watch, loader.tend = self.watch, self.tend

    @property
    def phase(self) -> str:
        """Of the sync that is going on."""
        return self.weights.phase

    @property
    def broken_off(self) -> bool:
        """Whether a sync is going on, or has failed: what the servers hold is unknown."""
        return self.weights.broken_off

    # ---- in the loader's loop ----

    def watch(self) -> None:
        """A launched server that has died is out from now on. Raises ServerDied when it may not come back."""
        for url, server in self._launched.items():
            if url not in self.roster.out:
                try:
                    server.check()
                except ServerDied as death:
                    self._may_return(url, death)
                    self.roster.exclude(url, str(death))

    async def gone(self, url: str, patient: bool) -> str | None:
        """Why a server that has failed is gone; None where it is there. Raises when it may not come back."""
        try:
            if url in self._launched:
                await self._see_death(url, NOTICED if patient else 0.0)
            elif patient:
                await self._see_stranger(url)
        except ServerError as why:
            self._may_return(url, why)
            return str(why)
        return None

    async def _see_death(self, url: str, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            self._launched[url].check()
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(POLL)

    async def _see_stranger(self, url: str) -> None:
        """Raises ServerError when nothing answers there, or a server with other weights than ours."""
        await self.client.call(url, "GET", "/health", timeout=LOOK_TIMEOUT)
        if self.roster.confirmed is None:
            return
        answer = await self.client.call(url, "GET", "/weight_info", timeout=LOOK_TIMEOUT)
        label = answer.get("weight_version") if isinstance(answer, dict) else answer
        if label not in (str(self.roster.confirmed), str(self.roster.announced)):
            raise ServerError(
                f"{url}: reports weights of version {label!r}, ours is {self.roster.confirmed}: it was started again"
            )

    def _may_return(self, url: str, why: ServerError) -> None:
        if self.starts[url] >= self.restarts:
            lost = f"it may not come back: rollout.restarts={self.restarts}; {self.client.waiting} open request(s) lost"
            raise (ServerDied if isinstance(why, ServerDied) else ServersLost)(f"{why} ({lost})") from why

    # ---- in the trainer's thread ----

    def tend(self) -> None:
        """One look at what is out. Only where the policy's parameters are those of the confirmed version."""
        if self.roster.out and self.roster.confirmed is not None and (back := self._back()):
            self._send(self.roster.confirmed, [*self.roster.live, *back], back)

    def sync(self, version: int) -> SyncTimings:
        """The current weights to every server that is in or back, as `version`; at least one has confirmed it then."""
        self._look_at_attached()
        while True:
            back = self._back()
            urls = [*self.roster.live, *back]  # once: the loop may find one of them dead at any moment
            if urls and (timings := self._send(version, urls, back)) and self.roster.live:
                return timings
            self._pause()

    def prove(self, version: int) -> dict[str, float]:
        """The proof of a sync by every server that is in; one that is gone is left out."""
        while True:
            asked = self.roster.live
            try:
                if asked:
                    return self.proof(version, asked)
            except (ServerError, SyncNotProven):
                if not self._lost(asked):
                    raise
            self.tend()
            if not self.roster.live:
                self._pause()

    def _send(self, version: int, urls: list[str], back: list[str]) -> SyncTimings | None:
        """Sync these servers, prove those of them that are back, and put them in. None: all were lost meanwhile."""
        self._in_loop(lambda: self.roster.announce(version))
        if back:
            self.weights.reattach()
        self.weights.use(urls)
        try:
            timings = self.weights.sync(version)
        except ServerError:
            if all(url in self.roster.out and url not in self._since for url in urls):
                return None
            raise
        self._in_loop(lambda: self.roster.confirm(version))
        for url in [url for url in back if url in self._since]:  # the others were lost during the sync
            self._admit(url, version)
        return timings

    def _admit(self, url: str, version: int) -> None:
        try:
            self.proof(version, [url])
        except (ServerError, SyncNotProven):
            if not self._lost([url]):
                raise
            return
        self._in_loop(lambda: self.roster.readmit(url))
        log.warning("%s: in again after %.1f s, with version %d", url, time.monotonic() - self._since.pop(url), version)
        self.changed(self.roster.out)

    def _back(self) -> list[str]:
        """Start what is out, once; the servers that answer again. Raises when one takes too long, or may not return."""
        now = time.monotonic()
        if self.roster.live and now - self._looked < HEALTH_EVERY:
            return []
        self._looked = now
        back = []
        for url, why in self.roster.out.items():
            if url not in self._since:
                self._begin(url, ServerError(why))
            elif self._answers(url):
                back.append(url)
            elif time.monotonic() - self._since[url] > self._limit(url):
                raise ServersLost(
                    f"{url} did not come back within {self._key(url)}={self._limit(url):g} s, "
                    f"{self.client.waiting} open request(s) lost; it was: {why}"
                )
        return back

    def _begin(self, url: str, why: ServerError) -> None:
        self._may_return(url, why)
        self.starts[url] += 1
        count = f"{self.starts[url]} of {self.restarts}"
        reason = str(why).splitlines()[0]
        server = self._launched.get(url)
        if server is None:
            log.warning("%s: out (%s); waiting for it (%s, %s)", url, reason, self._key(url), count)
        else:
            log.warning("%s: out (%s); started again (rollout.restarts, %s)", url, reason, count)
            server.stop()
            server.launch(patience=PORT_PATIENCE)
        self._since[url] = time.monotonic()
        self.changed(self.roster.out)

    def _answers(self, url: str) -> bool:
        server = self._launched.get(url)
        if server is not None:
            try:
                server.check()
                if healthy(url, 1.0):
                    server.wait_ready(LOOK_TIMEOUT)  # from now on its engine is watched too
                    return True
            except ServerDied as death:
                self._since.pop(url)
                self._begin(url, death)
            return False
        return healthy(url, 1.0)

    def _limit(self, url: str) -> float:
        return self.startup_timeout if url in self._launched else self.reattach_timeout

    def _key(self, url: str) -> str:
        return "rollout.startup_timeout" if url in self._launched else "rollout.reattach_timeout"

    def _lost(self, urls: list[str]) -> list[str]:
        """Which of these are gone; they are out from now on. Raises when one may not come back."""

        async def look() -> list[str]:
            reasons = await asyncio.gather(*(self.gone(url, True) for url in urls))
            for url, why in zip(urls, reasons, strict=True):
                if why is not None:
                    self.roster.exclude(url, why)
                    self._since.pop(url, None)
            return [url for url in urls if url in self.roster.out and url not in self._since]

        return self.loader.run(look(), NOTICED + 3 * LOOK_TIMEOUT)

    def _look_at_attached(self) -> None:
        """An attached server that was started again unseen must begin with the handshake."""
        attached = [url for url in self.roster.live if url not in self._launched]
        if self.roster.confirmed is not None and attached:
            self._lost(attached)

    def _pause(self) -> None:
        self.loader.check()
        self.loader.interrupted()
        time.sleep(POLL)

    def _in_loop(self, change: Callable[[], None]) -> None:
        async def apply() -> None:
            change()

        self.loader.run(apply(), LOOK_TIMEOUT)
