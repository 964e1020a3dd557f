"""The fake server does what it says: real logprobs, real updates, and each fault exactly as asked."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import aiohttp
import fake_faults as faults
import plain_http
import pytest
import torch
from fake_engine import sample
from fake_faults import Fault
from fake_server import FakeServer, FakeServerProcess
from plain_http import NEUTRAL, PROMPT
from tiny import other_weights, save_tiny_model
from transformers import AutoModelForCausalLM


def call(server: FakeServer | FakeServerProcess, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    return plain_http.call(server.url, path, body, method)


def generate(server: FakeServer | FakeServerProcess, prompt: list[int] = PROMPT, **params: Any) -> dict[str, Any]:
    status, answer = call(
        server, "/inference/v1/generate", {"token_ids": prompt, "sampling_params": {**NEUTRAL, **params}}
    )
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def sync(server: FakeServer, path: Path, version: str, mode: str = "keep", clear_cache: str = "true") -> list[int]:
    steps = [
        (f"/pause?mode={mode}&clear_cache={clear_cache}", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": str(path)}}),
        ("/finish_weight_update", {"weight_version": version}),
        ("/resume", None),
    ]
    return [call(server, path, body)[0] for path, body in steps]


def reference(folder: Path, ids: list[int], start: int, temperature: float = 1.0, weights: Any = None) -> list[float]:
    """Logprobs of ids[start:] by one full forward of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        logprobs_TV = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
    return [float(logprobs_TV[t - 1, ids[t]]) for t in range(start, len(ids))]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


# Sampling


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    server: FakeServer, tiny_dir: Path, temperature: float
) -> None:
    choice = generate(server, temperature=temperature)
    expected = reference(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), temperature)
    assert len(choice["token_ids"]) == 12
    assert choice["finish_reason"] == "length"
    assert logprobs_of(choice) == pytest.approx(expected, abs=1e-5)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]


def test_the_sample_depends_on_seed_and_position_only(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    alone = generate(server, seed=3)
    crowd = list(pool.map(lambda seed: generate(server, seed=seed), range(8)))
    assert crowd[3] == alone
    assert len({tuple(choice["token_ids"]) for choice in crowd}) == 8
    longer = generate(server, seed=3, max_tokens=20)
    assert longer["token_ids"][:12] == alone["token_ids"]
    assert generate(server, seed=None)["token_ids"] != generate(server, seed=None)["token_ids"]


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
        server,
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
    free = generate(server, max_tokens=40)
    token = free["token_ids"][5]
    first = free["token_ids"].index(token)
    stopped = generate(server, max_tokens=40, stop_token_ids=[token])
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)

    text = server.engine.tokenizer.decode(free["token_ids"][4:6])
    by_text = generate(server, max_tokens=40, stop=[text])
    assert by_text["finish_reason"] == "stop"
    assert by_text["stop_reason"] == text
    assert len(by_text["token_ids"]) == len(by_text["logprobs"]["content"]) <= 6

    eos = next(
        choice
        for seed in range(50)
        if (choice := generate(server, seed=seed, max_tokens=100, ignore_eos=False))["finish_reason"] == "stop"
    )
    assert eos["token_ids"][-1] == 1
    assert eos["stop_reason"] is None


def test_server_defaults_are_in_force_unless_the_request_names_the_parameter(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir, sampling_defaults={"repetition_penalty": 1.5, "top_k": 2}) as server:
        unnamed = generate(server)
        named = generate(server, repetition_penalty=1.0, top_k=0)
    expected = reference(tiny_dir, PROMPT + named["token_ids"], len(PROMPT))
    assert logprobs_of(named) == pytest.approx(expected, abs=1e-5)
    wrong = reference(tiny_dir, PROMPT + unnamed["token_ids"], len(PROMPT))
    assert max(abs(a - b) for a, b in zip(logprobs_of(unnamed), wrong, strict=True)) > 0.1


def test_raw_logprobs_mode_ignores_the_temperature(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir, logprobs_mode="raw_logprobs") as server:
        choice = generate(server, temperature=0.5)
    assert logprobs_of(choice) == pytest.approx(
        reference(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), temperature=1.0), abs=1e-5
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
    answered, answer = call(server, "/inference/v1/generate", {**valid, **body})
    assert answered == answer["error"]["code"] == status
    assert says in answer["error"]["message"]
    assert call(server, "/inference/v1/generate", {**valid, "sampling_params": {**NEUTRAL, "topp": 0.1}})[0] == 200


def test_further_end_tokens_of_the_generation_config_stop_and_are_named(tmp_path: Path, server: FakeServer) -> None:
    first = generate(server, ignore_eos=False, temperature=0.0)["token_ids"][0]
    folder = save_tiny_model(tmp_path, generation_config={"eos_token_id": [1, first]})
    with FakeServer(folder) as other:
        stopped = generate(other, ignore_eos=False, temperature=0.0)
        free = generate(other, ignore_eos=True, temperature=0.0)
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
        future = pool.submit(generate, server)
        server.wait_for(lambda s: s.open_now == 1)
        server.step(5)
        server.wait_for(lambda s: s.requests()[0].tokens == 5)
        assert sync(server, tmp_path / "1.safetensors", "1") == [200] * 5
        assert call(server, "/weight_info", method="GET")[1] == {"weight_version": "1"}
        server.release()
        choice = future.result(timeout=30)
    assert choice["weight_versions"] == [
        {"version": "default", "start": 0, "end": 5},
        {"version": "1", "start": 5, "end": 12},
    ]
    ids = PROMPT + choice["token_ids"]
    before = reference(model_dir, ids, len(PROMPT))
    after = reference(model_dir, ids, len(PROMPT), weights=weights)
    assert logprobs_of(choice) == pytest.approx(before[:5] + after[5:], abs=1e-5)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.5


def test_without_clear_cache_the_logprobs_are_those_of_no_weights(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    weights = other_weights(tiny_dir, tmp_path / "1.safetensors")
    server.hold()
    future = pool.submit(generate, server)
    server.wait_for(lambda s: s.open_now == 1)
    server.step(5)
    server.wait_for(lambda s: s.requests()[0].tokens == 5)
    sync(server, tmp_path / "1.safetensors", "1", clear_cache="false")
    server.release()
    choice = future.result(timeout=30)
    after = reference(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), weights=weights)
    assert max(abs(a - b) for a, b in zip(logprobs_of(choice)[5:], after[5:], strict=True)) > 0.1


def test_a_prompt_is_cached_until_caches_are_cleared(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    weights = other_weights(tiny_dir, tmp_path / "1.safetensors")
    generate(server, seed=1)

    def error() -> float:
        choice = generate(server, seed=2)
        right = reference(tiny_dir, PROMPT + choice["token_ids"], len(PROMPT), weights=weights)
        return max(abs(a - b) for a, b in zip(logprobs_of(choice), right, strict=True))

    sync(server, tmp_path / "1.safetensors", "1", mode="wait", clear_cache="false")
    assert error() > 0.1
    assert call(server, "/reset_prefix_cache")[1] == {"success": True}
    assert error() < 1e-5


def test_pause_modes(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    server.hold()
    aborted = pool.submit(generate, server)
    server.wait_for(lambda s: s.open_now == 1)
    server.step(2)
    server.wait_for(lambda s: s.requests()[0].tokens == 2)
    call(server, "/pause?mode=keep")
    server.step(3)
    assert call(server, "/is_paused", method="GET")[1] == {"is_paused": True}
    assert server.requests()[0].tokens == 2  # frozen, although it may compute
    call(server, "/pause?mode=abort")
    assert aborted.result(timeout=30)["finish_reason"] == "abort"
    assert len(aborted.result()["token_ids"]) == 2

    server.wait_for(lambda s: s.open_now == 0)
    call(server, "/resume")
    finishing = pool.submit(generate, server)
    server.wait_for(lambda s: s.open_now == 1)
    pausing = pool.submit(call, server, "/pause?mode=wait")
    server.wait_for(lambda s: s.calls.count("pause") == 3)
    queued = pool.submit(generate, server)
    server.wait_for(lambda s: s.open_now == 2)
    assert not pausing.done()
    server.release()
    assert finishing.result(timeout=30)["finish_reason"] == "length"
    assert pausing.result(timeout=30) == (200, {"status": "paused"})
    assert server.requests()[-1].tokens == 0
    assert call(server, "/is_paused", method="GET")[1] == {"is_paused": True}
    call(server, "/resume")
    assert queued.result(timeout=30)["finish_reason"] == "length"


def test_update_sessions(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "1.safetensors"
    other_weights(tiny_dir, file)
    update = {"update_info": {"path": str(file)}}
    assert call(server, "/update_weights", update)[0] == 500
    assert call(server, "/finish_weight_update")[0] == 500
    assert call(server, "/start_weight_update")[0] == 200
    assert call(server, "/start_weight_update")[0] == 500
    assert call(server, "/finish_weight_update", {"weight_version": 1})[0] == 400  # a string, please
    assert call(server, "/finish_weight_update")[0] == 200  # the session was still open
    assert call(server, "/start_weight_update")[0] == 200
    assert call(server, "/update_weights", {"update_info": {"path": str(tmp_path / "none")}})[0] == 500
    assert call(server, "/finish_weight_update")[0] == 500  # the failed update closed the session
    before = call(server, "/weight_checker", {"action": "checksum"})[1]
    assert sync(server, file, "1") == [200] * 5
    assert call(server, "/weight_checker", {"action": "checksum"})[1] != before


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


# Faults


def test_a_fault_is_limited_by_count_order_and_predicate(server: FakeServer) -> None:
    once = server.add_fault(Fault("generate", status=503, times=1, after=2))
    server.add_fault(Fault("generate", status=400, when=lambda call: call.body["token_ids"] == [9]))
    body = {"token_ids": PROMPT, "sampling_params": NEUTRAL}
    statuses = [call(server, "/inference/v1/generate", body)[0] for _ in range(4)]
    assert statuses == [200, 200, 503, 200]
    assert once.hits == 1
    assert call(server, "/inference/v1/generate", {**body, "token_ids": [9]})[0] == 400
    assert [record.status for record in server.requests()] == [200, 200, 503, 200, 400]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (faults.null("logprobs"), lambda c: c["logprobs"] is None),
        (faults.missing("weight_versions"), lambda c: "weight_versions" not in c),
        (faults.short("logprobs"), lambda c: len(c["logprobs"]["content"]) == 11),
        (faults.short("token_ids", 2), lambda c: len(c["token_ids"]) == 10),
        (faults.short("weight_versions"), lambda c: c["weight_versions"][-1]["end"] == 11),
        (faults.logprob(math.nan), lambda c: math.isnan(logprobs_of(c)[-1])),
        (faults.logprob(-math.inf, at=3), lambda c: logprobs_of(c)[3] == -math.inf),
        (faults.logprob(None), lambda c: logprobs_of(c)[-1] is None),
        (faults.version("default-1"), lambda c: c["weight_versions"][0]["version"] == "default-1"),
        (faults.finish("abort"), lambda c: c["finish_reason"] == "abort"),
        (faults.chosen([7, 8], [-0.5, -2.0]), lambda c: c["token_ids"] == [7, 8] and logprobs_of(c) == [-0.5, -2.0]),
    ],
)
def test_edits(server: FakeServer, edit: faults.Edit, what: Any) -> None:
    clean = generate(server)
    assert not what(clean)
    server.add_fault(Fault("generate", edit=edit, times=1))
    assert what(generate(server))
    assert generate(server) == clean


def test_broken_answers(server: FakeServer) -> None:
    server.add_fault(Fault("generate", raw=b'{"choices": [', times=1))
    with pytest.raises(json.JSONDecodeError):
        generate(server)
    server.add_fault(Fault("generate", drop=True, times=1))
    with pytest.raises((OSError, HTTPException)):
        generate(server)
    server.add_fault(Fault("generate", cut=0.5, times=1))
    with pytest.raises((OSError, HTTPException)):
        generate(server)
    server.add_fault(Fault("generate", edit=faults.huge(3), times=1))
    status, answer = call(server, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": NEUTRAL})
    assert (status, len(answer["kv_transfer_params"]["padding"])) == (200, 3 * 2**20)
    assert len(server.requests()) == 4


def test_a_late_fault_does_the_work_and_a_hang_ends_with_the_fault(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    server.add_fault(Fault("pause", status=500, late=True, times=1))
    assert call(server, "/pause?mode=keep")[0] == 500
    assert call(server, "/is_paused", method="GET")[1]["is_paused"]
    server.add_fault(Fault("resume", hang=True))
    hanging = pool.submit(call, server, "/resume")
    server.wait_for(lambda s: s.calls[-1] == "resume")
    assert call(server, "/is_paused", method="GET")[1]["is_paused"]
    server.clear_faults()
    assert hanging.result(timeout=30)[0] == 200
    assert not call(server, "/is_paused", method="GET")[1]["is_paused"]


@pytest.mark.parametrize("folder", ["tiny_dir", "tied_dir"])
@pytest.mark.parametrize("apply", ["nothing", "all_but_head"])
def test_updates_that_answer_200_and_do_too_little(
    folder: str, apply: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model_dir: Path = request.getfixturevalue(folder)
    weights = other_weights(model_dir, tmp_path / "1.safetensors")
    with FakeServer(model_dir) as server:
        before = generate(server)
        server.add_fault(Fault("update_weights", apply=apply))
        assert sync(server, tmp_path / "1.safetensors", "1") == [200] * 5
        after = generate(server)
        server.clear_faults()
        sync(server, tmp_path / "1.safetensors", "2")
        mended = generate(server)
    assert after["weight_versions"][0]["version"] == "1"
    right = reference(model_dir, PROMPT + mended["token_ids"], len(PROMPT), weights=weights)
    assert logprobs_of(mended) == pytest.approx(right, abs=1e-5)
    right = reference(model_dir, PROMPT + after["token_ids"], len(PROMPT), weights=weights)
    assert (logprobs_of(after) == logprobs_of(before)) == (apply == "nothing")
    assert max(abs(a - b) for a, b in zip(logprobs_of(after), right, strict=True)) > 0.5


def test_a_finish_that_keeps_the_old_version(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    other_weights(tiny_dir, tmp_path / "1.safetensors")
    server.add_fault(Fault("finish_weight_update", apply="nothing"))
    assert sync(server, tmp_path / "1.safetensors", "1") == [200] * 5
    assert call(server, "/weight_info", method="GET")[1] == {"weight_version": "default"}


def test_death_and_return_with_base_weights(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    before = generate(server)
    other_weights(tiny_dir, tmp_path / "1.safetensors")
    sync(server, tmp_path / "1.safetensors", "1")
    server.hold()
    lost: list[Future[Any]] = [pool.submit(generate, server) for _ in range(3)]
    server.wait_for(lambda s: s.open_now == 3)
    server.add_fault(Fault("pause", die=True, times=1))
    with pytest.raises((OSError, HTTPException)):
        call(server, "/pause")
    for future in lost:
        with pytest.raises((OSError, HTTPException)):
            future.result(timeout=30)
    server.wait_for(lambda s: not s.alive and s.open_now == 0)
    with pytest.raises(OSError, match="refused"):
        call(server, "/health", method="GET")
    server.release()
    server.restart()
    assert generate(server) == before


def test_a_bug_in_an_edit_is_not_swallowed(tiny_dir: Path) -> None:
    server = FakeServer(tiny_dir)
    server.__enter__()
    server.add_fault(Fault("generate", edit=lambda answer: answer["no such key"]))
    with pytest.raises(json.JSONDecodeError):  # aiohttp's own 500
        generate(server)
    with pytest.raises(RuntimeError, match="fault's edit"):
        server.__exit__(None, None, None)


def test_no_thread_is_left(tiny_dir: Path) -> None:
    with FakeServer(tiny_dir) as server:
        generate(server)
    assert "fake-server" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
def test_a_process_of_its_own(tiny_dir: Path, server: FakeServer) -> None:
    with FakeServerProcess(tiny_dir) as process:
        assert generate(process) == generate(server)
        process.kill()
        with pytest.raises(OSError, match="refused"):
            generate(process)
        process.start()
        assert generate(process)["finish_reason"] == "length"
