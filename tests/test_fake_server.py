"""The fake server samples, updates, pauses and records as it says. Its faults: test_fake_faults.py."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from fake_engine import sample
from fake_server import FakeServer, FakeServerProcess
from plain_http import NEUTRAL, PROMPT, call, generate, logprobs_of, sync
from safetensors.torch import load_file, save_file
from tiny import other_weights, reference_logprobs, save_tiny_model
from transformers import AutoModelForCausalLM

# Sampling


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    server: FakeServer, tiny_dir: Path, temperature: float
) -> None:
    choice = generate(server.url, temperature=temperature)
    expected = reference_logprobs(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), temperature)
    assert len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == "length"
    assert logprobs_of(choice) == pytest.approx(expected, abs=1e-5)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]


def test_the_sample_depends_on_seed_and_position_only(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    alone = generate(server.url, seed=3)
    crowd = list(pool.map(lambda seed: generate(server.url, seed=seed), range(8)))
    assert crowd[3] == alone
    assert len({tuple(choice["token_ids"]) for choice in crowd}) == 8
    longer = generate(server.url, seed=3, max_tokens=20)
    assert longer["token_ids"][:12] == alone["token_ids"]
    assert generate(server.url, seed=None)["token_ids"] != generate(server.url, seed=None)["token_ids"]


def test_every_position_has_noise_of_its_own(server: FakeServer) -> None:
    sequence = server.engine.sequence("x", PROMPT, {"seed": 3}, 0)
    sampled = []
    for _ in range(20):
        sampled.append(sample(torch.zeros(57), sequence))
        sequence.token_ids.append(0)
    assert len(set(sampled)) > 8


def test_samples_follow_the_distribution(server: FakeServer, tiny_dir: Path) -> None:
    count = 600
    status, answer = call(
        server.url,
        "/inference/v1/generate",
        {"token_ids": PROMPT, "sampling_params": {**NEUTRAL, "max_tokens": 1, "n": count}},
    )
    assert status == 200
    sampled = [choice["token_ids"][0] for choice in answer["choices"]]
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        probs_V = model(torch.tensor([PROMPT])).logits[0, -1].softmax(-1)
    for token in probs_V.topk(3).indices.tolist():
        p = float(probs_V[token])
        assert abs(sampled.count(token) / count - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_stops_at_eos_stop_tokens_and_stop_strings(server: FakeServer) -> None:
    free = generate(server.url, max_tokens=40)
    token = free["token_ids"][5]
    first = free["token_ids"].index(token)
    stopped = generate(server.url, max_tokens=40, stop_token_ids=[token])
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)

    text = server.engine.tokenizer.decode(free["token_ids"][4:6])
    by_text = generate(server.url, max_tokens=40, stop=[text])
    assert by_text["finish_reason"] == "stop"
    assert by_text["stop_reason"] == text
    assert len(by_text["token_ids"]) == len(by_text["logprobs"]["content"]) <= 6

    eos = next(
        choice
        for seed in range(50)
        if (choice := generate(server.url, seed=seed, max_tokens=100, ignore_eos=False))["finish_reason"] == "stop"
    )
    assert eos["token_ids"][-1] == 1
    assert eos["stop_reason"] is None


def test_server_defaults_are_in_force_unless_the_request_names_the_parameter(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir, sampling_defaults={"repetition_penalty": 1.5, "top_k": 2}) as server:
        unnamed = generate(server.url)
        named = generate(server.url, repetition_penalty=1.0, top_k=0)
    expected = reference_logprobs(tiny_dir, PROMPT + named["token_ids"], len(PROMPT))
    assert logprobs_of(named) == pytest.approx(expected, abs=1e-5)
    wrong = reference_logprobs(tiny_dir, PROMPT + unnamed["token_ids"], len(PROMPT))
    assert max(abs(a - b) for a, b in zip(logprobs_of(unnamed), wrong, strict=True)) > 0.1


def test_raw_logprobs_mode_ignores_the_temperature(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir, logprobs_mode="raw_logprobs") as server:
        choice = generate(server.url, temperature=0.5)
    assert logprobs_of(choice) == pytest.approx(
        reference_logprobs(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), temperature=1.0), abs=1e-5
    )


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"token_ids": [5] * 512}, 400, "plus the number of requested output tokens"),
        ({"token_ids": [5] * 600}, 400, "maximum model length of 512"),
        ({"token_ids": []}, 400, "at least 1 item"),
        ({"token_ids": [3, -1]}, 400, "negative"),
        ({"token_ids": [57]}, 400, "Token id 57 is out of vocabulary"),
        ({"model": "another"}, 404, "does not exist"),
        ({"sampling_params": {"temperature": None}}, 400, "temperature: Input should be a valid number"),
        ({"sampling_params": {"temperature": 2.5}}, 400, "temperature must be in"),
        ({"sampling_params": {"logprobs": 21}}, 400, "max allowed: 20"),
        ({"sampling_params": {"min_tokens": 13, "max_tokens": 12}}, 400, "less than or equal to max_tokens"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, 400, "detokenize"),
        ({"sampling_params": {"stop_token_ids": [57]}}, 400, "out-of-vocab"),
    ],
)
def test_refusals(server: FakeServer, body: dict[str, Any], status: int, says: str) -> None:
    valid = {"token_ids": PROMPT, "sampling_params": NEUTRAL}
    answered, answer = call(server.url, "/inference/v1/generate", {**valid, **body})
    assert answered == answer["error"]["code"] == status
    assert says in answer["error"]["message"]
    assert call(server.url, "/inference/v1/generate", {**valid, "sampling_params": {**NEUTRAL, "topp": 0.1}})[0] == 200


def test_further_end_tokens_of_the_generation_config_stop_and_are_named(tmp_path: Path, server: FakeServer) -> None:
    first = generate(server.url, ignore_eos=False, temperature=0.0)["token_ids"][0]
    folder = save_tiny_model(tmp_path, generation_config={"eos_token_id": [1, first]})
    with FakeServer(folder) as other:
        stopped = generate(other.url, ignore_eos=False, temperature=0.0)
        free = generate(other.url, ignore_eos=True, temperature=0.0)
    assert (stopped["token_ids"], stopped["finish_reason"], stopped["stop_reason"]) == ([first], "stop", first)
    assert len(free["token_ids"]) == 12


# Updates


@pytest.mark.parametrize("folder", ["tiny_dir", "tied_dir"])
def test_an_update_in_flight_is_exact_and_labelled(
    folder: str, request: pytest.FixtureRequest, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    model_dir: Path = request.getfixturevalue(folder)
    weights = other_weights(model_dir, tmp_path / "1.safetensors")
    with FakeServer(model_dir) as server:
        server.hold()
        future = pool.submit(generate, server.url)
        server.wait_for(lambda s: s.open_now == 1)
        server.step(5)
        server.wait_for(lambda s: s.requests()[0].tokens == 5)
        assert sync(server.url, tmp_path / "1.safetensors", "1") == [200] * 5
        assert call(server.url, "/weight_info", method="GET")[1] == {"weight_version": "1"}
        server.release()
        choice = future.result(timeout=30)
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": 5},
        {"version": "1", "start": 5, "end": 12},
    ]
    ids = PROMPT + choice["token_ids"]
    before = reference_logprobs(model_dir, ids, len(PROMPT))
    after = reference_logprobs(model_dir, ids, len(PROMPT), weights=weights)
    assert logprobs_of(choice) == pytest.approx(before[:5] + after[5:], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.5


def test_without_clear_cache_the_logprobs_are_those_of_no_weights(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    weights = other_weights(tiny_dir, tmp_path / "1.safetensors")
    server.hold()
    future = pool.submit(generate, server.url)
    server.wait_for(lambda s: s.open_now == 1)
    server.step(5)
    server.wait_for(lambda s: s.requests()[0].tokens == 5)
    sync(server.url, tmp_path / "1.safetensors", "1", clear_cache="false")
    server.release()
    choice = future.result(timeout=30)
    after = reference_logprobs(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), weights=weights)
    assert max(abs(a - b) for a, b in zip(logprobs_of(choice)[5:], after[5:], strict=True)) > 0.1


def test_a_prompt_is_cached_until_caches_are_cleared(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    weights = other_weights(tiny_dir, tmp_path / "1.safetensors")
    generate(server.url, seed=1)

    def error() -> float:
        choice = generate(server.url, seed=2)
        right = reference_logprobs(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), weights=weights)
        return max(abs(a - b) for a, b in zip(logprobs_of(choice), right, strict=True))

    sync(server.url, tmp_path / "1.safetensors", "1", mode="wait", clear_cache="false")
    assert error() > 0.1
    assert call(server.url, "/reset_prefix_cache")[1] == {"success": True}
    assert error() < 1e-5


def test_pause_modes(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    server.hold()
    aborted = pool.submit(generate, server.url)
    server.wait_for(lambda s: s.open_now == 1)
    server.step(2)
    server.wait_for(lambda s: s.requests()[0].tokens == 2)
    call(server.url, "/pause?mode=keep")
    server.step(3)
    assert call(server.url, "/is_paused", method="GET")[1] == {"is_paused": True}
    assert server.requests()[0].tokens == 2  # frozen, although it may compute
    call(server.url, "/pause?mode=abort")
    assert aborted.result(timeout=30)["finish_reason"] == "abort"
    assert len(aborted.result()["token_ids"]) == 2

    server.wait_for(lambda s: s.open_now == 0)
    call(server.url, "/resume")
    finishing = pool.submit(generate, server.url)
    server.wait_for(lambda s: s.open_now == 1)
    pausing = pool.submit(call, server.url, "/pause?mode=wait")
    server.wait_for(lambda s: s.calls.count("pause") == 3)
    queued = pool.submit(generate, server.url)
    server.wait_for(lambda s: s.open_now == 2)
    assert not pausing.done()
    server.release()
    assert finishing.result(timeout=30)["finish_reason"] == "length"
    assert pausing.result(timeout=30) == (200, {"status": "paused"})
    assert server.requests()[-1].tokens == 0
    assert call(server.url, "/is_paused", method="GET")[1] == {"is_paused": True}
    call(server.url, "/resume")
    assert queued.result(timeout=30)["finish_reason"] == "length"


def test_update_sessions(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "1.safetensors"
    other_weights(tiny_dir, file)
    update = {"update_info": {"path": str(file)}}
    assert call(server.url, "/update_weights", update)[0] == 500
    assert call(server.url, "/finish_weight_update")[0] == 500
    assert call(server.url, "/start_weight_update")[0] == 200
    assert call(server.url, "/start_weight_update")[0] == 500
    assert call(server.url, "/finish_weight_update", {"weight_version": 1})[0] == 400  # a string, please
    assert call(server.url, "/finish_weight_update")[0] == 200  # the session was still open
    assert call(server.url, "/start_weight_update")[0] == 200
    assert call(server.url, "/update_weights", {"update_info": {"path": str(tmp_path / "none")}})[0] == 500
    assert call(server.url, "/finish_weight_update")[0] == 500  # the failed update closed the session
    clean = generate(server.url)
    weights = load_file(file)
    weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "partial.safetensors")
    assert sync(server.url, tmp_path / "partial.safetensors", "1") == [200, 200, 500, 500, 200]
    assert generate(server.url) == clean
    before = call(server.url, "/weight_checker", {"action": "checksum"})[1]
    assert sync(server.url, file, "1") == [200] * 5
    assert call(server.url, "/weight_checker", {"action": "checksum"})[1] != before


# Records


def test_many_open_requests_are_counted_and_gone_clients_are_aborted(server: FakeServer) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {**NEUTRAL, "max_tokens": 2}}

    async def crowd() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def one() -> int:
                async with session.post(server.url + "/inference/v1/generate", json=body) as response:
                    return response.status

            tasks = [asyncio.create_task(one()) for _ in range(256)]
            await asyncio.to_thread(server.wait_for, lambda s: s.open_now == 256)
            tasks[0].cancel()
            await asyncio.to_thread(server.wait_for, lambda s: s.open_now == 255)
            server.release()
            assert await asyncio.gather(*tasks[1:]) == [200] * 255

    server.hold()
    asyncio.run(crowd())
    assert (server.most_open, server.open_now) == (256, 0)
    assert server.requests()[7].body == body
    assert sum(record.status == 200 for record in server.requests()) == 255


def test_wait_for_has_a_deadline(server: FakeServer) -> None:
    with pytest.raises(TimeoutError, match="calls: \\[\\]"):
        server.wait_for(lambda s: s.open_now > 0, timeout=0.05)


def test_no_thread_is_left(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir) as server:
        generate(server.url)
    assert "fake-server" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_process_of_its_own(tiny_dir: Path, server: FakeServer) -> None:
    with FakeServerProcess(tiny_dir) as process:
        assert generate(process.url) == generate(server.url)
        process.kill()
        with pytest.raises(OSError, match="refused"):
            generate(process.url)
        process.start()
        assert generate(process.url)["finish_reason"] == "length"
