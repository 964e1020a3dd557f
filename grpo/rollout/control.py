"""A server's control plane for synchronous callers (the weight sync): one call, one deadline, one status looked at."""

from typing import Any

from grpo.rollout.client import Client
from grpo.rollout.loader import Loader


class LoopControl:
    """Runs the calls in the loader's loop, on the session of its client. Implements `grpo.sync.base.Control`."""

    def __init__(self, loader: Loader, client: Client, url: str) -> None:
        self.loader = loader
        self.client = client
        self.url = url

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

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, params: dict[str, str] | None, timeout: float
    ) -> dict[str, Any]:
        call = self.client.call(self.url, method, path, body=body, params=params, timeout=timeout)
        answer = self.loader.run(call, timeout + 5.0)  # the call's own deadline strikes first and says more
        assert isinstance(answer, dict), f"{self.url}{path}: an answer that is no object: {answer!r}"
        return answer
