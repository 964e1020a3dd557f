"""A server's control plane for synchronous callers (the weight sync): one call, one deadline, one status looked at."""

import http.client
import json as jsonlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from grpo.rollout.errors import ServerError

if TYPE_CHECKING:
    from grpo.rollout.client import Client
    from grpo.rollout.loader import Loader


class Calls(ABC):
    """Implements `grpo.sync.base.Control` by one method that a subclass gives."""

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

    @abstractmethod
    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str] | None, timeout: float
    ) -> dict[str, Any]:
        """The answer's object. Raises ServerError."""


class LoopControl(Calls):
    """Runs the calls in the loader's loop, on the session of its client.

    look: called now and then while a call is open; what it raises ends the call. A server whose engine is gone may
    keep a connection open for as long as we wait for its answer.
    """

    def __init__(self, loader: "Loader", client: "Client", url: str, look: Callable[[], None] = lambda: None) -> None:
        self.loader = loader
        self.client = client
        self.url = url
        self.look = look

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str] | None, timeout: float
    ) -> dict[str, Any]:
        call = self.client.call(self.url, method, path, body=body, params=params, timeout=timeout)
        answer = self.loader.run(call, timeout + 5.0, self.look)  # the call's own deadline strikes first and says more
        assert isinstance(answer, dict), f"{self.url}{path}: an answer that is no object: {answer!r}"
        return answer


class PlainControl(Calls):
    """One connection per call, without our client and its loop: a sync alone, in benchmarks and tests."""

    def __init__(self, url: str) -> None:
        self.url = url

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str] | None, timeout: float
    ) -> dict[str, Any]:
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
