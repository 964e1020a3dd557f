"""What vLLM 0.32 refuses at /inference/v1/generate, with the statuses and (the beginnings of) the messages it gives.

Seen on the real server (docs/server_protocol.md). Unknown names are not refused: vLLM ignores them without a word.
"""

from typing import Any

from fake_faults import Answer, Call

Reply = tuple[int, Answer | None]

NOT_NULL = {
    "n": "integer",
    "temperature": "number",
    "top_p": "number",
    "top_k": "integer",
    "min_p": "number",
    "repetition_penalty": "number",
    "presence_penalty": "number",
    "frequency_penalty": "number",
    "min_tokens": "integer",
    "ignore_eos": "boolean",
    "detokenize": "boolean",
    "skip_special_tokens": "boolean",
    "include_stop_str_in_output": "boolean",
}
# name: (lowest, highest, what vLLM says)
RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, 16384, "n must be at least 1"),
    "temperature": (0, 2, "temperature must be in [0, 2]"),
    "top_p": (1e-9, 1, "top_p must be in (0, 1]"),
    "top_k": (-1, 2**31, "top_k must be 0 (disable), or at least 1"),
    "min_p": (0, 1, "min_p must be in [0, 1]"),
    "repetition_penalty": (1e-9, 1e9, "repetition_penalty must be greater than zero"),
    "presence_penalty": (-2, 2, "presence_penalty must be in [-2, 2]"),
    "frequency_penalty": (-2, 2, "frequency_penalty must be in [-2, 2]"),
    "max_tokens": (1, 2**31, "max_tokens must be at least 1"),
    "min_tokens": (0, 2**31, "min_tokens must be greater than or equal to 0"),
    "logprobs": (0, 20, "logprobs is greater than max allowed: 20"),
    "seed": (-(2**63), 2**64 - 1, "can't serialize ints < -2**63 or > 2**64 - 1"),
}
NAMED = {"temperature", "top_p", "max_tokens", "logprobs"}  # refusals whose `param` names the parameter
KINDS = {403: "PermissionDeniedError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def error(message: str, status: int = 400, param: str | None = None, kind: str | None = None) -> Reply:
    """An error in vLLM's shape."""
    kind = kind or KINDS.get(status, "BadRequestError")
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


def invalid(param: str, message: str) -> Reply:
    """The body (or the query) does not fit the schema."""
    text = f"1 validation error:\n  {{'loc': '{param}', 'msg': '{message}'}}"
    return error(text, param=param, kind="Bad Request")


def refusal(call: Call, *, model: str, longest: int, vocabulary: int) -> Reply | None:
    """The error that a generate request gets, or None for one that vLLM accepts."""
    body = call.body
    if not call.headers.get("Content-Type", "").startswith("application/json"):
        return error(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", kind="Bad Request"
        )
    if "token_ids" not in body or "sampling_params" not in body:
        missing = "token_ids" if "token_ids" not in body else "sampling_params"
        return invalid(f"body.{missing}", "Field required")
    ids, params = body["token_ids"], body["sampling_params"]
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return invalid("body.token_ids", "Input should be a valid integer")
    if not ids:
        return invalid("body.token_ids", "List should have at least 1 item after validation, not 0")
    if min(ids) < 0:
        return invalid("body.token_ids", "Value error, token_ids must not contain negative values")
    if (wrong := _wrong_parameter(params, vocabulary)) is not None:
        return wrong
    if body.get("model") not in (None, model):
        return error(f"The model `{body['model']}` does not exist. Valid aliases: {model}.", 404, "model")
    if len(ids) >= longest:
        return error(
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {longest}. Make sure "
            "that `max_model_len` is no smaller than the number of text tokens."
            if len(ids) > longest
            else f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens (at least 1) is "
            f"longer than the maximum model length of {longest}."
        )
    if max(ids) >= vocabulary:
        return error(f"Token id {max(ids)} is out of vocabulary")
    return None


def _wrong_parameter(params: dict[str, Any], vocabulary: int) -> Reply | None:
    for name, kind in NOT_NULL.items():
        if name in params and params[name] is None:
            return invalid("body.sampling_params", f"{name}: Input should be a valid {kind}")
    for name, (lowest, highest, message) in RANGES.items():
        value = params.get(name)
        if value is not None and not isinstance(value, bool) and not lowest <= value <= highest:
            return error(f"{message}, got {value}.", param=name if name in NAMED else None)
    if (params.get("max_tokens") or 2**31) < params.get("min_tokens", 0):
        return error(f"min_tokens must be less than or equal to max_tokens={params['max_tokens']}.")
    stop = params.get("stop")
    if stop == "" or (isinstance(stop, list) and "" in stop):
        return error("stop cannot contain an empty string.")
    if stop and params.get("detokenize") is False:
        return error("stop strings are only supported when detokenize is True. Set detokenize=True to use stop.")
    outside = [i for i in params.get("stop_token_ids") or [] if not 0 <= i < vocabulary]
    if outside:
        return error(f"token_id(s) {outside} in stop_token_ids contain out-of-vocab token ids.", param="stop_token_ids")
    return None
