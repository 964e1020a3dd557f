"""vLLM 0.32's calls, as the fake server answers them: bodies, statuses and refusals; no HTTP, no faults of its own.

What the real server answers, and how it was seen, is in docs/server_protocol.md. Left out: streaming, text output,
LoRA, multi-modal input, tensor and data parallel ranks.
"""

import asyncio
import hashlib
import time
from typing import Any

from fake_engine import Engine, Running
from fake_faults import Answer, Call
from fake_refusals import Reply, error, invalid, refusal
from safetensors.torch import load_file

from grpo.sync.compare import compare_weights

ROUTES = {
    "health": "GET /health",
    "models": "GET /v1/models",
    "get_world_size": "GET /get_world_size",
    "weight_info": "GET /weight_info",
    "is_paused": "GET /is_paused",
    "generate": "POST /inference/v1/generate",
    "pause": "POST /pause",
    "resume": "POST /resume",
    "abort_requests": "POST /abort_requests",
    "inference_abort_requests": "POST /inference/v1/abort_requests",
    "init_weight_transfer_engine": "POST /init_weight_transfer_engine",
    "start_weight_update": "POST /start_weight_update",
    "update_weights": "POST /update_weights",
    "finish_weight_update": "POST /finish_weight_update",
    "reset_prefix_cache": "POST /reset_prefix_cache",
    "weight_checker": "POST /weight_checker",
}


# Fields of an answer that are null unless a feature outside our use is on.
UNUSED_FIELDS = (
    "prompt_token_id_logprobs",
    "prompt_token_ids",
    "mm_placeholders",
    "metrics",
    "kv_transfer_params",
    "ec_transfer_params",
)


def worker_error(message: str) -> Reply:
    """A call that failed in the engine's process."""
    return error(
        f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace "
        "above for the root cause",
        500,
    )


class VLLM:
    """The calls on an engine. One method per name in ROUTES, each gives (status, answer)."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name

    async def health(self, call: Call, apply: str) -> Reply:
        return 200, None

    async def models(self, call: Call, apply: str) -> Reply:
        card = {"id": self.model_name, "object": "model", "max_model_len": self.engine.max_model_len}
        return 200, {"object": "list", "data": [card]}

    async def get_world_size(self, call: Call, apply: str) -> Reply:
        return 200, {"world_size": 1}

    async def weight_info(self, call: Call, apply: str) -> Reply:
        return 200, {"weight_version": self.engine.version}

    async def is_paused(self, call: Call, apply: str) -> Reply:
        return 200, {"is_paused": self.engine.paused is not None}

    async def pause(self, call: Call, apply: str) -> Reply:
        mode = call.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return invalid("query.mode", "Input should be 'abort', 'wait' or 'keep'")
        if apply != "nothing":
            await self.engine.pause(mode, clear_cache=call.query.get("clear_cache", "true").lower() in ("true", "1"))
        return 200, {"status": "paused"}

    async def resume(self, call: Call, apply: str) -> Reply:
        if apply != "nothing":
            self.engine.resume()
        return 200, {"status": "resumed"}

    async def abort_requests(self, call: Call, apply: str) -> Reply:
        if call.headers.get("Content-Length", "0") == "0":
            return error("Invalid JSON format", kind="Bad Request")
        ids = call.body.get("request_ids")
        aborted = [s for s in self.engine.sequences if not ids or s.request_id in ids]
        if apply != "nothing":
            self.engine.abort(aborted)
        return 200, {"status": "aborted", "aborted": len(ids or aborted)}

    async def inference_abort_requests(self, call: Call, apply: str) -> Reply:
        if call.body.get("request_ids") is None:
            return error("Missing 'request_ids' in request body", kind="Bad Request")
        await self.abort_requests(call, apply)
        return 200, None

    async def init_weight_transfer_engine(self, call: Call, apply: str) -> Reply:
        if not isinstance(call.body.get("init_info"), dict):
            return invalid("body.init_info", "Field required")
        return 200, {"message": "Weight transfer initialized"}

    async def start_weight_update(self, call: Call, apply: str) -> Reply:
        if self.engine.session_open:
            return worker_error("start_weight_update called while a weight update is already active.")
        self.engine.session_open = True
        return 200, {"message": "Weight update started"}

    async def update_weights(self, call: Call, apply: str) -> Reply:
        if "update_info" not in call.body:
            return invalid("body.update_info", "Field required")
        if not self.engine.session_open:
            return worker_error("start_weight_update must be called before update_weights.")
        if call.body["update_info"].get("compare"):
            self.engine.session_open = False
            found = compare_weights(self.engine.model, load_file(call.body["update_info"]["path"]))
            return worker_error(str(found))
        if apply != "nothing":
            try:
                self.engine.load(call.body["update_info"]["path"], all_but_head=apply == "all_but_head")
            except Exception as problem:
                self.engine.session_open = False  # as vLLM: a failed update closes its session
                return worker_error(f"{type(problem).__name__}: {problem}")
        return 200, {"message": "Weights updated"}

    async def finish_weight_update(self, call: Call, apply: str) -> Reply:
        version = call.body.get("weight_version")
        if not isinstance(version, str | None):
            return invalid("body.weight_version", "Input should be a valid string")  # the session stays open
        if not self.engine.session_open:
            return worker_error("finish_weight_update called without a matching start_weight_update.")
        self.engine.session_open = False
        if apply != "nothing" and version is not None:
            self.engine.version = version
        return 200, {"message": "Weight update finished"}

    async def reset_prefix_cache(self, call: Call, apply: str) -> Reply:
        return 200, {"success": self.engine.reset_prefix_cache()}

    async def weight_checker(self, call: Call, apply: str) -> Reply:
        weights = self.engine.model.state_dict()
        checksums = {k: hashlib.sha256(v.contiguous().numpy().tobytes()).hexdigest() for k, v in weights.items()}
        return 200, {"checksums": checksums}

    async def generate(self, call: Call, apply: str) -> Reply:
        refused = refusal(
            call,
            model=self.model_name,
            longest=self.engine.max_model_len,
            vocabulary=self.engine.model.config.vocab_size,
        )
        if refused:
            return refused
        prompt, params = call.body["token_ids"], call.body["sampling_params"]
        own_id = call.headers.get("X-Request-Id") or call.body.get("request_id", f"fake-{call.order}")
        request_id = f"generate-tokens-{own_id}"
        count = params.get("n", 1)
        call.sequences = [self.engine.sequence(request_id, prompt, params, i) for i in range(count)]
        await asyncio.gather(*(self.engine.generate(s, lambda: call.allowed) for s in call.sequences))
        tokens = call.tokens
        top = params.get("prompt_logprobs")
        return 200, {
            "request_id": request_id,
            "model": self.model_name,
            "created": int(time.time()),
            "usage": {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + tokens, "completion_tokens": tokens}
            | dict.fromkeys(("prompt_tokens_details", "completion_tokens_details")),
            "prompt_logprobs": None if top is None else self._prompt_rows(prompt, top),
            **dict.fromkeys(UNUSED_FIELDS),
            "output_mode": "tokens",
            "choices": [self._choice(i, sequence) for i, sequence in enumerate(call.sequences)],
        }

    def _prompt_rows(self, prompt: list[int], top: int) -> list[dict[str, Any] | None]:
        text = self.engine.tokenizer.decode
        return [
            None if row is None else {str(i): {"logprob": p, "rank": r, "decoded_token": text([i])} for i, p, r in row}
            for row in self.engine.prompt_logprobs(prompt, top)
        ]

    def _choice(self, index: int, sequence: Running) -> Answer:
        rows = [[{"token_id": i, "logprob": p, "rank": r} for i, p, r in row] for row in sequence.logprobs]
        wanted = sequence.params["logprobs"]
        content = [{**row[0], "top_logprobs": row[: max(wanted or 0, 1)]} for row in rows]
        return {
            "index": index,
            "finish_reason": sequence.finish_reason,
            "stop_reason": sequence.stop_reason,
            "token_ids": sequence.token_ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": _spans(sequence.versions),
            "logprobs": None if wanted is None else {"content": content},
        }


def _spans(versions: list[str]) -> list[Answer]:
    spans: list[Answer] = []
    for i, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = i + 1
        else:
            spans.append({"version": version, "start": i, "end": i + 1})
    return spans
