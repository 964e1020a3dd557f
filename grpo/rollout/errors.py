"""What can go wrong between us and a server, by what should be done about it."""


class ServerError(RuntimeError):
    """A call failed: names url, call, status and the beginning of the body. Not retried."""


class TransientError(ServerError):
    """Worth another try: a 5xx, a dropped socket, a time-out, an aborted generation."""


class RequestRefused(ServerError):  # noqa: N818
    """A 4xx: the request itself is wrong (a prompt that is too long). The prompt is left out and counted."""


class InvalidAnswer(ServerError):  # noqa: N818
    """A 200 whose content cannot be trained on. `reason` is the ledger's word for it, e.g. "logprobs:null"."""

    def __init__(self, message: str, *, reason: str, tokens: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.tokens = tokens


class ServersLost(ServerError):  # noqa: N818
    """Retries are used up: the run ends, after a checkpoint."""
