"""The async rollout loader: keeps the servers busy while the trainer steps, and hands over groups in stream order.

It owns one thread with one event loop, in which everything asynchronous lives: the HTTP session, the admission, one
task per group, one episode (episode.py) per completion, the rewards. The trainer's thread only calls the methods under
"called from the trainer's thread"; a group that has been handed over is never touched here again.

| who waits | for | unblocked by | deadline |
| --- | --- | --- | --- |
| admission task | a place: a new version, a finished request, a handed-back place | `_wake` | none: idle is legal |
| a request | its answer | the server | request_timeout x retries |
| trainer in `next_groups` | the next groups in order | `_ready`: a group done, a failure, the end | `timeout` |
| trainer in `run` | a coroutine | the loop, or a failure; evaluations and proofs: a signal | `timeout` |

An exception in any task is kept and raised in the trainer's thread at its next call (law 7); nothing is retried here.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from grpo.ledger import Ledger
from grpo.rollout.activity import Activity, Meter
from grpo.rollout.admission import Admission
from grpo.rollout.aside import Aside
from grpo.rollout.client import Client, Sampled
from grpo.rollout.episode import Environments, EpisodeLost, Session, begin, extend, play, seeded
from grpo.rollout.errors import InvalidAnswer, RequestRefused
from grpo.types import IN_FLIGHT, Completion, Group, Prompt, PromptSource, Sampling

T = TypeVar("T")

log = logging.getLogger(__name__)

WATCH_EVERY = 0.5  # seconds between looks at the servers' processes
TICK = 0.05  # seconds of the sleeps that tell whether the event loop keeps up
LOOK_EVERY = 0.5  # seconds between a waiting trainer's looks for a signal
REFUSALS_SHOWN = 3  # refused requests that are logged; a data set may hold many prompts that are too long
REFUSED = "discarded:refused"  # outcome of a completion
INVALID_IN_A_ROW = 8  # unusable answers in a row that stop the run: the server is set up wrongly


class Scorer(Protocol):
    """Scores a completion in place: sets `reward` (None = not scored) and `rewards`."""

    @property
    def open(self) -> int: ...  # completions that are being scored

    async def score(self, prompt: Prompt, completion: Completion) -> None: ...


class StreamEnded(Exception):  # noqa: N818 (an ending, not an error)
    """There are no more groups: the data set's epochs are over, or, raised by `judge`, no more are wanted."""


class Loader:
    """See the module's docstring.

    source: the prompt stream. client: not yet entered; the loop enters and closes it. scorer: the rewards.
    environments: what answers the policy between turns; None: every completion is one turn.
    sampling: everything but the seed, which is made from (seed, group, index, turn); the seed is left out when
    `seeded` is false (a per-request generator costs a GPU server time).
    judge: tells why a finished group must leave the stream (equal rewards), or None to keep it; it sees those that have
    left already (`discarded`: refused, ...) too. StreamEnded ends the stream there: no failure, so that the step, the
    sync or the evaluation at hand goes on.
    start_group: place in the stream of the first group (after a resume: groups consumed). watch: called twice a
    second, raises when a server process has died.
    """

    def __init__(
        self,
        *,
        source: PromptSource,
        client: Client,
        scorer: Scorer,
        environments: Environments | None = None,
        admission: Admission,
        ledger: Ledger,
        sampling: Sampling,
        group_size: int,
        seed: int,
        seeded: bool = True,
        start_group: int = 0,
        judge: Callable[[Group], str | None] = lambda group: None,
        decode: Callable[[list[int]], str],
        watch: Callable[[], None] = lambda: None,
        interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self.source = source
        self.client = client
        self.scorer = scorer
        self.environments = environments
        self.admission = admission
        self.ledger = ledger
        self.sampling = sampling
        self.group_size = group_size
        self.seed = seed
        self.seeded = seeded
        self.judge = judge
        self.decode = decode
        self.watch = watch
        self.interrupted = interrupted
        self.tend: Callable[[], None] = lambda: None  # called in the trainer's waits; set by `Revival`
        self._next_admitted = start_group
        self._next_delivered = start_group
        self._done: dict[int, Group] = {}
        self._open: dict[int, list[Completion]] = {}  # answers of groups that are not complete yet
        self._ended = False
        self._ending: StreamEnded | None = None  # from `judge`
        self._cut_short = False  # by it, the last batch: what comes after it would be older than the bound
        self._failure: BaseException | None = None
        self._closing = False
        self._invalid_in_a_row = 0
        self._refused = 0
        self._meter = Meter()
        self._lock = threading.Lock()  # guards _done, _open, _ended, _ending, _failure, _meter
        self._ready = threading.Condition(self._lock)
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._started = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="rollout-loader", daemon=True)

    # ---- called from the trainer's thread ----

    def start(self) -> None:
        """Start the thread and open the session. Nothing is generated before the first `publish`."""
        self._thread.start()
        self._started.wait(30)
        self.check()

    def publish(self, version: int) -> None:
        """Every server has confirmed this version: groups may start up to its limit (laws 1, 2)."""
        self._loop.call_soon_threadsafe(self._publish, version)

    def next_groups(self, count: int, timeout: float) -> list[Group]:
        """The next groups in stream order, up to and with `count` kept ones; discarded ones come along, in place.

        Fewer when the stream ends; StreamEnded (or the judge's kind of it) when it has ended before the first. Raises
        what failed in the loop, or TimeoutError when nothing at all finished for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        taken: list[Group] = []
        kept = 0
        while kept < count:
            self.interrupted()
            self.tend()  # without the lock: it may call servers, through the loop
            with self._ready:
                self._raise_failure()
                if self._cut_short and self._ending is not None:
                    raise self._ending
                group = self._done.pop(self._next_delivered, None)
                if group is not None:
                    taken.append(group)
                    kept += group.discarded is None
                    self._next_delivered += 1
                    deadline = time.monotonic() + timeout
                elif self._ending is not None:
                    if not taken:
                        raise self._ending
                    self._cut_short = True
                    break
                elif self._ended and self._next_delivered >= self._next_admitted:
                    if not taken:
                        raise StreamEnded
                    break
                elif time.monotonic() >= deadline:
                    raise TimeoutError(f"no group finished within {timeout:g} s; {self.where()}")
                else:  # short, because a signal handler may not take the lock to wake us
                    self._ready.wait(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))
        return taken

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float, look: Callable[[], None] = lambda: None) -> T:
        """Run a coroutine in the loop and wait for it; a failure elsewhere in the loop ends the wait too.

        look: called now and then meanwhile; what it raises ends the wait. That of a control call is for a server that
        died, never for a signal: it must not tear a sync, whose phases have deadlines of their own.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        deadline = time.monotonic() + timeout
        try:
            while True:
                try:
                    return future.result(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))
                except TimeoutError:
                    if future.done():
                        raise
                    self.check()
                    look()
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"not done within {timeout:g} s; {self.where()}") from None
        finally:
            future.cancel()

    def sample(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        count: int,
        timeout: float,
        *,
        probe: bool = False,
        url: str | None = None,
    ) -> list[Group]:
        """Completions outside the stream (evaluation, probes): `count` per prompt, never in the ledger.

        The seeds depend on the prompts' places in the list only, so every evaluation draws the same random numbers.
        probe: one turn and no reward. `url` names the server to ask; by default the least busy one. A signal ends the
        wait.
        """

        def look() -> None:
            self.interrupted()
            if url is None:  # whoever insists on a server is just syncing it
                self.tend()

        aside = Aside(
            self.client,
            None if probe else self.scorer,
            None if probe else self.environments,
            self.decode,
            self.seed if self.seeded else None,
            url,
        )
        return self.run(aside.sample(prompts, sampling, count), timeout, look)

    def check(self) -> None:
        """Raise what has failed in the loop, if anything has."""
        with self._lock:
            self._raise_failure()

    def where(self) -> str:
        """Where each side waits, for a message. Takes no lock: whoever hangs may hold it."""
        admission = self.admission
        return (
            f"{admission.open_requests} requests open, {len(self._open)} groups unfinished, {len(self._done)} groups "
            f"finished out of order, next in order is group {self._next_delivered}, "
            f"{admission.places} of {admission.limit} places taken at version {admission.version}"
        )

    def balance(self) -> tuple[int, dict[str, int]]:
        """Tokens of answers that are here and not delivered, counted one by one, and the ledger's totals (law 6).

        At one moment: no answer arrives between the two counts.
        """
        with self._lock:
            groups = [g.completions for g in self._done.values()] + list(self._open.values())
            return sum(c.tokens for completions in groups for c in completions), self.ledger.totals()

    def take_activity(self) -> Activity:
        """What happened since the last call."""
        with self._lock:
            return self._meter.take()

    def reward_stats(self, groups: Sequence[Group] = ()) -> dict[str, float]:
        """What each reward gave in these groups, and did since the last call, where the scorer keeps account of it."""
        stats = getattr(self.scorer, "stats", None)
        return stats(groups) if stats is not None else {}

    def close(self) -> None:
        """Cancel what is open, close the session, end the thread. Safe to call twice and after a failure."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close)
            self._thread.join(20)
            assert not self._thread.is_alive(), "the loader's thread does not end"

    # ---- in the loop ----

    def _run_loop(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # handed to the trainer's thread, which raises it
            self._fail(error)
        finally:
            self._started.set()

    async def _main(self) -> None:
        async with self.client:
            for task in (asyncio.create_task(self._watch()), asyncio.create_task(self._tick())):
                self._tasks.add(task)
                task.add_done_callback(self._task_done)
            self._started.set()
            try:
                while not self._closing:
                    await self._wake.wait()
                    self._wake.clear()
                    try:
                        self._admit()
                    except Exception as error:  # the loop goes on until `close`: who calls meanwhile gets this error
                        self._fail(error)
            finally:
                # All of them, while the session is open: a group that failed has left its other completions running.
                rest = asyncio.all_tasks() - {asyncio.current_task()}
                for task in rest:
                    task.cancel()
                await asyncio.gather(*rest, return_exceptions=True)

    def _admit(self) -> None:
        while not self._over() and self.admission.may_admit():
            prompt = self.source.prompt(self._next_admitted)
            with self._ready:
                if prompt is None:
                    self._ended = True
                    self._ready.notify_all()
                    return
                self.admission.admit(self.group_size)
                self._open[self._next_admitted] = []
            task = asyncio.create_task(self._group(self._next_admitted, prompt))
            self._next_admitted += 1
            self._tasks.add(task)
            task.add_done_callback(self._task_done)

    def _over(self) -> bool:
        return self._closing or self._ended or self._ending is not None or self._failure is not None

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _group(self, index: int, prompt: Prompt) -> None:
        try:
            prompt, sessions = await begin(self.environments, prompt, self.group_size)
        except EpisodeLost as lost:
            with self._lock:
                for _ in range(self.group_size):
                    self.admission.close_request()
            why = f"discarded:{lost.reason}"
            never = [Completion(index, i, [], [], [], "", outcome=why) for i in range(self.group_size)]
            group = Group(index, prompt, [], lost.reason, never)
        else:
            results = await asyncio.gather(*(self._completion(index, prompt, i, s) for i, s in enumerate(sessions)))
            dropped = [c for c in results if c.outcome != IN_FLIGHT]
            group = Group(index, prompt, [c for c in results if c.outcome == IN_FLIGHT], dropped=dropped)
            if any(c.outcome == REFUSED for c in dropped):
                group.discarded = "refused"
            elif not group.completions:
                group.discarded = "invalid"
        try:
            group.discarded = self.judge(group) or group.discarded
        except StreamEnded as ending:  # the group stays among the open ones: nobody will ask for it
            with self._ready:
                self._ending = self._ending or ending  # those that come after the first only repeat it
                self._ready.notify_all()
            return
        with self._ready:
            del self._open[index]
            self._done[index] = group
            if group.discarded is not None:
                self.admission.hand_back()
            self._ready.notify_all()
        self._wake.set()

    async def _completion(self, group: int, prompt: Prompt, index: int, session: Session | None) -> Completion:
        """One completion of a group; with its outcome where it was dropped."""

        async def ask(ids: list[int], sampling: Sampling, turn: int) -> Sampled:
            request_id = f"{self.seed}-{group}-{index}" + (f"-{turn}" if turn else "")
            with self._lock:
                self._meter.opened()
            try:
                return await self.client.generate(
                    ids, seeded(sampling, self.seed if self.seeded else None, group, index, turn), request_id=request_id
                )
            finally:
                with self._lock:
                    self._meter.closed()

        def arrived(answer: Sampled) -> None:
            self._invalid_in_a_row = 0
            with self._lock:
                self.ledger.receive(len(answer.token_ids))
                extend(completion, answer)

        completion = Completion(group, index, [], [], [], "")
        with self._lock:
            self._open[group].append(completion)
        try:
            await play(completion, prompt, self.sampling, session, ask=ask, decode=self.decode, arrived=arrived)
        except RequestRefused as refused:
            self._drop(completion, REFUSED)
            self._refused += 1
            if self._refused <= REFUSALS_SHOWN:
                log.warning("row %s is left out: %s", prompt.row, refused)
            return completion
        except InvalidAnswer as invalid:
            self._drop(completion, f"discarded:invalid:{invalid.reason}", invalid.tokens)
            self._count_invalid(invalid)
            return completion
        except EpisodeLost as lost:
            self._drop(completion, f"discarded:{lost.reason}")
            return completion
        finally:
            if session is not None:
                await session.close()
            with self._lock:
                self.admission.close_request()
            self._wake.set()
        await self.scorer.score(prompt, completion)
        return completion

    def _drop(self, completion: Completion, account: str, unusable: int = 0) -> None:
        """A completion that cannot go on: what it has so far leaves the books here, as no step will consume it.

        unusable: tokens of its last answer, which are booked apart.
        """
        completion.outcome, completion.unusable, completion.finish_reason = account, unusable, ""
        with self._lock:
            self._open[completion.group] = [c for c in self._open[completion.group] if c is not completion]
            if completion.tokens:
                self.ledger.settle(account, completion.tokens)

    def _count_invalid(self, invalid: InvalidAnswer) -> None:
        with self._lock:
            self._meter.invalid()
            self.ledger.receive(invalid.tokens)
            self.ledger.settle(f"discarded:invalid:{invalid.reason}", invalid.tokens)
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row >= INVALID_IN_A_ROW:
            raise InvalidAnswer(
                f"{self._invalid_in_a_row} unusable answers in a row; the last: {invalid}",
                reason=invalid.reason,
                tokens=0,
            )

    async def _watch(self) -> None:
        while True:
            self.watch()
            await asyncio.sleep(WATCH_EVERY)

    async def _tick(self) -> None:
        while True:
            due = self._loop.time() + TICK
            await asyncio.sleep(TICK)
            with self._lock:
                self._meter.late(self._loop.time() - due)

    def _publish(self, version: int) -> None:
        try:
            self.admission.advance(version)
        except Exception as error:  # the loop would only log it
            self._fail(error)
        self._wake.set()

    def _close(self) -> None:
        self._closing = True
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        with self._ready:
            if self._failure is None and not self._closing:
                self._failure = error
            self._ready.notify_all()

    # ---- with the lock held ----

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
