"""A service as the reward: a judge, a reward model, a sandbox. One POST per completion.

    request   {"prompt": ..., "completion": ..., "columns": {...}}      columns that JSON has no form for go as text
    answer    {"reward": 0.5}                                           null is "not scored"

A service with another protocol: write a coroutine (docs/rewards.md has one).
"""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo.rewards.base import Reward, RewardError, RewardTimeoutError, to_number
from grpo.rewards.options import above, at_least
from grpo.types import Completion, Prompt

BACKOFF = 0.25  # seconds before the first retry; doubles, with jitter so that retries do not come in step
LARGEST = 2**20  # bytes of an answer, which is one number: what is longer is not read


@dataclass(kw_only=True)
class Http(Reward):
    """concurrency: requests at a time. timeout: seconds for a completion, retries included, queue excluded. retries: of
    5xx, 429 and broken connections; other statuses are errors at once. headers: e.g. an authorization."""

    KIND: ClassVar[str] = "http"
    INLINE: ClassVar[bool] = False

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    concurrency: int = 64
    timeout: float = 60.0
    retries: int = 3
    _session: Any = field(default=None, init=False)  # an aiohttp.ClientSession; imported when it is needed

    def check_options(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{self.key}.url={self.url!r}: expected http://host:port/path")
        at_least(1, self.key, concurrency=self.concurrency)
        at_least(0, self.key, retries=self.retries)
        above(0, self.key, timeout=self.timeout)

    async def start(self) -> None:
        import aiohttp

        # aiohttp would open 100 connections at most and end a request after 300 s: both limits are ours.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=self.headers
        )
        self._places = asyncio.Semaphore(self.concurrency)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def score(self, prompt: Prompt, completion: Completion) -> float | None:
        body = json.dumps(
            {"prompt": prompt.text, "completion": completion.text, "columns": prompt.columns}, default=str
        ).encode()
        failure = "no answer"
        async with self._places:
            try:
                async with asyncio.timeout(self.timeout):
                    for attempt in range(self.retries + 1):
                        if attempt:
                            await asyncio.sleep(BACKOFF * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
                        answer, failure = await self._post(body)
                        if answer is not None:
                            return self._value(answer)
            except TimeoutError:
                raise RewardTimeoutError(f"{self.url}: no reward within {self.timeout:g} s (last: {failure})") from None
        raise RewardError(f"{self.url}: {failure}, after {self.retries + 1} tries")

    async def _post(self, question: bytes) -> tuple[str | None, str]:
        """The text of a good answer, or None and why it is worth another try. Raises RewardError for a refusal."""
        import aiohttp

        assert self._session is not None, f"{self.key} has not been started"
        try:
            async with self._session.post(
                self.url, data=question, headers={"Content-Type": "application/json"}
            ) as response:
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > LARGEST:
                        raise RewardError(f"{self.url}: status {response.status}, an answer of over {LARGEST:,} bytes")
                text = body.decode(errors="replace")
                if response.status == 200:
                    return text, ""
                failure = f"status {response.status}: {text[:200]}"
                if response.status < 500 and response.status != 429:
                    raise RewardError(f"{self.url}: {failure}")
                return None, failure
        except (aiohttp.ClientError, ConnectionError) as error:
            return None, f"{type(error).__name__}: {error}"

    def _value(self, text: str) -> float | None:
        try:
            return to_number(json.loads(text)["reward"])
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(f'{self.url}: expected {{"reward": <number>}}, got {text[:200]!r} ({error})') from None
