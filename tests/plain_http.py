"""vLLM's calls in their plainest form, without our client: for tests of the fake server and of the client itself."""

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

# A generate request's parameters, neutral, all named.
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "logprobs": 0, "seed": 5, "ignore_eos": True}
PROMPT = [12, 7, 30, 22]


def call(url: str, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
    """(status, decoded answer or None). Nothing is sent where `body` is None."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, answer = response.status, response.read()
    except urllib.error.HTTPError as refusal:
        with refusal:
            status, answer = refusal.code, refusal.read()
    return status, json.loads(answer) if answer else None


def generate(url: str, prompt: list[int] = PROMPT, **params: Any) -> dict[str, Any]:
    """The first choice of a generate answer; parameters are NEUTRAL but for those given."""
    body = {"token_ids": prompt, "sampling_params": {**NEUTRAL, **params}}
    status, answer = call(url, "/inference/v1/generate", body)
    assert status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def sync(url: str, path: Path, version: str, mode: str = "keep", clear_cache: str = "true") -> list[int]:
    """One weight update from a safetensors file; the five statuses."""
    steps = [
        (f"/pause?mode={mode}&clear_cache={clear_cache}", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": str(path)}}),
        ("/finish_weight_update", {"weight_version": version}),
        ("/resume", None),
    ]
    return [call(url, path, body)[0] for path, body in steps]
