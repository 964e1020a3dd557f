"""`grpo.sync.base.Control` without our client and its loop: a sync alone, in scripts, benchmarks and tests."""

import http.client
import json as jsonlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

from grpo.rollout.errors import ServerError


@dataclass
class PlainControl:
    """Implements `grpo.sync.base.Control`: one connection per call. ServerError as `LoopControl` raises it."""

    url: str

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        return self._call("GET", path, None, None, timeout)

    def post(
        self,
        path: str,
        *,
        json: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
        timeout: float,
    ) -> dict[str, Any]:
        return self._call("POST", path, json, params, timeout)

    def _call(self, method: str, path: str, body: Any, params: dict[str, str] | None, timeout: float) -> dict[str, Any]:
        query = f"?{urlencode(params)}" if params else ""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path + query, None if body is None else jsonlib.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
        except OSError as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            raise ServerError(f"{self.url}{path}: {response.status}: {text[:2000]}")
        answer: dict[str, Any] = jsonlib.loads(text) if text.strip() else {}
        return answer
