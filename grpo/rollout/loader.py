"""The async rollout loader: keeps the servers busy while the trainer steps, and hands over groups in stream order.

It owns one thread with one event loop, in which everything asynchronous lives: the HTTP session, the admission, one
task per group, the rewards. The trainer's thread only calls the methods under "called from the trainer's thread";
a group that has been handed over is never touched here again.

| who waits | for | unblocked by | deadline |
| --- | --- | --- | --- |
| admission task | a place: a new version, a finished request, a handed-back place | `_wake` | none: idle is legal |
| a request | its answer | the server | request_timeout x retries |
| trainer in `next_groups` | the next groups in order | `_ready`: a group done, a failure, the end | `timeout` |
| trainer in `run` | a coroutine | the loop, or a failure | `timeout` |

An exception in any task is kept and raised in the trainer's thread at its next call (law 7); nothing is retried here.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from grpo.ledger import Ledger
from grpo.rollout.admission import Admission
from grpo.rollout.client import Client
from grpo.rollout.errors import InvalidAnswer, RequestRefused
from grpo.types import Completion, Group, Prompt, PromptSource, Sampling

T = TypeVar("T")

WATCH_EVERY = 0.5  # seconds between looks at the servers' processes
LOOK_EVERY = 0.5  # seconds between a waiting trainer's looks for a signal
INVALID_IN_A_ROW = 8  # unusable answers in a row that stop the run: the server is set up wrongly


class Scorer(Protocol):
    """Scores a completion in place: sets `reward` (None = not scored) and `rewards`."""

    async def score(self, prompt: Prompt, completion: Completion) -> None: ...


class StreamEnded(Exception):  # noqa: N818 (an ending, not an error)
    """There are no more groups: the data set's epochs are over."""


@dataclass(slots=True)
class Activity:
    """How busy the servers were. Written in the loop, read and reset by the trainer under the loader's lock."""

    requests: int = 0
    invalid: int = 0
    busy_s: float = 0.0  # seconds with at least one open request
    open_s: float = 0.0  # integral of open requests over time
    since: float = field(default_factory=time.monotonic)


class Loader:
    """See the module's docstring.

    source: the prompt stream. client: not yet entered; the loop enters and closes it. scorer: the rewards.
    sampling: everything but the seed, which is made from (seed, group, index); the seed is left out when
    `seeded` is false (a per-request generator costs a GPU server time).
    judge: tells why a finished group must leave the stream (equal rewards), or None to keep it.
    start_group: place in the stream of the first group (after a resume: groups consumed). watch: called twice a
    second, raises when a server process has died.
    """

    def __init__(
        self,
        *,
        source: PromptSource,
        client: Client,
        scorer: Scorer,
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
        self._next_admitted = start_group
        self._next_delivered = start_group
        self._done: dict[int, Group] = {}
        self._open: dict[int, list[Completion]] = {}  # answers of groups that are not complete yet
        self._ended = False
        self._failure: BaseException | None = None
        self._closing = False
        self._invalid_in_a_row = 0
        self._activity = Activity()
        self._last_change = time.monotonic()
        self._lock = threading.Lock()  # guards _done, _open, _ended, _failure, _activity
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

        Fewer when the stream ends; StreamEnded when it has ended before the first. Raises what failed in the
        loop, or TimeoutError when nothing at all finished for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        taken: list[Group] = []
        kept = 0
        with self._ready:
            while kept < count:
                self._raise_failure()
                self.interrupted()
                group = self._done.pop(self._next_delivered, None)
                if group is not None:
                    taken.append(group)
                    kept += group.discarded is None
                    self._next_delivered += 1
                    deadline = time.monotonic() + timeout
                elif self._ended and self._next_delivered >= self._next_admitted:
                    if not taken:
                        raise StreamEnded
                    break
                elif time.monotonic() >= deadline:
                    raise TimeoutError(f"no group finished within {timeout:g} s; {self._where()}")
                else:  # short, because a signal handler may not take the lock to wake us
                    self._ready.wait(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))
        return taken

    def run(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine in the loop and wait for it; a failure elsewhere in the loop ends the wait too."""
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
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"not done within {timeout:g} s; {self._where()}") from None
        finally:
            future.cancel()

    def sample(
        self,
        prompts: list[Prompt],
        sampling: Sampling,
        count: int,
        timeout: float,
        *,
        score: bool = True,
        url: str | None = None,
    ) -> list[list[Completion]]:
        """Completions outside the stream (evaluation, probes): `count` per prompt, never in the ledger.

        The seeds depend on the prompts' places in the list only, so every evaluation draws the same random numbers.
        `url` names the server to ask; by default the least busy one.
        """

        async def one(position: int, prompt: Prompt, index: int) -> Completion:
            seeded = self._with_seed(sampling, f"sample-{position}", index)
            answer = await self.client.generate(
                prompt.token_ids,
                seeded,
                request_id=f"sample-{self.seed}-{position}-{index}-{time.monotonic_ns()}",
                url=url,
            )
            completion = Completion(-1, index, answer.token_ids, answer.logprobs, answer.versions, answer.finish_reason)
            completion.text = self.decode(answer.token_ids)
            if score:
                await self.scorer.score(prompt, completion)
            return completion

        async def everything() -> list[list[Completion]]:
            flat = await asyncio.gather(*(one(p, prompt, i) for p, prompt in enumerate(prompts) for i in range(count)))
            return [flat[p * count : (p + 1) * count] for p in range(len(prompts))]

        return self.run(everything(), timeout)

    def check(self) -> None:
        """Raise what has failed in the loop, if anything has."""
        with self._lock:
            self._raise_failure()

    def balance(self) -> tuple[int, dict[str, int]]:
        """Tokens of answers that are here and not delivered, counted one by one, and the ledger's totals (law 6).

        At one moment: no answer arrives between the two counts.
        """
        with self._lock:
            groups = [g.completions for g in self._done.values()] + list(self._open.values())
            return sum(len(c.token_ids) for completions in groups for c in completions), self.ledger.totals()

    def take_activity(self) -> Activity:
        """What happened since the last call."""
        with self._lock:
            self._account_open()
            taken, self._activity = self._activity, Activity()
            return taken

    def close(self) -> None:
        """Cancel what is open, close the session, end the thread. Safe to call twice and after a failure."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._close)
            self._thread.join(20)
            assert not self._thread.is_alive(), "the loader's thread does not end"

    # ---- in the loop ----

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # handed to the trainer's thread, which raises it
            self._fail(error)
        finally:
            self._started.set()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _main(self) -> None:
        async with self.client:
            watcher = asyncio.create_task(self._watch())
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
                for task in (watcher, *self._tasks):
                    task.cancel()
                await asyncio.gather(watcher, *self._tasks, return_exceptions=True)

    def _admit(self) -> None:
        while not self._closing and not self._ended and self._failure is None and self.admission.may_admit():
            prompt = self.source.prompt(self._next_admitted)
            with self._ready:
                if prompt is None:
                    self._ended = True
                    self._ready.notify_all()
                    return
                self._account_open()
                self.admission.admit(self.group_size)
                self._open[self._next_admitted] = []
            task = asyncio.create_task(self._group(self._next_admitted, prompt))
            self._next_admitted += 1
            self._tasks.add(task)
            task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _group(self, index: int, prompt: Prompt) -> None:
        results = await asyncio.gather(*(self._completion(index, prompt, i) for i in range(self.group_size)))
        group = Group(index, prompt, [c for c in results if isinstance(c, Completion)])
        refused = next((r for r in results if isinstance(r, RequestRefused)), None)
        if refused is not None:
            group.discarded = "refused"
        elif not group.completions:
            group.discarded = "invalid"
        else:
            group.discarded = self.judge(group)
        with self._ready:
            del self._open[index]
            self._done[index] = group
            if group.discarded is not None:
                self.admission.hand_back()
            self._ready.notify_all()
        self._wake.set()

    async def _completion(self, group: int, prompt: Prompt, index: int) -> Completion | RequestRefused | None:
        """One completion of a group; None when its answer could not be used, the error when it was refused."""
        try:
            answer = await self.client.generate(
                prompt.token_ids,
                self._with_seed(self.sampling, group, index),
                request_id=f"{self.seed}-{group}-{index}",
            )
            self._invalid_in_a_row = 0
        except RequestRefused as refused:
            return refused
        except InvalidAnswer as invalid:
            self._count_invalid(invalid)
            return None
        finally:
            with self._lock:
                self._account_open()
                self.admission.close_request()
                self._activity.requests += 1
            self._wake.set()
        completion = Completion(group, index, answer.token_ids, answer.logprobs, answer.versions, answer.finish_reason)
        with self._lock:
            self.ledger.receive(len(completion.token_ids))
            self._open[group].append(completion)
        completion.text = self.decode(completion.token_ids)
        await self.scorer.score(prompt, completion)
        return completion

    def _count_invalid(self, invalid: InvalidAnswer) -> None:
        with self._lock:
            self._activity.invalid += 1
            self.ledger.receive(invalid.tokens)
            self.ledger.settle(f"discarded:invalid:{invalid.reason}", invalid.tokens)
        self._invalid_in_a_row += 1
        if self._invalid_in_a_row >= INVALID_IN_A_ROW:
            raise InvalidAnswer(
                f"{self._invalid_in_a_row} unusable answers in a row; the last: {invalid}",
                reason=invalid.reason,
                tokens=0,
            )

    def _with_seed(self, sampling: Sampling, group: int | str, index: int) -> Sampling:
        """A seed of its own for every completion: equal prompt and seed would give equal completions."""
        digest = hashlib.blake2b(f"{self.seed}/{group}/{index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 11  # 53 bits: exact in any JSON reader
        return Sampling(
            sampling.temperature,
            sampling.max_tokens,
            seed if self.seeded else None,
            sampling.stop,
            sampling.stop_token_ids,
        )

    async def _watch(self) -> None:
        try:
            while True:
                self.watch()
                await asyncio.sleep(WATCH_EVERY)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    def _publish(self, version: int) -> None:
        self.admission.advance(version)
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

    def _account_open(self) -> None:
        now = time.monotonic()
        elapsed, self._last_change = now - self._last_change, now
        self._activity.open_s += elapsed * self.admission.open_requests
        self._activity.busy_s += elapsed * (self.admission.open_requests > 0)

    def _where(self) -> str:
        """Where each side waits, for a message."""
        admission = self.admission
        return (
            f"{admission.open_requests} requests open, {len(self._open)} groups unfinished, {len(self._done)} groups "
            f"finished out of order, next in order is group {self._next_delivered}, "
            f"{admission.places} of {admission.limit} places taken at version {admission.version}"
        )
