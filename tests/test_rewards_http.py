"""A service as a reward, against a real one on this machine that stumbles, fails and hangs."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from reward_tools import completion, make, row, score, score_all

from grpo.rewards import RewardError


class Service:
    """A judge on a free port. `answers`: (status, body) or seconds to wait, one per request, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[Any] = []
        self.open = self.most_open = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if answer == "drop":
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = (200, {"reward": 1})
            status, body = answer
            return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))
        finally:
            self.open -= 1


def ask(service: Service, *texts: str, **options: Any) -> list[float | None]:
    completions = [completion(text) for text in texts]

    async def go() -> None:
        app = web.Application()
        app.router.add_post("/judge", service.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        rewards = make("http", url=f"http://{host}:{port}/judge", **options)
        try:
            with rewards:
                await score_all(rewards, completions, row(level=3, image=object))
        finally:
            await runner.cleanup()

    asyncio.run(go())
    return [c.reward for c in completions]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.rewards.http.BACKOFF", 0.001)


def test_a_service_is_sent_the_texts_and_the_columns() -> None:
    service = Service((200, {"reward": 0.25}))
    assert ask(service, "عربي") == [0.25]
    (sent,) = service.requests
    assert sent["prompt"] == "question"
    assert sent["completion"] == "عربي"
    assert sent["columns"] == {"answer": "4", "level": 3, "image": "<class 'object'>"}


def test_a_service_may_decline_to_score() -> None:
    assert ask(Service((200, {"reward": None})), "4") == [None]


def test_a_service_that_stumbles_is_asked_again() -> None:
    service = Service((503, "busy"), "drop", (429, "slow down"), (200, {"reward": 1}))
    assert ask(service, "4") == [1.0]
    assert len(service.requests) == 4


@pytest.mark.parametrize(
    ("answer", "message", "requests"),
    [
        ((500, "trouble"), r"status 500: trouble, after 3 tries", 3),
        ((404, "nobody"), r"status 404: nobody", 1),
        ((200, "no json"), r"expected \{\"reward\": <number>\}, got 'no json'", 1),
        ((200, {"score": 1}), r"expected \{\"reward\": <number>\}", 1),
        ((200, '{"reward": NaN}'), r"returned nan", 1),
        ((200, {"reward": "1"}), r"returned a text", 1),
        ((200, {"reward": 10**400}), r"beyond every float", 1),
        ((200, '{"reward": 1}' + " " * 2**20), r"status 200, an answer of over 1,048,576 bytes", 1),
        ((500, "x" * (2**20 + 1)), r"status 500, an answer of over", 1),
        (30.0, r"no reward within 0.3 s", 1),
    ],
)
def test_a_service_that_fails_is_an_error_or_not_scored(answer: Any, message: str, requests: int) -> None:
    service = Service(answer)
    with pytest.raises(RewardError, match=message):
        ask(service, "4", retries=2, timeout=0.3 if answer == 30.0 else 20)
    assert len(service.requests) == requests
    assert ask(Service(answer), "4", retries=0, timeout=0.3, on_error="unscored") == [None]


def test_a_service_that_is_down_is_named() -> None:
    with pytest.raises(RewardError, match=r"http://127.0.0.1:9/judge: ClientConnector.*after 2 tries"):
        score(make("http", url="http://127.0.0.1:9/judge", retries=1), "4")


def test_a_service_has_no_more_requests_than_it_is_given() -> None:
    service = Service(0.02)
    assert ask(service, *("4",) * 20, concurrency=3) == [1.0] * 20
    assert service.most_open == 3
