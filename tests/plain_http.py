"""One HTTP call without our client: for tests of the fake server, and of the client itself against it."""

import json
import urllib.error
import urllib.request
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
