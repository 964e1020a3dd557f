"""The loop of asynchronous GRPO: wait for groups, step, sync, verify, record. Read this file first.

`version` counts completed weight syncs (law 1): version 0 is sent before the first rollout, and the step that trains at
version v sends v + 1. The servers generate all the while; how far they may run ahead is the loader's admission (law 2),
and that nothing older than `max_staleness` is trained is checked here once more, at the optimizer step: a violation
is a bug, never a reason to drop data.

With `max_staleness` = 0 this is a plain synchronous loop: nothing is in flight while the step and the sync go on.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo.checkpoint import Checkpoints
from grpo.checkpoint import Progress as Position
from grpo.drift import DriftError
from grpo.evaluate import Evaluator
from grpo.groups import NothingToLearn, group_metrics
from grpo.ledger import Ledger
from grpo.memory import peak_gb
from grpo.progress import Display
from grpo.record import Recorder
from grpo.rollout.loader import Loader, StreamEnded
from grpo.signals import Signals
from grpo.step import TrainStep
from grpo.types import Group

log = logging.getLogger(__name__)


class Sync(Protocol):
    """Gets the current weights to every server as `version`, and returns when all have confirmed it."""

    @property
    def broken_off(self) -> bool: ...  # in a sync, or one has failed: what the servers hold is unknown

    def sync(self, version: int) -> Any: ...


@dataclass(slots=True)
class Trainer:
    """Owns the step counter and the version; everything it calls is made by run.py.

    steps: the last step. groups_per_step: groups consumed by one step. prove: compares the servers' logprobs with the
    trainer's (law 8), every `verify_every` syncs and at the first. wait_timeout: seconds without a single finished
    group that end the run. goes_on: called when the servers hold the first weights, proven. signals: `check` raises
    when one has come; looked at between steps.
    """

    step_fn: TrainStep
    loader: Loader
    weights: Sync
    signals: Signals
    prove: Callable[[int], dict[str, float]]
    evaluator: Evaluator
    recorder: Recorder
    checkpoints: Checkpoints
    ledger: Ledger
    display: Display
    steps: int
    groups_per_step: int
    max_staleness: int
    eval_every: int
    checkpoint_every: int
    verify_every: int
    wait_timeout: float
    goes_on: Callable[[], None] = lambda: None
    step: int = 0
    version: int = 0
    groups: int = 0
    places: int = 0
    generated_before: int = 0
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    tokens_at_start: dict[str, int] = field(default_factory=dict)  # of the runs that this one resumes
    totals: dict[str, float] = field(default_factory=dict)
    sampler_idle_s: float = 0.0
    recorded_at: float = 0.0
    training_since: float = 0.0
    optimizer_steps: int = 0
    phase: str = "start"  # for the watchdog
    recorded: int = 0  # the last step that is in the run folder
    saved: dict[str, float] = field(default_factory=dict)  # of a checkpoint since the last line: seconds, bytes
    saves_failed: int = 0

    def run(self) -> str:
        """Train to the last step, or until the data ends or nothing is left to learn; says why it stopped."""
        self.optimizer_steps = self.step_fn.optimizer.steps
        self.recorded = self.step
        self.version = self.step  # one sync a step: after a resume the count goes on where it was
        self._sync(first=True)
        self.goes_on()
        if self.step == 0:
            self._evaluate()
        totals = self.ledger.totals()
        self.generated_before = totals["generated"]
        self.tokens_at_start = {name: totals[name] for name in ("generated", "trained")}
        self.loader.take_activity()
        self.loader.reward_stats()  # the first evaluation belongs to no step
        self.recorded_at = self.training_since = time.monotonic()
        self.loader.publish(self.version)
        reason = "all steps made"
        while self.step < self.steps:
            self.signals.check()
            started = time.monotonic()
            self.phase = "waiting for groups"
            try:
                groups = self.loader.next_groups(self.groups_per_step, self.wait_timeout)
            except NothingToLearn as ending:
                if ending.kind != "all_right":
                    raise
                log.warning("%s", ending)
                reason = str(ending)
                break
            except StreamEnded:
                reason = "the data ended"
                break
            waited = time.monotonic()
            self._check_lag(groups)
            self.phase = "optimizer step"
            metrics = self.step_fn(groups, self.version)
            trained = time.monotonic()
            # Before the sync, which lets the next groups be made and scored.
            metrics |= self.loader.reward_stats(groups)
            self._advance(groups)
            times = {"time/wait_rollouts_s": waited - started, "time/train_s": trained - waited}
            try:
                metrics |= self._sync()
                self.loader.publish(self.version)
            finally:  # a step whose sync fails is made all the same: its line is due, and a checkpoint may follow
                times["time/sync_s"] = time.monotonic() - trained
                self._record(groups, self.version - 1, metrics, times, started)
            if self.eval_every and self.step % self.eval_every == 0 and self.step < self.steps:
                self._evaluate()
            if self.checkpoint_every and self.step % self.checkpoint_every == 0 and self.step < self.steps:
                self._save_if_room()
        self._evaluate()
        if self.checkpoint_every:
            self.save()
        return reason

    def _advance(self, groups: list[Group]) -> None:
        """A step is made: these groups are consumed, and the weights are the next version's."""
        self.step += 1
        self.version += 1
        self.optimizer_steps = self.step_fn.optimizer.steps
        self.groups += len(groups)
        self.places += sum(group.discarded is None for group in groups)

    def save(self) -> None:
        """A checkpoint of the last finished step."""
        started = time.monotonic()
        self.phase = "checkpoint"
        self.recorder.sync()
        position = Position(self.step, self.version, self.groups, self.places, self.ledger.accounts())
        self.saved = self.checkpoints.save(self.step_fn.policy, self.step_fn.optimizer, position)
        self._spent("checkpoint", started)

    def _save_if_room(self) -> None:
        """A checkpoint on the way: a full disk costs the checkpoint, not the run. (The last one must succeed.)"""
        try:
            self.save()
        except OSError as error:
            self.saves_failed += 1
            log.warning("no checkpoint of step %d, the run goes on: %s", self.step, error)

    def try_save(self) -> None:
        """A checkpoint after a failure, where the parameters are those of the last finished step."""
        if not self.checkpoint_every or not self.step:
            return
        if self.step_fn.optimizer.steps != self.optimizer_steps or self.recorded != self.step:
            at = max(self.step, self.recorded + 1)
            log.warning("no checkpoint of this ending: step %d is not made and recorded as a whole", at)
            return
        try:
            self.save()
        except Exception:  # the failure that ends the run is the one to report
            log.exception("no checkpoint of this ending")

    def _sync(self, first: bool = False) -> dict[str, float]:
        self.phase = "sync"
        timings = self.weights.sync(self.version)
        metrics = {f"sync/{name}": float(value) for name, value in timings.as_dict().items()}
        if first or (self.verify_every and self.version % self.verify_every == 0):
            started = time.monotonic()
            self.phase = "proof of the sync"
            metrics |= self.prove(self.version)
            metrics["sync/verify_s"] = time.monotonic() - started
        return metrics

    def _check_lag(self, groups: list[Group]) -> None:
        for completion in (c for g in groups if g.discarded is None for c in g.completions):
            lag = self.version - completion.version_first
            if not 0 <= lag <= self.max_staleness:
                raise AssertionError(
                    f"law 1 is broken: completion {completion.group}/{completion.index} has lag {lag}, "
                    f"rollout.max_staleness is {self.max_staleness} (trained at version {self.version})"
                )

    def _evaluate(self) -> None:
        """Training waits meanwhile, so the version stands still; rollouts go on."""
        if not self.eval_every or not self.evaluator.sets:
            return
        started = time.monotonic()
        self.phase = "evaluation"
        for name, line in self.evaluator(self.step, self.version).items():
            self.evals.setdefault(name, {"before": self.recorder.first_evals.get(name, line)})["after"] = line
            self.display.evaluation(name, line)
        self._spent("evaluation", started)

    def _record(
        self, groups: list[Group], version: int, metrics: dict[str, Any], times: dict[str, float], started: float
    ) -> None:
        recording = time.monotonic()
        held, tokens = self.loader.balance()
        activity = self.loader.take_activity()
        wall_s = time.monotonic() - self.recorded_at  # since the last line: an evaluation between them is no step
        self.recorded_at += wall_s
        assert held == tokens["in_flight"], f"law 6 is broken: {held} tokens are held, the ledger says {tokens}"
        step_s = time.monotonic() - started
        self.sampler_idle_s += max(0.0, wall_s - activity.busy_s)
        generated = tokens["generated"] - self.generated_before
        self.generated_before = tokens["generated"]
        trained = sum(c.tokens for g in groups for c in g.completions if c.outcome == "trained")
        line: dict[str, Any] = {
            "step": self.step,
            "version": version,
            "time/elapsed_s": self.recorder.elapsed_s,
            "time/step_s": step_s,
            **times,
            **group_metrics(groups),
            **metrics,
            **{f"tokens/{name}": value for name, value in tokens.items()},
            "throughput/generated_tokens_per_s": generated / wall_s,
            "throughput/trained_tokens_per_s": trained / step_s,
            "sampler/open_requests_mean": activity.open_s / wall_s,
            "sampler/idle_fraction": max(0.0, 1.0 - activity.busy_s / wall_s),
            "sampler/loop_lag_s": activity.loop_lag_s,
            "sampler/invalid_answers": activity.invalid,
            "sampler/retries": self.loader.client.retried,
            "memory/peak_gb": peak_gb(self.step_fn.policy.device),
            "sampler/restarts": self.loader.client.roster.returns,
            "sampler/servers_out": len(self.loader.client.roster.out),
        }
        line |= self.saved
        stop: DriftError | None = None
        try:
            line["drift"] = self.step_fn.loss.drift.check(line)
        except DriftError as error:  # the step is made, and its line is what shows the drift
            line["drift"], stop = error.kind, error
        self.recorder.rollouts(self.step, groups, version)
        self.recorder.metrics(line)
        self.recorded, self.saved = self.step, {}
        self.display.step(line)
        for name, seconds in times.items():
            self.totals[name] = self.totals.get(name, 0.0) + seconds
        self._spent("recording", recording)
        if stop is not None:
            raise stop

    def _spent(self, what: str, started: float) -> None:
        key = f"time/{what}_s"
        self.totals[key] = self.totals.get(key, 0.0) + time.monotonic() - started
