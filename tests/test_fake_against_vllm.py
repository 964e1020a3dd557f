"""The fake server answers as the real one does: the same calls to both, statuses and answers compared.

Sampled tokens differ (other random numbers), so tokens are compared for greedy requests, and distributions by the
logprobs of the most likely tokens. Messages of refusals are compared by status, type and field only.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer
from plain_http import NEUTRAL, PROMPT, call
from safetensors.torch import load_file, save_file
from tiny import other_weights

from grpo.rollout.server import VLLMServer, free_ports
from grpo.sync.engine import BACKEND

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GENERATE = "/inference/v1/generate"
GREEDY = {**NEUTRAL, "temperature": 0.0}
BEST = {**NEUTRAL, "max_tokens": 1, "logprobs": 20}  # distribution of the first token
VOLATILE = {"created", "permission", "message"}  # times, random ids, wordings
UNTOLD = {"owned_by", "root", "parent"}  # of a model's card, that the fake leaves out


REFUSED: dict[str, list[Any]] = {
    "temperature": [None, -1, 2.1],
    "top_k": [None, -2],
    "top_p": [None, 0, 1.1],
    "min_p": [None, 2],
    "max_tokens": [0],
    "n": [None, 0],
    "repetition_penalty": [None, 0],
    "presence_penalty": [None, 3],
    "logprobs": [21],
    "min_tokens": [None, -1, 13],
    "ignore_eos": [None],
    "stop": ["", [""]],
    "stop_token_ids": [[57]],
    "seed": [2**64],
}


@pytest.fixture(scope="module")
def real(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a real vLLM server around the same model, below a guard: it does not outlive a pytest that is killed."""
    (port,) = free_ports("127.0.0.1", 1)
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = (
        f"{sys.executable} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --model {tiny_dir} "
    )
    command += "--dtype float32 --max-model-len 512 --enforce-eager --enable-scale-out "
    command += "--logprobs-mode processed_logprobs --generation-config vllm "
    command += f"--weight-transfer-config {json.dumps({'backend': BACKEND}, separators=(',', ':'))}"
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    server = VLLMServer(command.split(), host="127.0.0.1", port=port, environment=environment, log=log)
    server.launch()
    try:
        server.wait_ready(240)
        yield server.url
    finally:
        server.stop()


@pytest.fixture(scope="module")
def fake(tiny_dir: Path) -> Iterator[str]:
    with FakeServer(tiny_dir) as server:
        yield server.url


def difference(real: Any, fake: Any, where: str = "") -> list[str]:
    """Where two answers differ, each place once."""
    if isinstance(real, dict) and isinstance(fake, dict):
        keys = {key for key in real.keys() | fake.keys() if key not in VOLATILE | UNTOLD}
        missing = [f"{where}.{key}: only one has it" for key in keys if (key in real) != (key in fake)]
        shared = [difference(real[key], fake[key], f"{where}.{key}") for key in keys if key in real and key in fake]
        return missing + [found for place in shared for found in place]
    if isinstance(real, list) and isinstance(fake, list) and len(real) == len(fake):
        pairs = enumerate(zip(real, fake, strict=True))
        return [found for i, (a, b) in pairs for found in difference(a, b, f"{where}[{i}]")]
    same = abs(real - fake) < 1e-4 if isinstance(real, float) and isinstance(fake, float) else real == fake
    return [] if same else [f"{where}: {json.dumps(real)[:200]} (real), {json.dumps(fake)[:200]} (fake)"]


def both(real: str, fake: str, path: str, body: Any = None, method: str = "POST") -> list[str]:
    return difference(list(call(real, path, body, method)), list(call(fake, path, body, method)))


def request(params: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"request_id": "same", "token_ids": PROMPT, "sampling_params": params, **body}


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {**GREEDY, "logprobs": 3},
        {**GREEDY, "logprobs": None},
        {**GREEDY, "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "max_tokens": 30},
        {**GREEDY, "prompt_logprobs": 0},
        {**GREEDY, "prompt_logprobs": 2},
        {**GREEDY, "max_tokens": 100, "ignore_eos": False},
        {**GREEDY, "stop_token_ids": [38, 11]},
        {**GREEDY, "stop": ["(", "w"], "include_stop_str_in_output": True},
        {**GREEDY, "max_tokens": None},
        {"temperature": 0},
        {**GREEDY, "top_k": -1, "unknown": 3, "logit_bias": {}, "bad_words": [], "stop": [], "stop_token_ids": []},
        {**GREEDY, "stop": "ll", "detokenize": True, "skip_special_tokens": False},
    ],
)
def test_greedy_answers_are_equal(real: str, fake: str, params: dict[str, Any]) -> None:
    assert both(real, fake, GENERATE, request(params)) == []


@pytest.mark.parametrize("prompt", [[5] * 510, [5] * 511, [1], list(range(57))])
def test_answers_to_other_prompts_are_equal(real: str, fake: str, prompt: list[int]) -> None:
    assert both(real, fake, GENERATE, request(GREEDY, token_ids=prompt)) == []


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 0.001},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.1},
        {"temperature": 0.7, "top_k": 8, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.5},
        {"min_tokens": 1, "stop_token_ids": [33]},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
    ],
)
def test_distributions_are_equal(real: str, fake: str, params: dict[str, Any]) -> None:
    def likely(url: str) -> list[float]:
        status, answer = call(url, GENERATE, request({**BEST, **params}))
        assert status == 200, answer
        entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert len(entries) == 20
        by_token = {entry["token_id"]: entry["logprob"] for entry in entries}
        return sorted(by_token.values(), reverse=True)[:19]  # the twentieth may be the sampled one, of any rank

    ours, theirs = likely(fake), likely(real)
    assert ours == pytest.approx(theirs, abs=1e-4, rel=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [5] * 512},
        {"token_ids": [5] * 600},
        {"token_ids": []},
        {"token_ids": [3, -1]},
        {"token_ids": [57]},
        {"model": "another"},
        *({"sampling_params": {**NEUTRAL, name: value}} for name, values in REFUSED.items() for value in values),
        {"sampling_params": {**NEUTRAL, "stop": ["a"], "detokenize": False}},
    ],
)
def test_refusals_are_equal(real: str, fake: str, body: dict[str, Any]) -> None:
    theirs, ours = (call(url, GENERATE, request(NEUTRAL) | body) for url in (real, fake))
    assert ours[0] == theirs[0] >= 400
    assert difference(theirs[1]["error"], ours[1]["error"]) == []


def test_control_calls_are_equal(real: str, fake: str) -> None:
    calls: list[tuple[str, Any, str]] = [
        ("/health", None, "GET"),
        ("/v1/models", None, "GET"),
        ("/get_world_size", None, "GET"),
        ("/weight_info", None, "GET"),
        ("/is_paused", None, "GET"),
        ("/pause?mode=keep&clear_cache=true", None, "POST"),
        ("/is_paused", None, "GET"),
        ("/pause?mode=other", None, "POST"),
        ("/reset_prefix_cache", None, "POST"),
        ("/resume", None, "POST"),
        ("/resume", None, "POST"),
        ("/is_paused", None, "GET"),
        ("/abort_requests", {}, "POST"),
        ("/abort_requests", {"request_ids": ["unknown"]}, "POST"),
        ("/abort_requests", None, "POST"),
        ("/inference/v1/abort_requests", {"request_ids": ["unknown"]}, "POST"),
        ("/inference/v1/abort_requests", {}, "POST"),
        ("/init_weight_transfer_engine", {}, "POST"),
        ("/update_weights", {}, "POST"),
        ("/finish_weight_update", {"weight_version": 7}, "POST"),
        (GENERATE, b"{", "POST"),
    ]
    found = {}
    for path, body, method in calls:
        theirs, ours = call(real, path, body, method), call(fake, path, body, method)
        assert ours[0] == theirs[0], (path, theirs, ours)
        if "error" not in (theirs[1] or {}) or path != GENERATE:
            found[path] = difference(theirs[1], ours[1])
    assert {path: places for path, places in found.items() if places} == {}


def test_aborted_answers_are_equal(real: str, fake: str) -> None:
    def aborted(url: str) -> Any:
        with ThreadPoolExecutor() as pool:
            call(url, "/pause?mode=keep")
            answer = pool.submit(call, url, GENERATE, request(NEUTRAL))
            deadline = time.monotonic() + 30
            while call(url, "/abort_requests", {})[1]["aborted"] == 0:  # not there yet
                assert time.monotonic() < deadline
            call(url, "/resume")
            return answer.result(timeout=60)

    theirs, ours = aborted(real), aborted(fake)
    assert ours[1]["choices"][0]["finish_reason"] == "abort"
    assert difference(list(theirs), list(ours)) == []


def test_updates_are_equal(real: str, fake: str, tiny_dir: Path, tmp_path: Path) -> None:
    """Last in this file: the servers have other weights afterwards."""
    file, partial, base = (tmp_path / f"{name}.safetensors" for name in ("other", "partial", "base"))
    weights = other_weights(tiny_dir, file)
    save_file({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, partial)
    save_file(load_file(tiny_dir / "model.safetensors"), base)
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}

    def update(path: Path, version: Any) -> list[tuple[str, Any]]:
        info = {"update_info": {"path": str(path)}}
        return [
            ("/pause?mode=keep&clear_cache=true", None),
            ("/start_weight_update", None),
            ("/update_weights", info),
            ("/finish_weight_update", {"weight_version": version}),
            ("/resume", None),
            (GENERATE, request({**GREEDY, "prompt_logprobs": 0})),
        ]

    calls: list[tuple[str, Any]] = [
        ("/init_weight_transfer_engine", {"init_info": {"shapes": shapes}}),
        ("/update_weights", {"update_info": {"path": str(file)}}),  # without a start
        ("/finish_weight_update", {"weight_version": "1"}),
        ("/start_weight_update", None),
        ("/start_weight_update", None),  # while one is open
        ("/update_weights", {"update_info": {"path": str(tmp_path / "none.safetensors")}}),
        *update(partial, "1"),
        *update(file, "1"),
        *update(file, 2),  # no string: refused, the session stays open
        ("/finish_weight_update", None),
        *update(base, "3"),
    ]
    for number, (path, body) in enumerate(calls):
        assert both(real, fake, path, body) == [], (number, path)
        assert both(real, fake, "/weight_info", method="GET") == [], (number, path)
    assert call(real, "/weight_info", method="GET")[1] == {"weight_version": "3"}
