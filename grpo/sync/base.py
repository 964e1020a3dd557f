"""What every weight sync shares: the order of its calls, its deadlines, and what happens when one fails.

    pause, start_weight_update, update_weights, finish_weight_update(version), reset_prefix_cache, resume, weight_info

on every server, each phase on all servers at once. A phase that fails on one server ends the sync: whatever failed, an
open update is closed and every server is told to resume, then the first error is raised. `sync` returns only when every
server has confirmed the version; until then the trainer goes by the old one.

A server that fails because it is gone (`lost` says so) is left out, and the sync begins again with the others, which
stay paused meanwhile: one that has the new weights and not yet their number must not sample.

A connection that broke is no failure of the server: a stall of some seconds is enough, or a proxy between. A call that
may be made twice is made once more; a backend that may send its weights twice (`repeatable`) begins once more. An
answer, whatever it says, and a deadline are final.

Why the caches are reset though the pause has cleared them: with `mode=keep` vLLM 0.32 documents `clear_cache` as
ignored while its code obeys it, and a key-value cache that survives gives logprobs of a mixture of weights that no
version has (off by 11 nat when it was tried). So it is asked for again, after the update, with
`reset_running_requests=true`: whatever still holds a cache is computed again, and a cache that cannot be
dropped is an error, not `success: false`. When the pause did its work this finds nothing to do (2 ms).

Left out: sparse and delta updates, LoRA adapters. Of a trainer with several ranks only rank 0 calls.
"""

import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from grpo.rollout.errors import ServerError, TransientError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

log = logging.getLogger(__name__)

CONFIRM_TIMEOUT = 30.0  # seconds for weight_info
CLEANUP_TIMEOUT = 5.0  # seconds for each call after a failure, which is raised only then


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


class Weights(Protocol):
    """Whose weights are sent: names as in a saved checkpoint (transformers' state_dict, a tied head left out)."""

    def named_weights(self, dtype: "torch.dtype | None" = None) -> "Iterator[tuple[str, Tensor]]":
        """Whole tensors in a fixed order, each cast to `dtype` as it comes; without a dtype for their shapes alone."""
        ...


class VersionNotConfirmed(ServerError):  # noqa: N818
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
    """Base of the backends. A backend gives `attach`, `transfer`, and what else it needs.

    controls: one per server. policy: whose weights are sent. dtype: of the servers; nothing wider goes over the wire.
    pause: "keep" (open requests survive) or "wait" (they finish first). timeout: seconds for each phase.
    """

    backend: str  # what the server is told at its start
    repeatable = False  # whether a transfer that broke off may be made again: no collective waits for its other half

    def __init__(
        self, *, controls: list[Control], policy: Weights, dtype: "torch.dtype", pause: str, timeout: float
    ) -> None:
        assert pause in ("keep", "wait"), pause
        self.controls = controls
        self.policy = policy
        self.dtype = dtype
        self.pause = pause
        self.timeout = timeout
        self.bytes = sum(w.numel() * dtype.itemsize for _, w in policy.named_weights())
        self.device = next(iter(policy.named_weights()))[1].device
        self.phase = "none"  # of the sync that is going on, for the watchdog
        self.lost: Callable[[list[str]], list[str]] = lambda urls: []  # which of these servers are gone
        self._known = list(controls)
        self._attached = False
        self.broken_off = False  # in a sync, or one has failed: what the servers hold is unknown
        self._paused: float | None = None  # since when
        self._pool = ThreadPoolExecutor(max_workers=len(controls), thread_name_prefix="weight-sync")

    def attach(self) -> None:
        """The handshake, once, before the first sync; again after `reattach`."""
        raise NotImplementedError

    def prepare(self, version: int) -> None:
        """What can be done while the servers still generate."""

    def transfer(self, version: int) -> None:
        """start_weight_update, update_weights, finish_weight_update on every server."""
        raise NotImplementedError

    def abandon(self, control: Control) -> None:
        """Close an update that a failure left open. vLLM's engines then put back the tensors that did not arrive."""
        control.post("/finish_weight_update", timeout=CLEANUP_TIMEOUT)

    def cleanup(self, version: int) -> None:
        """After every server has confirmed."""

    def suspects(self, url: str) -> str:
        """After a proof that failed: which tensors of this server are not the policy's, in words. Changes nothing."""
        return f"Which tensors are off cannot be told with sync={self.backend}; sync=disk can, on a server of its own"

    def reattach(self) -> None:
        """A server has been restarted: the next sync begins with the handshake."""
        self._attached = False

    def use(self, urls: list[str]) -> None:
        """The next syncs are of these servers; another set than before begins with the handshake."""
        controls = [c for c in self._known if c.url in urls]
        assert controls, f"none of {urls} is a server of this run"
        if controls != self.controls:
            self.controls = controls
            self.reattach()

    def close(self) -> None:
        """Give back what is held. No server is called; a call that hangs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def sync(self, version: int) -> SyncTimings:
        """Send the current weights as `version`; raises what failed, after the servers have been told to resume."""
        timings = SyncTimings(bytes=self.bytes)
        begin = time.monotonic()
        self.broken_off = True
        self._paused = None
        repeats = 1 if self.repeatable else 0
        first: BaseException | None = None
        while True:
            try:
                self._exchange(version, timings)
                break
            except BaseException as error:
                if first is not None:
                    error.add_note(f"the sync was begun again before, because of: {first}")
                if not self._begins_again(error, repeats):
                    raise
                repeats -= connection_broke(error)
                first = error
        self.cleanup(version)
        self.broken_off = False
        timings.total_s = time.monotonic() - begin
        return timings

    def _exchange(self, version: int, timings: SyncTimings) -> None:
        begin = time.monotonic()
        if not self._attached:
            self.phase = "handshake"
            self.attach()
            self._attached = True
        self.phase = "export"
        self.prepare(version)
        exported = time.monotonic()
        timings.export_s = exported - begin
        mode = {"mode": self.pause, "clear_cache": "true"}
        self.phase = "pause"
        if self._paused is None:  # and not begun again, which leaves them paused
            self._paused = exported
        self.everywhere(insisted(lambda c: c.post("/pause", params=mode, timeout=self.timeout)))
        timings.pause_s = time.monotonic() - exported
        moved = time.monotonic()
        self.phase = "update"
        self.transfer(version)
        self.phase = "cache reset"
        self.everywhere(insisted(self._reset_cache))
        timings.update_s = time.monotonic() - moved
        resumed = time.monotonic()
        self.phase = "resume"
        self.everywhere(insisted(lambda c: c.post("/resume", timeout=self.timeout)))
        timings.resume_s = time.monotonic() - resumed
        timings.paused_s = time.monotonic() - self._paused
        self.phase = "confirmation"
        self.everywhere(insisted(lambda c: self._confirm(c, version)))
        self.phase = "none"

    def _begins_again(self, error: BaseException, repeats: int) -> bool:
        """After a failure: whether to begin again, without servers that are gone, or with all of them where a
        connection broke and `repeats` are left. If not, all resume."""
        gone: list[str] = []
        try:
            if isinstance(error, Exception):
                gone = self.lost([c.url for c in self.controls])
        except BaseException as death:
            self._leave_running(death)
            raise death from error
        others = [c.url for c in self.controls if c.url not in gone]
        if not others or not (gone or (repeats > 0 and connection_broke(error))):
            self._leave_running(error)
            return False
        if gone:
            log.warning("the sync begins again without %s", ", ".join(gone))
        else:
            log.warning("the sync begins again: %s", error)
        self.use(others)
        self.everywhere(self._close_update)
        return True

    def everywhere(self, call: Callable[[Control], Any]) -> list[Any]:
        """One call on every server at once; all have ended before the first error is raised."""
        if len(self.controls) == 1:
            return [call(self.controls[0])]
        futures = [self._pool.submit(call, control) for control in self.controls]
        concurrent.futures.wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"besides: {other}")
            raise errors[0]
        return [future.result() for future in futures]

    def start(self, control: Control) -> None:
        """Open an update; one that a killed trainer left open on an attached server is closed first."""
        try:
            control.post("/start_weight_update", timeout=self.timeout)
        except ServerError as error:
            if "already active" not in str(error):
                raise
            log.warning("%s: a weight update was left open, by a trainer that was killed; closing it", control.url)
            with contextlib.suppress(ServerError):
                insist(lambda: self.abandon(control))
            insist(lambda: control.post("/start_weight_update", timeout=self.timeout))

    def _reset_cache(self, control: Control) -> None:
        running = {"reset_running_requests": "true"}
        answer = control.post("/reset_prefix_cache", params=running, timeout=self.timeout)
        if answer.get("success") is not True:
            raise ServerError(
                f"{control.url}/reset_prefix_cache: {answer}: requests hold key-value caches of the old weights, and "
                "their next tokens would be of no version"
            )

    def _confirm(self, control: Control, version: int) -> None:
        answer = control.get("/weight_info", timeout=CONFIRM_TIMEOUT)
        if answer.get("weight_version") != str(version):
            raise VersionNotConfirmed(
                f"{control.url}: the sync of version {version} answered 200 everywhere, and the server reports version "
                f"{answer.get('weight_version')!r}"
            )

    def _leave_running(self, cause: BaseException) -> None:
        """No server stays paused, or with an update open, because of us. `cause` is raised afterwards."""

        def attempt(control: Control) -> None:
            self._close_update(control)
            try:
                insist(lambda: control.post("/resume", timeout=CLEANUP_TIMEOUT))
            except Exception as error:
                cause.add_note(f"and it could not be resumed: {error}")

        self.everywhere(attempt)

    def _close_update(self, control: Control) -> None:
        with contextlib.suppress(Exception):  # mostly there is none open
            insist(lambda: self.abandon(control))


def insist(call: Callable[[], Any]) -> Any:
    """The call, once more if its connection broke: vLLM closes it after each 500, half the time under the next call.

    For calls that may be made twice.
    """
    try:
        return call()
    except TransientError as error:
        if not connection_broke(error):
            raise
        return call()


def insisted(call: Callable[[Control], Any]) -> Callable[[Control], Any]:
    """The call of each server as `insist` makes it."""
    return lambda control: insist(lambda: call(control))


def connection_broke(error: BaseException) -> bool:
    """Whether nothing is known of a call: it was neither answered, be it with nonsense, nor waited for to the end."""
    cause = error.__cause__
    known = (TimeoutError, ValueError, RecursionError)
    return isinstance(error, TransientError) and cause is not None and not isinstance(cause, known)
