"""The client against the real vLLM: every parameter that it sends takes effect (CASES 32), tokens in and out (law 3),
and the ratio means what it says (law 4). What it does when things go wrong is in test_client.py, on the fake server.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from real import CONTEXT, RealServer
from tiny import tiny_tokenizer

from grpo.batch import Sequence, pack
from grpo.model import Policy
from grpo.rollout.client import Client, Sampled, parse_answer, sampling_params
from grpo.rollout.control import PlainControl
from grpo.rollout.errors import RequestRefused
from grpo.sync.disk import DiskSync
from grpo.types import Sampling

pytest_plugins = ["real_servers"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GENERATE = "/inference/v1/generate"
TIMEOUT = 60.0
VERSION = 3
PROMPT = [12, 7, 30, 22, 9]
VOCAB, EOS, HELLO = 57, 1, 56


@pytest.fixture(scope="module")
def server(untied_server: RealServer, tmp_path_factory: pytest.TempPathFactory) -> RealServer:
    """The server with the weights of its own folder, as version 3."""
    scratch = tmp_path_factory.mktemp("weights")
    sync = DiskSync(
        folder=str(scratch),
        fallback=scratch,
        controls=[PlainControl(untied_server.url)],
        policy=Policy(untied_server.model),
        dtype=torch.float32,
        pause="keep",
        timeout=TIMEOUT,
    )
    sync.sync(VERSION)
    sync.close()
    return untied_server


@pytest.fixture(scope="module")
def policy(untied_server: RealServer) -> Policy:
    return Policy(untied_server.model)


def with_client(server: RealServer, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        async with Client([server.url], vocab_size=VOCAB, request_timeout=TIMEOUT) as client:
            return await work(client)

    return asyncio.run(go())


def sample(server: RealServer, sampling: Sampling, prompt: list[int] = PROMPT) -> Sampled:
    answer: Sampled = with_client(server, lambda c: c.generate(prompt, sampling, request_id="one"))
    return answer


def choices(server: RealServer, sampling: Sampling, **changed: Any) -> list[dict[str, Any]]:
    """The raw choices of the request that the client would send, with some parameters of other values."""
    body = {"token_ids": PROMPT, "sampling_params": sampling_params(sampling) | changed}
    answer = with_client(server, lambda c: c.call(server.url, "POST", GENERATE, body=body, timeout=TIMEOUT))
    found: list[dict[str, Any]] = answer["choices"]
    return found


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


# ---- CASES 32: each name that is sent, changed alone, changes the outcome as it should ----

SHORT = Sampling(temperature=1.0, max_tokens=24, seed=None)


@pytest.fixture(scope="module")
def base(server: RealServer) -> Sampling:
    """What is changed below: a request whose completion is cut by max_tokens, and in which some token comes twice."""
    for seed in range(500):
        (choice,) = choices(server, replace(SHORT, seed=seed))
        if choice["finish_reason"] == "length" and len(set(choice["token_ids"][:20])) < 20:
            return replace(SHORT, seed=seed)
    raise AssertionError("no such completion")


@pytest.fixture(scope="module")
def neutral(server: RealServer, base: Sampling) -> dict[str, Any]:
    (choice,) = choices(server, base)
    return choice


def until(choice: dict[str, Any], neutral: dict[str, Any], length: int) -> bool:
    """The same completion, cut."""
    return choice["token_ids"] == neutral["token_ids"][:length] and len(choice["logprobs"]["content"]) == length


def some_letter(choice: dict[str, Any]) -> tuple[int, str]:
    """A token of the completion that is a single letter of the alphabet, and that letter."""
    pieces = [(token, tiny_tokenizer().decode([token])) for token in choice["token_ids"]]
    return next((token, text) for token, text in pieces[5:] if len(text) == 1 and text.isalpha())


def test_n(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    first, second = choices(server, base, n=2)
    assert first["token_ids"] == neutral["token_ids"] != second["token_ids"]


def test_seed(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    (other,) = choices(server, base, seed=8)
    (again,) = choices(server, base)
    assert other["token_ids"] != neutral["token_ids"] == again["token_ids"]
    assert "seed" not in sampling_params(replace(base, seed=None))


def test_temperature(server: RealServer, base: Sampling, policy: Policy) -> None:
    (hot,) = choices(server, base, temperature=1.9)
    assert difference(policy, sampled(hot), 1.9) < 1e-4
    assert difference(policy, sampled(hot), 1.0) > 0.1


@pytest.mark.parametrize("changed", [{"top_p": 0.01}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_truncation(server: RealServer, base: Sampling, changed: dict[str, Any]) -> None:
    """With one candidate left, its probability is 1."""
    (choice,) = choices(server, base, **changed)
    assert logprobs(choice) == pytest.approx([0.0] * len(choice["token_ids"]), abs=1e-6)


@pytest.mark.parametrize(
    "changed", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 1.5}], ids=str
)
def test_penalties(server: RealServer, base: Sampling, policy: Policy, changed: dict[str, Any]) -> None:
    (choice,) = choices(server, base, **changed)
    assert difference(policy, sampled(choice), 1.0) > 0.1


def test_logit_bias(server: RealServer, base: Sampling) -> None:
    (choice,) = choices(server, base, logit_bias={"7": 100.0})
    assert choice["token_ids"] == [7] * 24


def test_bad_words(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    token, text = some_letter(neutral)
    (choice,) = choices(server, base, bad_words=[text])
    assert token not in choice["token_ids"]


def test_max_tokens(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    (choice,) = choices(server, base, max_tokens=7)
    assert choice["finish_reason"] == "length"
    assert until(choice, neutral, 7)


def test_stop_token_ids_and_min_tokens(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    first = neutral["token_ids"][0]
    (stopped,) = choices(server, base, stop_token_ids=[first])
    assert stopped["finish_reason"] == "stop"
    assert until(stopped, neutral, 1)
    (longer,) = choices(server, base, stop_token_ids=[first], min_tokens=9)
    assert len(longer["token_ids"]) >= 9
    assert first not in longer["token_ids"][:8]


def test_ignore_eos(server: RealServer, base: Sampling) -> None:
    (ended,) = choices(server, base, logit_bias={str(EOS): 100.0})
    (forced,) = choices(server, base, logit_bias={str(EOS): 100.0}, ignore_eos=True)
    assert (ended["token_ids"], ended["finish_reason"]) == ([EOS], "stop")
    assert (forced["token_ids"], forced["finish_reason"]) == ([EOS] * 24, "length")


def test_stop_and_detokenize(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    token, text = some_letter(neutral)
    length = neutral["token_ids"].index(token) + 1
    (stopped,) = choices(server, base, stop=[text], detokenize=True)
    assert stopped["finish_reason"] == "stop"
    assert until(stopped, neutral, length)
    with pytest.raises(RequestRefused, match="detokenize"):
        choices(server, base, stop=[text], detokenize=False)


def test_logprobs(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    (without,) = choices(server, base, logprobs=None)
    assert without["logprobs"] is None
    assert {len(entry["top_logprobs"]) for entry in neutral["logprobs"]["content"]} == {1}


def test_every_name_that_is_sent_is_seen_above(base: Sampling) -> None:
    seen = "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias bad_words "
    seen += "max_tokens min_tokens ignore_eos stop stop_token_ids logprobs detokenize seed"
    assert set(sampling_params(base)) == set(seen.split())


def test_a_misspelt_name_changes_nothing(server: RealServer, base: Sampling, neutral: dict[str, Any]) -> None:
    """Why the tests above are needed."""
    assert choices(server, base, temperatur=0.1, max_token=3) == [neutral]


# ---- laws 3 and 4 ----


def sampled(choice: dict[str, Any]) -> Sampled:
    return parse_answer({"choices": [choice]}, max_tokens=CONTEXT, vocab_size=VOCAB)


def difference(policy: Policy, answer: Sampled, temperature: float, prompt: list[int] = PROMPT) -> float:
    """Largest |ratio - 1| over the completion's tokens: the trainer's probabilities over the sampler's."""
    n = len(answer.token_ids)
    sequence = Sequence(prompt, answer.token_ids, answer.logprobs, [0] * n, 0.0, 0.0)
    (mb,) = pack([sequence], tokens_per_microbatch=CONTEXT, context=CONTEXT)
    with torch.no_grad():
        logprobs_N, _ = policy.logprobs(mb, temperature)
    return float(((logprobs_N - mb.sampler_logprobs_N).exp() - 1).abs().max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_ratio_is_one_with_equal_weights(server: RealServer, policy: Policy, temperature: float) -> None:
    """CASES 4. The folder's generation_config.json asks for a repetition penalty and top_k; they are not in force."""
    sampling = [Sampling(temperature, 200, seed, stop_token_ids=(EOS,)) for seed in range(30)]

    async def work(client: Client) -> list[Sampled]:
        return await asyncio.gather(*(client.generate(PROMPT, s, request_id=f"r{s.seed}") for s in sampling))

    answers = with_client(server, work)
    assert sum(len(answer.token_ids) for answer in answers) > 200
    assert {version for answer in answers for version in answer.versions} == {VERSION}
    assert max(difference(policy, answer, temperature) for answer in answers) < 1e-4
    if temperature != 1.0:
        assert max(difference(policy, answer, 1.0) for answer in answers) > 0.1


def test_sampled_end_token_is_among_the_ids(server: RealServer, policy: Policy) -> None:
    for seed in range(200):
        answer = sample(server, Sampling(1.0, 60, seed, stop_token_ids=(EOS,)))
        if answer.finish_reason == "stop":
            break
    assert answer.token_ids.index(EOS) == len(answer.token_ids) - 1
    assert len(answer.logprobs) == len(answer.versions) == len(answer.token_ids)
    assert difference(policy, answer, 1.0) < 1e-4


def test_stop_string_across_a_token_boundary(
    server: RealServer, base: Sampling, policy: Policy, neutral: dict[str, Any]
) -> None:
    """CASES 28: the tokens that hold the stop string stay, each with its logprob."""
    ids = neutral["token_ids"]
    pieces = [tiny_tokenizer().decode([token]) for token in ids]
    at = next(i for i in range(5, 20) if "".join(pieces).index(pieces[i] + pieces[i + 1]) == len("".join(pieces[:i])))
    answer = sample(server, replace(base, stop=(pieces[at] + pieces[at + 1],)))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == ids[: at + 2]
    assert len(answer.logprobs) == len(answer.versions) == at + 2
    assert difference(policy, answer, 1.0) < 1e-4


def test_stop_string_inside_a_token(server: RealServer, base: Sampling) -> None:
    stopping = replace(base, stop=("el",))
    (choice,) = choices(server, stopping, logit_bias={str(HELLO): 100.0})
    answer = sampled(choice)
    assert (answer.token_ids, answer.finish_reason) == ([HELLO], "stop")
    assert len(answer.logprobs) == 1


def test_prompt_that_leaves_no_room_is_refused(server: RealServer, base: Sampling) -> None:
    with pytest.raises(RequestRefused, match=r"status 400.*1024"):
        sample(server, base, [5] * CONTEXT)
    assert len(sample(server, base, [5] * (CONTEXT - 1)).token_ids) == 1


def test_aborted_request_is_sent_again(server: RealServer, base: Sampling) -> None:
    """CASES 16: what the server cut off is no completion."""
    control = PlainControl(server.url)

    def abort() -> None:
        while control.post("/abort_requests", json={}, timeout=TIMEOUT)["aborted"] == 0:  # it has not arrived yet
            pass
        control.post("/resume", timeout=TIMEOUT)

    async def work(client: Client) -> tuple[Sampled, int]:
        request = asyncio.create_task(client.generate(PROMPT, base, request_id="cut"))
        await asyncio.to_thread(abort)
        return await request, client.retried

    expected = sample(server, base)
    control.post("/pause", params={"mode": "keep"}, timeout=TIMEOUT)
    assert with_client(server, work) == (expected, 1)
