"""The only file that speaks HTTP: token ids out, token ids, logprobs and weight versions back.

Laws kept here: tokens in, tokens out (3): ids are sent and received as numbers, no text is ever re-encoded. The ratio
means what it says (4): every sampling parameter is named in every request, so that no default of the server's
(generation_config.json) is in force. Nothing is swallowed (7): every call has a deadline, every status is looked at,
an answer is checked field by field before anything is made of it.

One `Client` lives in one event loop and owns one session. Requests go to the server with the fewest open ones; which
servers get any is the roster's.
"""

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from grpo.rollout.errors import InvalidAnswer, RequestRefused, ServerError, ServersLost, TransientError
from grpo.rollout.roster import Member, Roster
from grpo.types import Sampling

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0
BACKOFF_FIRST, BACKOFF_MOST = 0.2, 10.0  # seconds; doubled after each try, with jitter
# uvicorn closes an idle socket after 5 s; one that we believe open is a dropped request.
KEEPALIVE = 3.0
RETRIED_STATUSES = (408, 425, 429)  # besides 5xx
BODY_SHOWN = 800  # characters of an error's body that go into a message
RETRIES_SHOWN_EVERY = 30.0  # seconds between two lines of the log about requests that are sent again


@dataclass(slots=True)
class Sampled:
    """What a server sampled for one request; one logprob and one version per token."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str


class Client:
    """HTTP to one or several vLLM servers.

    urls: "http://host:port", one per server. api_key: sent as a bearer token. request_timeout: seconds for one
    generation, queueing at the server included. retries: how often a transient failure is tried again.
    vocab_size: a token id outside it is an invalid answer.

    `gone` is asked after a failure whether the server is gone, rather than one request lost: why, or None. `patient`
    grants a death time to show. Whoever sets it sees to it that a server that is out comes back (`Revival`).
    """

    def __init__(
        self,
        urls: list[str],
        *,
        vocab_size: int,
        request_timeout: float = 1800.0,
        retries: int = 5,
        api_key: str | None = None,
    ) -> None:
        self.roster = Roster(urls)
        self.gone: Callable[[str, bool], Awaitable[str | None]] | None = None
        self.vocab_size = vocab_size
        self.request_timeout = request_timeout
        self.retries = retries
        self.retried = 0  # requests sent again, for the metrics
        self.answered = 0
        self.waiting = 0  # calls of `generate` that have no answer yet: lost if the run ends here
        self._retries_shown, self._retried_shown = -RETRIES_SHOWN_EVERY, 0
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._jitter = random.Random(0)

    async def __aenter__(self) -> Self:
        # aiohttp's defaults would cut us: 100 connections, 300 s in total.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
            headers=self._headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        url: str,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        timeout: float,
        limit: int = 16 << 20,
    ) -> Any:
        """One HTTP call; the parsed JSON body ({} when empty). Raises a `ServerError` for all that is not a 2xx."""
        assert self._session is not None, "the client is not open"
        where = f"{method} {url}{path}"
        try:
            async with self._session.request(
                method,
                url + path,
                json=body,
                params=params,
                allow_redirects=False,  # else a POST would go, prompt and all, to whom the answer names
                timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_TIMEOUT),
            ) as response:
                if response.status >= 300:
                    text = (await response.content.read(BODY_SHOWN * 4)).decode("utf-8", "replace")
                    response.close()  # the rest of the body may be long, or never come: the connection is given up
                    message = f"{where}: status {response.status}: {text[:BODY_SHOWN]}"
                    if response.status >= 500 or response.status in RETRIED_STATUSES:
                        raise TransientError(message)
                    if response.status >= 400:
                        raise RequestRefused(message)
                    where = f"{message} (to {response.headers.get('Location')}; redirects are not followed"
                    raise ServerError(f"{where}: rollout.urls name the server itself)")
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > limit:
                        raise ServerError(f"{where}: answer larger than {limit} bytes")
        except TimeoutError as error:
            raise TransientError(f"{where}: no answer within {timeout:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TransientError(f"{where}: {type(error).__name__}: {error}") from error
        try:
            return json.loads(answer) if answer.strip() else {}
        except (ValueError, RecursionError) as error:  # the other one: nested without end
            raise TransientError(f"{where}: the answer is not JSON: {bytes(answer[:BODY_SHOWN])!r}") from error

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str, url: str | None = None
    ) -> Sampled:
        """Sample one completion; transient failures are tried again with backoff, on another server if there is one.

        `url` insists on one server, in or out.

        Raises RequestRefused (4xx), InvalidAnswer (the answer cannot be trained on) or ServersLost (retries used up).
        A retry repeats the same seed and is the same request: it is answered to the caller exactly once. What a server
        that is gone has taken with it, or one with other weights than ours has answered, is sampled again, and costs no
        try.
        """
        body = {"request_id": request_id, "token_ids": prompt_ids, "sampling_params": sampling_params(sampling)}
        limit = (1 << 20) + 2048 * sampling.max_tokens
        self.waiting += 1
        try:
            return await self._insist(body, sampling, request_id, limit, url)
        finally:
            self.waiting -= 1

    async def _insist(
        self, body: dict[str, Any], sampling: Sampling, request_id: str, limit: int, url: str | None
    ) -> Sampled:
        """As `generate`."""
        tries = 0
        delay = BACKOFF_FIRST
        while True:
            member = self.roster.member(url.rstrip("/")) if url is not None else await self.roster.choose()
            floor = self.roster.confirmed if url is None and self.gone is not None else None
            member.open += 1
            try:
                work = self.call(
                    member.url, "POST", "/inference/v1/generate", body=body, timeout=self.request_timeout, limit=limit
                )
                answer = await (work if url is not None else member.while_in(work))
                sampled = self._ours(answer, sampling, member, floor)
                if sampled.finish_reason == "abort":
                    raise TransientError(f"{member.url}: the server aborted request {request_id}")
                member.failures = 0
                self.answered += 1
                return sampled
            except TransientError as error:
                member.failures += 1
                tries += 1
                if url is None and await self._is_gone(member, patient=tries > self.retries):
                    tries, delay = 0, BACKOFF_FIRST
                elif tries > self.retries:
                    lost = f"{self.waiting} open request(s) lost"
                    raise ServersLost(f"request given up after {tries} tries, {lost}; the last: {error}") from error
                self._note_retry(request_id, error)
            finally:
                member.open -= 1
            await asyncio.sleep(delay * (0.5 + self._jitter.random()))
            delay = min(2 * delay, BACKOFF_MOST)

    def _ours(self, answer: Any, sampling: Sampling, member: Member, floor: int | None) -> Sampled:
        """The answer, checked. One that other weights than ours gave puts its server out and is a TransientError."""
        try:
            sampled = parse_answer(answer, max_tokens=sampling.max_tokens, vocab_size=self.vocab_size)
            if not sampled.versions or not self.roster.foreign(sampled.versions, floor):  # no versions: an abort
                return sampled
            versions = f"version {min(sampled.versions)}"
        except InvalidAnswer as invalid:
            if invalid.reason != "weight_versions:value" or floor is None:
                raise
            versions = "no version of this run"
        why = f"its tokens are of {versions}, it should have version {floor}: it was started again, or others sync it"
        self.roster.exclude(member.url, why)
        raise TransientError(f"{member.url}: {why}")

    async def _is_gone(self, member: Member, *, patient: bool) -> bool:
        """Whether the server is out by now, because it was so already or because it is gone."""
        if member.out is None and self.gone is not None and (why := await self.gone(member.url, patient)) is not None:
            self.roster.exclude(member.url, why)
        return member.out is not None

    def _note_retry(self, request_id: str, error: TransientError) -> None:
        self.retried += 1
        log.debug("request %s is sent again: %s", request_id, error)
        now = time.monotonic()
        if now - self._retries_shown >= RETRIES_SHOWN_EVERY:
            log.info("%d request(s) sent again; the last: %s", self.retried - self._retried_shown, error)
            self._retries_shown, self._retried_shown = now, self.retried


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    """Every parameter that shapes vLLM's sampling distribution or its stopping, by name, neutral unless chosen.

    A name that vLLM does not know is ignored without a word; `tests/test_client_real.py` sees each take effect.
    """
    named = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "bad_words": [],
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # the sampled token's own logprob, no alternatives
        "detokenize": bool(sampling.stop),  # stop strings need text; nothing else here does
    }
    return named if sampling.seed is None else {**named, "seed": sampling.seed}


def parse_answer(answer: Any, *, max_tokens: int, vocab_size: int) -> Sampled:
    """Check a `/inference/v1/generate` answer field by field. Raises InvalidAnswer with the ledger's reason."""

    def invalid(reason: str, what: str, tokens: int = 0) -> InvalidAnswer:
        return InvalidAnswer(f"/inference/v1/generate: {what}", reason=reason, tokens=tokens)

    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise invalid("choices", "the answer has not exactly one choice")
    choice = choices[0]
    ids = choice.get("token_ids")
    reason = choice.get("finish_reason")
    if reason == "abort":
        return Sampled([], [], [], "abort")
    if not isinstance(ids, list) or not ids:
        raise invalid("token_ids", "field token_ids is missing or empty; the server must be vLLM >= 0.32")
    n = len(ids)
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise invalid("token_ids", f"field token_ids holds something that is no id below {vocab_size}", n)
    if n > max_tokens:
        raise invalid("token_ids", f"field token_ids has {n} entries, max_tokens is {max_tokens}", n)
    if reason not in ("stop", "length"):
        raise invalid("finish_reason", f"field finish_reason is {reason!r}, expected 'stop' or 'length'", n)
    logprobs = _logprobs(choice.get("logprobs"), ids, invalid)
    versions = _versions(choice.get("weight_versions"), n, invalid)
    return Sampled(ids, logprobs, versions, reason)


def _logprobs(field: Any, ids: list[int], invalid: Any) -> list[float]:
    n = len(ids)
    flag = "the server must run with --logprobs-mode processed_logprobs"
    content = field.get("content") if isinstance(field, dict) else None
    if not isinstance(content, list):
        raise invalid("logprobs:missing", f"field logprobs.content is missing; {flag}", n)
    if len(content) != n:
        raise invalid("logprobs:length", f"field logprobs.content has {len(content)} entries for {n} tokens; {flag}", n)
    values: list[float] = []
    for token, entry in zip(ids, content, strict=True):
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid("logprobs:null", f"field logprobs.content holds {value!r} for a logprob; {flag}", n)
        if not math.isfinite(value) or value > 1e-3 or value <= -9999.0:  # vLLM writes -inf as -9999.0
            what = f"field logprobs.content holds {value!r}, expected a finite logprob"
            raise invalid("logprobs:value", f"{what}; {flag}", n)
        if entry.get("token_id", token) != token:
            raise invalid("logprobs:token", "field logprobs.content is of other tokens than field token_ids", n)
        values.append(float(value))
    return values


def _versions(spans: Any, n: int, invalid: Any) -> list[int]:
    hint = "the server must be vLLM >= 0.32 in dev mode (VLLM_SERVER_DEV_MODE=1) and synced by this run"
    if not isinstance(spans, list) or not spans:
        raise invalid("weight_versions:missing", f"field weight_versions is missing or empty; {hint}", n)
    versions: list[int] = []
    for span in spans:
        try:
            version, start, end = int(span["version"]), span["start"], span["end"]
        except (TypeError, KeyError, ValueError):
            raise invalid("weight_versions:value", f"field weight_versions holds {span!r}; {hint}", n) from None
        if type(start) is not int or type(end) is not int or start != len(versions) or not start < end <= n:
            raise invalid(
                "weight_versions:spans", f"field weight_versions does not cover the {n} tokens: {spans}; {hint}", n
            )
        versions.extend([version] * (end - start))
    if len(versions) != n:
        raise invalid("weight_versions:spans", f"field weight_versions covers {len(versions)} of {n} tokens; {hint}", n)
    return versions
