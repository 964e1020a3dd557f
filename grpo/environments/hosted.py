"""Runs environments for the loader: `reset` and `step` with a deadline, away from the loop of the requests.

    with Hosted(kind, renderer, ...) as environments:
        prompt, sessions = await environments.begin(prompt, 8)      # eight fresh environments, one prompt
        observation = await sessions[0].step(answer, last_id)       # None: over
        sessions[0].earned                                          # the sum of the rewards so far

| a method that | runs in | when late |
| --- | --- | --- |
| is a coroutine | the event loop of a thread of its own (`grpo.rewards.side`), beside all others | is cancelled |
| is a plain function | a thread for this call alone | is left behind; the thread ends with the run |
| belongs to a shipped kind that only looks at text | the caller's loop | never |

So one that blocks stalls no request. Threads share the interpreter with the trainer: heavy Python belongs in a process
of the environment's own, or behind a service. Left out: killing a thread, which nothing can.
"""

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpo.environments.base import KEY, Environment, EnvironmentFailed, Kind, Messages
from grpo.environments.borders import Borders
from grpo.rewards.base import to_number
from grpo.rewards.side import SideLoop
from grpo.rollout.episode import EpisodeLost, Observation, Session
from grpo.tracebacks import own_traceback
from grpo.types import Prompt

log = logging.getLogger("grpo.environments")

PACKAGE = Path(__file__).parent
SHOWN = 3  # failures that are logged in full


class Hosted:
    """The environments of one data set. `max_prompt_tokens`: the longest prompt that `reset` may return."""

    def __init__(self, kind: Kind, borders: Borders, *, max_prompt_tokens: int) -> None:
        self.kind = kind
        self.borders = borders
        self.max_prompt_tokens = max_prompt_tokens
        self.failures = 0
        self._side: SideLoop | None = None
        self._slots: asyncio.Semaphore | None = None

    def __enter__(self) -> Self:
        if not self.kind.INLINE:
            self._side = SideLoop("environments")
            self._side.run(self._start(), timeout=150)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._side is not None:
            self._side.run(self.kind.close(), timeout=30)
            self._side.close()
            self._side = None

    async def _start(self) -> None:
        self._slots = asyncio.Semaphore(self.kind.concurrency)
        await self.kind.start()

    async def begin(self, prompt: Prompt, count: int) -> tuple[Prompt, list[Session | None]]:
        """Raises EpisodeLost when a reset fails and data.environment.on_error=discard, EnvironmentFailed otherwise."""
        sessions = [HostedSession(self, self.kind.make(), prompt.row) for _ in range(count)]
        begun = await asyncio.gather(*(s.reset(dict(prompt.columns)) for s in sessions))
        if any(messages != begun[0] for messages in begun):
            raise EnvironmentFailed(
                f"{KEY}: reset returned different messages for one row ({prompt.row}); completions of a group begin "
                "with one prompt, so what is random must come from the row"
            )
        if begun[0] is not None:
            text, ids = self.borders.prompt(begun[0])
            if not 1 <= len(ids) <= self.max_prompt_tokens:
                log.warning(
                    "row %s is left out: reset returned %d tokens, data.max_prompt_tokens=%d",
                    prompt.row, len(ids), self.max_prompt_tokens,
                )  # fmt: skip
                raise EpisodeLost("too_long", f"the prompt of row {prompt.row} has {len(ids)} tokens")
            prompt = Prompt(prompt.index, prompt.row, text, ids, prompt.columns)
        return prompt, [*sessions]

    async def call(self, method: Callable[..., Any], *args: Any, row: str) -> Any:
        """The method's value. Raises EnvironmentFailed, or EpisodeLost where failures are not to end the run."""
        try:
            if self._side is None:
                return method(*args)
            return await self._side.submit(self._outside(method, *args))
        except EnvironmentFailed as failure:
            self.fail(failure, row)
        raise AssertionError("unreachable")

    def fail(self, failure: Exception, row: str) -> None:
        """Raises what a failure means."""
        message = f"{KEY} failed on row {row}: {failure}"
        if self.kind.on_error == "raise":
            raise EnvironmentFailed(message) from failure
        self.failures += 1
        if self.failures <= SHOWN:
            log.warning("%s; the completion is left out", message)
        raise EpisodeLost("environment", message) from failure

    async def _outside(self, method: Callable[..., Any], *args: Any) -> Any:
        assert self._slots is not None
        async with self._slots:
            deadline = asyncio.timeout(None if self.kind.OWN_DEADLINE else self.kind.timeout)
            try:
                async with deadline:
                    return await (method(*args) if inspect.iscoroutinefunction(method) else in_thread(method, *args))
            except Exception as error:
                late = f"no answer within {self.kind.timeout:g} s"
                raise EnvironmentFailed(late if deadline.expired() else own_traceback(error, PACKAGE)) from error


class HostedSession:
    """One completion's environment."""

    def __init__(self, host: Hosted, environment: Environment, row: str) -> None:
        self.host = host
        self.environment = environment
        self.row = row
        self.max_turns = host.kind.max_turns
        self.max_turn_tokens = host.kind.max_turn_tokens
        self.earned: float | None = 0.0

    async def reset(self, columns: dict[str, Any]) -> Messages | None:
        messages: Any = await self.host.call(self.environment.reset, columns, row=self.row)
        try:
            check_messages(messages, "reset", none=True)
        except EnvironmentFailed as failure:
            self.host.fail(failure, self.row)
        result: Messages | None = messages
        return result

    async def step(self, answer: str, last_id: int) -> Observation | None:
        value = await self.host.call(self.environment.step, answer, row=self.row)
        try:
            observation, reward, done = parse_step(value)
            self.earned = None if reward is None or self.earned is None else self.earned + reward
            return None if done else self.host.borders.observation(observation, last_id)
        except EnvironmentFailed as failure:
            self.host.fail(failure, self.row)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            await self.host.call(close, row=self.row)


def parse_step(value: Any) -> tuple[Messages, float | None, bool]:
    """Checks what `step` returned. Raises EnvironmentFailed."""
    if not isinstance(value, tuple | list) or len(value) != 3:
        raise EnvironmentFailed(f"step returned {_short(value)}; expected (observation, reward, done)")
    observation, reward, done = value
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"step returned done={_short(done)}; expected true or false")
    check_messages(observation, "step", none=done)
    try:
        return observation if observation is not None else "", to_number(reward), done
    except ValueError as error:
        raise EnvironmentFailed(f"step's reward: {error}") from error


def check_messages(value: Any, method: str, *, none: bool) -> None:
    """Raises EnvironmentFailed for what is neither text nor chat messages."""
    if (value is None and none) or isinstance(value, str):
        return
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
        raise EnvironmentFailed(f"{method} returned {_short(value)}; expected a text or a list of chat messages")


def in_thread(function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
    """The call in a daemon thread of its own: one that never returns keeps neither others nor the exit waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as raised:  # SystemExit too: an environment does not end the run in silence
            error = raised if isinstance(raised, Exception) else RuntimeError(f"{type(raised).__name__}: {raised}")
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the run has ended meanwhile
            return

    threading.Thread(target=work, name="environment", daemon=True).start()
    return future


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
