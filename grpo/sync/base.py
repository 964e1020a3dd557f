"""What every weight sync shares: the order of its calls, its deadlines, and what happens when one fails.

    pause, start_weight_update, update_weights, finish_weight_update(version), resume, then weight_info

on every server, each phase on all servers at once. A phase that fails on one server ends the sync: whatever failed, an
open update is closed and every server is told to resume, then the first error is raised. `sync` returns only when every
server has confirmed the version; until then the trainer goes by the old one.

Why no reset_prefix_cache between finish and resume: `pause?mode=keep&clear_cache=true` has emptied the caches, and
running requests are computed again under the new weights (vLLM 0.32; measured: docs/server_protocol.md). The separate
call answers success=false while requests are kept, so its answer would prove nothing; the probes do (law 8).
"""

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from grpo.model import Policy

log = logging.getLogger(__name__)

CONFIRM_TIMEOUT = 30.0  # seconds for weight_info and for the attempts to clean up


class Control(Protocol):
    """One server's control plane; each call has a deadline, and a status other than 2xx raises a ServerError."""

    url: str

    def get(self, path: str, *, timeout: float) -> dict[str, Any]: ...

    def post(
        self,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        timeout: float,
    ) -> dict[str, Any]: ...


class VersionNotConfirmed(RuntimeError):  # noqa: N818
    """Every call answered 200, and the server reports another version."""


@dataclass(slots=True)
class SyncTimings:
    """Seconds by phase. `paused_s` is how long generation stood still; `bytes` were sent to each server."""

    export_s: float = 0.0
    pause_s: float = 0.0
    update_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0
    total_s: float = 0.0
    bytes: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


class WeightSync:
    """Base of the backends. A backend gives `attach`, `prepare` and `transfer`.

    controls: one per server. policy: whose weights are sent. dtype: of the servers; nothing wider goes over the wire.
    pause: "keep" (open requests survive) or "wait" (they finish first). timeout: seconds for each phase.
    """

    backend: str  # what the server is told at its start

    def __init__(
        self, *, controls: list[Control], policy: Policy, dtype: torch.dtype, pause: str, timeout: float
    ) -> None:
        self.controls = controls
        self.policy = policy
        self.dtype = dtype
        self.pause = pause
        self.timeout = timeout
        self._attached = False
        self._pool = ThreadPoolExecutor(max_workers=len(controls), thread_name_prefix="weight-sync")

    def attach(self) -> None:
        """The handshake, once, before the first sync."""
        raise NotImplementedError

    def prepare(self, version: int, timings: SyncTimings) -> None:
        """What can be done while the servers still generate."""

    def transfer(self, version: int) -> None:
        """start_weight_update, update_weights, finish_weight_update on every server."""
        raise NotImplementedError

    def cleanup(self, version: int) -> None:
        """After every server has confirmed."""

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def sync(self, version: int) -> SyncTimings:
        """Send the current weights as `version`; raises what failed, after the servers have been told to resume."""
        timings = SyncTimings()
        begin = time.monotonic()
        if not self._attached:
            self.attach()
            self._attached = True
        self.prepare(version, timings)
        timings.export_s = time.monotonic() - begin
        paused = time.monotonic()
        try:
            mode = {"mode": self.pause, "clear_cache": "true"}
            self.everywhere(lambda c: c.post("/pause", params=mode, timeout=self.timeout))
            timings.pause_s = time.monotonic() - paused
            moved = time.monotonic()
            self.transfer(version)
            timings.update_s = time.monotonic() - moved
            resumed = time.monotonic()
            self.everywhere(lambda c: c.post("/resume", timeout=self.timeout))
            timings.resume_s = time.monotonic() - resumed
        except BaseException:
            self._leave_running()
            raise
        timings.paused_s = time.monotonic() - paused
        self.everywhere(lambda c: self._confirm(c, version))
        self.cleanup(version)
        timings.total_s = time.monotonic() - begin
        return timings

    def everywhere(self, call: Callable[[Control], Any]) -> list[Any]:
        """One call on every server at once; all have ended before the first error is raised."""
        if len(self.controls) == 1:
            return [call(self.controls[0])]
        futures: list[Future[Any]] = [self._pool.submit(call, control) for control in self.controls]
        for future in futures:
            with contextlib.suppress(BaseException):
                future.result()
        return [future.result() for future in futures]

    def _confirm(self, control: Control, version: int) -> None:
        answer = control.get("/weight_info", timeout=CONFIRM_TIMEOUT)
        if answer.get("weight_version") != str(version):
            raise VersionNotConfirmed(
                f"{control.url}: the sync of version {version} answered 200 everywhere, and the server reports version "
                f"{answer.get('weight_version')!r}"
            )

    def _leave_running(self) -> None:
        """No server stays paused, or with an update open, because of us. The error that brought us here is raised."""

        def attempt(control: Control) -> None:
            for path in ("/finish_weight_update", "/resume"):
                try:
                    control.post(path, timeout=CONFIRM_TIMEOUT)
                except Exception as error:  # an update that was not open, a server that is gone
                    log.info("after a failed sync: %s%s: %s", control.url, path, error)

        self.everywhere(attempt)
