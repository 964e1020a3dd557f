"""Revival's neighbours, played by a test: servers, their processes, a sync, a proof, and a clock that costs no time."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.rollout import revival as revival_module
from grpo.rollout.errors import ServerError
from grpo.rollout.revival import Revival
from grpo.rollout.roster import Roster
from grpo.rollout.server import ServerDied

A, B = "http://a:1", "http://b:1"
STARTUP, REATTACH = 100.0, 50.0
PATIENCE = 10_000  # sleeps; who sleeps longer waits for ever


def nothing() -> None:
    pass


@dataclass
class World:
    """What is true of the servers, and everything that was done, in order."""

    log: list[Any] = field(default_factory=list)
    dead: dict[str, float] = field(default_factory=dict)  # since when a process has been dead
    deaf: set[str] = field(default_factory=set)  # these answer nothing, for whatever reason
    dies_at_start: set[str] = field(default_factory=set)
    labels: dict[str, str] = field(default_factory=dict)  # of /weight_info
    now: float = 1000.0
    sleeps: int = 0
    sleeping: Callable[[], None] = nothing

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps += 1
        assert self.sleeps < PATIENCE, f"a wait without an end; before it: {self.log[-9:]}"
        self.sleeping()

    async def sleep_in_loop(self, seconds: float) -> None:
        self.sleep(seconds)

    def kill(self, url: str) -> None:
        """Its process, as of now."""
        self.dead[url] = self.now
        self.deaf.add(url)

    def done(self, *what: str) -> list[Any]:
        """Of the log, only these, in order."""
        return [entry for entry in self.log if entry[0] in what]


@dataclass
class Process:
    world: World
    url: str

    def check(self) -> None:
        self.world.log.append(("check", self.url))
        if self.world.dead.get(self.url, float("inf")) <= self.world.now:
            raise ServerDied(f"{self.url} died (signal 9)\nand its last words")

    def stop(self) -> None:
        self.world.log.append(("stop", self.url))

    def launch(self, *, patience: float = 0.0) -> None:
        assert patience > 0, "its port may still be held for a moment"
        self.world.log.append(("launch", self.url))
        self.world.dead.pop(self.url, None)
        self.world.deaf.discard(self.url)
        if self.url in self.world.dies_at_start:
            self.world.kill(self.url)

    def wait_ready(self, timeout: float) -> None:
        self.world.log.append(("ready", self.url))


@dataclass
class Weights:
    """A sync. `work` may fail; as the real one it asks which servers are lost then, and goes on with the others."""

    world: World
    work: Callable[[], None] = nothing
    urls: list[str] = field(default_factory=list)
    lost: Callable[[list[str]], list[str]] = lambda urls: []
    phase: str = "none"
    broken_off: bool = False

    def reattach(self) -> None:
        self.world.log.append(("reattach",))

    def use(self, urls: list[str]) -> None:
        self.urls = urls

    def sync(self, version: int) -> str:
        while True:
            self.world.log.append(("sync", version, self.urls))
            try:
                self.work()
                return "timings"
            except ServerError:
                gone = self.lost(self.urls)
                if not gone or gone == self.urls:
                    raise
                self.urls = [url for url in self.urls if url not in gone]


class Rig:
    """A Revival among them. `work` and `proof` are what its sync and its proof do."""

    def __init__(self, *, launched: tuple[str, ...] = (), attached: tuple[str, ...] = (), restarts: int = 2) -> None:
        self.world = world = World()
        self.weights = Weights(world)
        self.proof: Callable[[list[str]], None] = lambda urls: None
        self.told: list[dict[str, str]] = []
        roster = Roster([*launched, *attached])

        async def call(url: str, method: str, path: str, *, timeout: float) -> dict[str, str]:
            world.log.append(("call", url, method, path, timeout))
            if url in world.deaf:
                raise ServerError(f"{url}{path}: nothing answers")
            return {"weight_version": world.labels[url]} if path == "/weight_info" else {}

        def prove(version: int, urls: list[str] | None = None) -> dict[str, float]:
            world.log.append(("prove", version, urls))
            self.proof(urls or [])
            return {"sync/probe_max": 0.0}

        def run(work: Coroutine[Any, Any, Any], timeout: float) -> Any:
            return asyncio.run(work)

        self.client: Any = SimpleNamespace(roster=roster, call=call, waiting=3)
        self.loader: Any = SimpleNamespace(run=run, check=nothing, interrupted=nothing)
        servers: Any = SimpleNamespace(launched=[Process(world, url) for url in launched])
        weights: Any = self.weights
        self.of = Revival(
            servers=servers,
            client=self.client,
            loader=self.loader,
            weights=weights,
            proof=prove,
            restarts=restarts,
            startup_timeout=STARTUP,
            reattach_timeout=REATTACH,
            changed=lambda out: self.told.append(dict(out)),
        )
        self.roster = roster

    def at(self, version: int) -> "Rig":
        """After a sync of this version that went well."""
        self.roster.announce(version)
        self.roster.confirm(version)
        self.world.labels = {member.url: str(version) for member in self.roster.members}
        return self

    def out(self, url: str, why: str = "died") -> "Rig":
        """The loop has put it out."""
        self.roster.exclude(url, why)
        return self

    def play(self, monkeypatch: pytest.MonkeyPatch) -> "Rig":
        """The clock and /health are the world's."""
        world = self.world

        def healthy(url: str, timeout: float) -> bool:
            world.log.append(("health", url))
            return url not in world.deaf

        clock = SimpleNamespace(monotonic=lambda: world.now, sleep=world.sleep)
        monkeypatch.setattr(revival_module, "time", clock)
        monkeypatch.setattr(
            revival_module, "asyncio", SimpleNamespace(sleep=world.sleep_in_loop, gather=asyncio.gather)
        )
        monkeypatch.setattr(revival_module, "healthy", healthy)
        return self
