"""The launched servers of a multirun, kept from job to job while nothing that shapes their launch changes.

`servers` is their one owner. In a single run, and where a launcher gives each job a process of its own, it launches
for every job and ends with it; `open` (at the start of a multirun in this process) makes it keep. A kept server has the
same command (but for a port that was not asked for), environment and model files. What it hands on:

| the last job leaves | what becomes of it |
| --- | --- |
| open requests | its session is closed, so vLLM aborts them; `/pause?mode=abort` ends what still runs |
| key-value caches | `/reset_prefix_cache` must say success, which it does not while any request holds a block |
| a pause | `/resume`; the calls that failed would be a server in doubt |
| weights and version | the next job's first sync sends its own as version 0 and proves them, before the first rollout |
| the log | goes on in the sweep's folder; each job's folder gets its part |
| a random generator | goes on; only requests without a seed draw from it (rollout.seeded=false promises nothing) |

A server in doubt is ended, and the next job launches anew: when the job failed over a server, inside a sync or by a
signal, when a process of it is gone, when it cannot be reset.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.isolation import chain
from grpo.rollout.errors import ServerError
from grpo.rollout.server import Servers, plan_servers
from grpo.settings import Rollout
from grpo.sync.verify import SyncNotProven

log = logging.getLogger(__name__)

RESET_TIMEOUT = 10.0  # seconds for each call that resets a server
# nccl is left out: a second handshake would leave the first communicator in the server, and nobody has tried it.
BACKENDS = ("disk", "ipc")
# Failures that may be a server's, or leave one in an unknown state. Others (a loss that is NaN) are the job's own.
SUSPICIOUS = (ServerError, SyncNotProven, OSError, AssertionError, MemoryError)  # TimeoutError is an OSError


@dataclass(slots=True)
class Lease:
    """Servers in the hands of a job, or (`Kept._idle`) of none. key: what shaped the launch; None: not to be kept."""

    servers: Servers
    key: Any
    folder: Path
    starts: list[int]  # of the job's part in each log, in bytes
    trusted: bool = False
    failed: bool = False  # its servers get no grace


class Kept:
    """Owner of the launched servers. Called from the main thread only."""

    def __init__(self) -> None:
        self.root: Path | None = None
        self.reused = False  # whether the last `take` gave servers that were running
        self._at_start: dict[str, str] = {}
        self._base: dict[str, str] | None = None
        self._idle: Lease | None = None
        self._lease: Lease | None = None

    def open(self, root: Path) -> None:
        """A multirun begins in this process. root: its folder, which gets the logs of kept servers."""
        self.root = root
        self._at_start = dict(os.environ)

    def holds(self, port: int) -> bool:
        """Whether a kept server, which ends when it does not fit, listens on this port."""
        return self._idle is not None and any(server.port == port for server in self._idle.servers.launched)

    def take(self, rollout: Rollout, *, folder: Path, env_set: Mapping[str, str], **shape: Any) -> Servers:
        """The servers of a job: kept ones where they fit, else launched now. Returns at once; `wait_ready` waits.

        folder: the job's. env_set: Hydra's hydra.job.env_set. shape: what else `plan_servers` asks for, which raises
        ValueError, as does a port that is taken.
        """
        assert self._lease is None, "the last job has not given its servers back"
        keeps = self.root is not None and rollout.keep_server and not rollout.urls and shape["backend"] in BACKENDS
        plan = plan_servers(
            rollout,
            **shape,
            folder=self.root if self.root is not None and keeps else folder,
            inherited=self._inherited(env_set),
        )
        key = _key(plan, rollout, shape["model"]) if keeps else None
        self.reused = False
        if rollout.urls:
            return plan
        if self._idle is not None:
            self.reused = key == self._idle.key and self._reset(self._idle.servers, rollout.api_key)
            if not self.reused:
                self.close()
        servers = self._idle.servers if self._idle is not None else plan
        self._lease, self._idle = Lease(servers, key, folder, []), None
        if key is not None:
            self._lease.starts = [_begin(server.log, folder, self.reused) for server in servers.launched]
        if not self.reused:
            servers.launch()
        return servers

    def ended(self, failure: BaseException | None, *, synced: bool) -> None:
        """How the job ended, before it gives its servers back. synced: no weight sync was broken off."""
        if self._lease is not None:
            self._lease.trusted = synced and not _suspicious(failure)
            self._lease.failed = failure is not None

    def give_back(self) -> None:
        """The job is over and its requests are closed: keep its servers, or end them. Safe without any."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if lease.key is not None and lease.trusted and _alive(lease.servers):
            self._idle = lease
        else:
            lease.servers.stop(at_once=lease.failed)
        for server, start in zip(lease.servers.launched, lease.starts, strict=False):
            _copy_part(server.log, start, lease.folder / server.log.name)

    def close(self) -> None:
        """End what is kept."""
        idle, self._idle = self._idle, None
        if idle is not None:
            idle.servers.stop()

    def _inherited(self, env_set: Mapping[str, str]) -> dict[str, str]:
        """The environment of a job's servers, as it would be if the job were alone in this process.

        Imports set variables (torch's compiler, vLLM), which are there from the second job on; so it is what the first
        job had, without its env_set and with this job's.
        """
        if self.root is None:
            return dict(os.environ)
        if self._base is None:
            self._base = {k: v for k, v in os.environ.items() if k not in env_set}
            self._base |= {k: self._at_start[k] for k in env_set if k in self._at_start}
        return {**self._base, **env_set}

    def _reset(self, servers: Servers, api_key: str | None) -> bool:
        """Whether the servers are idle, empty and running now."""

        async def everywhere() -> None:
            await asyncio.gather(*(reset(url, api_key) for url in servers.urls))

        try:
            servers.check()
            asyncio.run(everywhere())
        except ServerError as error:
            log.warning("the servers of the last job are not kept: %s", error)
            return False
        log.info("the servers of the last job are kept: %s", ", ".join(servers.urls))
        return True


async def reset(url: str, api_key: str | None) -> None:
    """End every request, drop the caches, let the server run. Raises ServerError."""
    from grpo.rollout.client import Client  # aiohttp waits until a model is loaded anyway

    async with Client([url], vocab_size=0, api_key=api_key) as client:

        async def post(path: str, **params: str) -> Any:
            return await client.call(url, "POST", path, params=params, timeout=RESET_TIMEOUT)

        await post("/pause", mode="abort", clear_cache="true")
        answer = await post("/reset_prefix_cache")
        if answer.get("success") is not True:
            raise ServerError(f"{url}/reset_prefix_cache: {answer}: requests of the last job hold key-value caches")
        await post("/resume")


def _key(plan: Servers, rollout: Rollout, model: str) -> Any:
    """All that shapes a launch, comparable. A port that nobody asked for may be any."""
    commands = [
        [word for flag, word in zip(["", *s.command], s.command, strict=False) if flag != "--port"] + [s.host]
        for s in plan.launched
    ]
    files = []
    if Path(model).is_dir():
        stats = [(file.name, file.stat()) for file in sorted(Path(model).iterdir())]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return commands, [s.environment for s in plan.launched], rollout.port, files


def _suspicious(failure: BaseException | None) -> bool:
    return any(isinstance(error, SUSPICIOUS) or not isinstance(error, Exception) for error in chain(failure))


def _alive(servers: Servers) -> bool:
    with contextlib.suppress(ServerError):
        servers.check()
        return True
    return False


def _begin(shared: Path, folder: Path, reused: bool) -> int:
    """Mark in the shared log where a job begins, and say in its folder where to look meanwhile."""
    start = shared.stat().st_size if shared.exists() else 0
    where = os.path.relpath(shared, folder)
    with shared.open("a", encoding="utf-8") as file:
        file.write(f"---- {os.path.relpath(folder, shared.parent)}: {'kept' if reused else 'launched'} ----\n")
    with (folder / shared.name).open("a", encoding="utf-8") as file:
        file.write(f"(in {where} from byte {start} on; copied to here when the job ends)\n")
    return start


def _copy_part(shared: Path, start: int, own: Path) -> None:
    """Append to the job's own log what the shared one has got since."""
    with shared.open("rb") as file, own.open("ab") as copy:
        file.seek(start)
        while chunk := file.read(1 << 20):
            copy.write(chunk)


servers = Kept()  # of this process
