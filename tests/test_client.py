"""The client against the fake server: what is sent, what is accepted, what is tried again."""

import asyncio
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from fake_faults import Edit, Fault, chosen, finish, huge, logprob, missing, null, short, version
from fake_server import FakeServer
from tiny import save_tiny_model

from grpo.rollout import client as client_module
from grpo.rollout.client import Client, Sampled, parse_answer, sampling_params
from grpo.rollout.errors import InvalidAnswer, RequestRefused, ServerError, ServersLost, TransientError
from grpo.types import Sampling

VOCAB = 57
PROMPT = [3, 4, 5, 6]
SAMPLING = Sampling(temperature=1.0, max_tokens=6, seed=11, stop_token_ids=(1,))


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


def with_client(urls: list[str], work: Callable[[Client], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    async def go() -> Any:
        async with Client(urls, vocab_size=VOCAB, **options) as client:
            return await work(client)

    return asyncio.run(go())


def sync(server: FakeServer, label: str = "0") -> None:
    """Give the server a version number, as the first sync of a run does."""

    async def go(client: Client) -> None:
        await client.call(server.url, "POST", "/start_weight_update", timeout=60)
        await client.call(server.url, "POST", "/finish_weight_update", body={"weight_version": label}, timeout=60)

    with_client([server.url], go)


def generate(server: FakeServer, **options: Any) -> Sampled:
    return with_client(
        [server.url], lambda c: c.generate(PROMPT, SAMPLING, request_id="r"), request_timeout=60, **options
    )


def test_ids_logprobs_and_versions_come_back_one_per_token(server: FakeServer) -> None:
    sync(server, "7")
    sampled = generate(server)
    assert len(sampled.token_ids) == len(sampled.logprobs) == len(sampled.versions)
    assert set(sampled.versions) == {7}
    assert sampled.finish_reason in ("stop", "length")
    assert server.requests()[-1].body["token_ids"] == PROMPT


def test_every_sampling_parameter_is_named_so_a_servers_defaults_have_no_effect(tiny_dir: Path) -> None:
    with (
        FakeServer(tiny_dir) as plain,
        FakeServer(tiny_dir, sampling_defaults={"repetition_penalty": 1.5, "top_k": 2, "temperature": 0.1}) as odd,
    ):
        sync(plain), sync(odd)
        assert generate(plain) == generate(odd)


def test_a_token_whose_text_encodes_differently_arrives_as_it_was_sampled(server: FakeServer) -> None:
    sync(server)
    server.add_fault(Fault("generate", edit=chosen([53, 55, 1], [-1.0, -2.0, -0.5])))
    assert generate(server).token_ids == [53, 55, 1]


# What a server may have been started without, by the field that is then missing or wrong (CASES 2).
FLAGS = {"logprobs": "--logprobs-mode processed_logprobs", "weight_versions": "VLLM_SERVER_DEV_MODE=1"}


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (missing("token_ids"), "token_ids"),
        (null("token_ids"), "token_ids"),
        (chosen([]), "token_ids"),
        (chosen([5, VOCAB]), "token_ids"),
        (chosen([5] * 7), "token_ids"),
        (missing("logprobs"), "logprobs:missing"),
        (null("logprobs"), "logprobs:missing"),
        (short("logprobs"), "logprobs:length"),
        (logprob(None), "logprobs:null"),
        (logprob(math.nan), "logprobs:value"),
        (logprob(-math.inf), "logprobs:value"),
        (logprob(-9999.0), "logprobs:value"),
        (logprob(0.5), "logprobs:value"),
        (missing("weight_versions"), "weight_versions:missing"),
        (null("weight_versions"), "weight_versions:missing"),
        (short("weight_versions"), "weight_versions:spans"),
        (version("default"), "weight_versions:value"),
        (finish("error"), "finish_reason"),
        (null("finish_reason"), "finish_reason"),
    ],
)
def test_an_answer_that_cannot_be_trained_is_refused_with_its_reason(
    server: FakeServer, edit: Edit, reason: str
) -> None:
    sync(server)
    server.add_fault(Fault("generate", edit=edit))
    with pytest.raises(InvalidAnswer) as caught:
        generate(server)
    assert caught.value.reason == reason
    field = reason.partition(":")[0]
    assert f"field {field}" in str(caught.value)
    assert FLAGS.get(field, "") in str(caught.value)


@pytest.mark.parametrize(
    "spans", [[(0, 2), (0, 2)], [(0, 2), (3, 4)], [(0, 1), (1, 5)], [(0, 0), (0, 4)], [(2, 4), (0, 2)]]
)
def test_versions_must_cover_each_token_once_and_in_order(spans: list[tuple[int, int]]) -> None:
    answer = {
        "choices": [
            {
                "token_ids": [5, 6, 7, 1],
                "finish_reason": "stop",
                "logprobs": {"content": [{"logprob": -1.0}] * 4},
                "weight_versions": [{"version": "3", "start": start, "end": end} for start, end in spans],
            }
        ]
    }
    with pytest.raises(InvalidAnswer) as caught:
        parse_answer(answer, max_tokens=9, vocab_size=VOCAB)
    assert caught.value.reason == "weight_versions:spans"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("generate", status=500, times=1),
        Fault("generate", status=503, times=2),
        Fault("generate", drop=True, times=1),
        Fault("generate", cut=0.5, times=1),
        Fault("generate", raw=b"{not json", times=1),
        Fault("generate", raw=b"[" * 200_000, times=1),
        Fault("generate", edit=finish("abort"), times=1),
    ],
    ids=["500", "503 twice", "dropped", "cut in the middle", "malformed", "nested", "aborted"],
)
def test_a_transient_failure_is_tried_again_with_the_same_seed(server: FakeServer, fault: Fault) -> None:
    sync(server)
    expected = generate(server)
    times = fault.times
    server.add_fault(fault)
    assert generate(server) == expected
    bodies = [call.body for call in server.requests()][1:]
    assert len(bodies) == 1 + (times or 0)
    assert all(body == bodies[0] for body in bodies)


def test_a_refused_request_is_not_tried_again(server: FakeServer) -> None:
    sync(server)
    server.add_fault(Fault("generate", status=400))
    with pytest.raises(RequestRefused, match="status 400"):
        generate(server)
    assert len(server.requests()) == 1


def test_retries_are_bounded_and_the_error_names_server_and_status(server: FakeServer) -> None:
    server.add_fault(Fault("generate", status=502))
    with pytest.raises(ServersLost, match=rf"3 tries, 1 open request\(s\) lost.*{server.port}.*502"):
        generate(server, retries=2)
    assert len(server.requests()) == 3


def test_no_answer_within_the_deadline_is_transient(server: FakeServer) -> None:
    server.add_fault(Fault("generate", hang=True))
    with pytest.raises(ServersLost, match=r"no answer within 0.2 s"):
        with_client(
            [server.url], lambda c: c.generate(PROMPT, SAMPLING, request_id="r"), request_timeout=0.2, retries=0
        )


def test_an_answer_larger_than_the_limit_is_not_read(server: FakeServer) -> None:
    sync(server)
    server.add_fault(Fault("generate", edit=huge(3)))
    with pytest.raises(ServerError, match="larger than"):
        generate(server)


def test_each_retry_is_counted_and_logged_with_its_reason(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    sync(server)
    server.add_fault(Fault("generate", status=503, times=2))
    with caplog.at_level("DEBUG", "grpo.rollout.client"):
        with_client([server.url], lambda c: c.generate(PROMPT, SAMPLING, request_id="r17"))
    debug = [r.getMessage() for r in caplog.records if r.levelname == "DEBUG"]
    assert len(debug) == 2
    assert all("r17" in line and "status 503" in line for line in debug)
    shown = [r.getMessage() for r in caplog.records if r.levelname == "INFO"]
    assert len(shown) == 1, "one line in RETRIES_SHOWN_EVERY seconds"


def test_control_calls_look_at_the_status(server: FakeServer) -> None:
    server.add_fault(Fault("pause", status=500))
    with pytest.raises(TransientError, match=r"POST .*/pause: status 500"):
        with_client([server.url], lambda c: c.call(server.url, "POST", "/pause", params={"mode": "keep"}, timeout=60))


def test_256_requests_are_open_at_once(server: FakeServer) -> None:
    sync(server)
    server.hold()

    async def many(client: Client) -> int:
        tasks = [asyncio.create_task(client.generate(PROMPT, SAMPLING, request_id=f"r{i}")) for i in range(256)]
        await asyncio.to_thread(server.wait_for, lambda s: s.open_now == 256)
        server.release()
        return len(await asyncio.gather(*tasks))

    assert with_client([server.url], many) == 256
    assert server.most_open == 256


def test_requests_go_to_the_server_with_the_fewest_open_ones(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    with FakeServer(folder) as one, FakeServer(folder) as two:
        sync(one), sync(two)
        one.hold(), two.hold()

        async def many(client: Client) -> None:
            tasks = [asyncio.create_task(client.generate(PROMPT, SAMPLING, request_id=f"r{i}")) for i in range(10)]
            await asyncio.to_thread(one.wait_for, lambda s: s.open_now == 5)
            await asyncio.to_thread(two.wait_for, lambda s: s.open_now == 5)
            one.release(), two.release()
            await asyncio.gather(*tasks)

        with_client([one.url, two.url], many)
        assert len(one.requests()) == len(two.requests()) == 5


def test_a_dead_server_hands_its_requests_to_the_living(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "m")
    with FakeServer(folder) as one, FakeServer(folder) as two:
        sync(two)
        one.die()
        for _ in range(3):
            sampled = with_client([one.url, two.url], lambda c: c.generate(PROMPT, SAMPLING, request_id="r"))
            assert sampled.versions[0] == 0


def test_only_the_neutral_distribution_is_ever_asked_for() -> None:
    params = sampling_params(Sampling(0.7, 5, 3, ("x",), (1, 2)))
    assert params["temperature"] == 0.7
    assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert (params["presence_penalty"], params["frequency_penalty"]) == (0.0, 0.0)
    assert params["seed"] == 3
    assert "seed" not in sampling_params(Sampling(0.7, 5, None))
