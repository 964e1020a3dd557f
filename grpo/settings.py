"""The settings of a run as plain objects, checked as they are made. Hydra builds them from conf/; nothing here imports
torch, so a mistake is answered at once.

Each class is one config group (and `Train` the root's `train`); the comments above the keys in conf/ explain them. An
error names the key and the value as the user wrote them, and what would be right.
"""

import math
import re
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar
from urllib.parse import urlsplit


class Checked:
    """Refuses values of another type, which Hydra would let pass (`model.lr=abc`), naming the key."""

    GROUP: ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, f.name), hints[f.name]
            if not fits(value, hint):
                raise ValueError(f"{self.GROUP}.{f.name}={value!r}: expected {type_name(hint)}")
        self.check()

    def check(self) -> None:
        """What types alone do not say."""

    def at_least(self, low: float, *keys: str) -> None:
        for key in keys:
            value = getattr(self, key)
            if value is not None and not value >= low:
                raise ValueError(f"{self.GROUP}.{key}={value}: must be at least {low}")

    def one_of(self, key: str, choices: Iterable[str]) -> None:
        if getattr(self, key) not in choices:
            raise ValueError(f"{self.GROUP}.{key}={getattr(self, key)!r}: choose one of {', '.join(choices)}")


@dataclass(slots=True, kw_only=True)
class Train(Checked):
    GROUP: ClassVar[str] = "train"
    steps: int
    batch_size: int
    minibatches: int
    tokens_per_microbatch: int
    share_prompts: bool
    max_grad_norm: float
    eval_every: int
    eval_samples: int
    eval_temperature: float
    checkpoint_every: int
    keep_checkpoints: int
    record_tokens: bool
    wait_timeout: float
    watchdog: float
    threads: int | None

    def check(self) -> None:
        self.at_least(1, "steps", "batch_size", "minibatches", "tokens_per_microbatch", "eval_samples", "threads")
        self.at_least(0, "max_grad_norm", "eval_every", "eval_temperature", "checkpoint_every", "keep_checkpoints")
        self.at_least(0, "watchdog")
        self.at_least(1, "wait_timeout")


@dataclass(slots=True, kw_only=True)
class Model(Checked):
    GROUP: ClassVar[str] = "model"
    path: str
    dtype: str
    device: str
    optimizer: str
    lr: float
    weight_decay: float
    betas: list[float]
    warmup_steps: int
    schedule: str
    checkpointing: str
    attention: str
    compile: str | bool
    server_memory: float
    lora_rank: int = 0
    lora_alpha: float = 32.0
    lora_targets: str | list[str] = "all-linear"

    def adapters(self) -> str:
        """For the plan."""
        if not self.lora_rank:
            return ""
        targets = self.lora_targets if isinstance(self.lora_targets, str) else ", ".join(self.lora_targets)
        return f"; LoRA of rank {self.lora_rank}, alpha {self.lora_alpha:g}, on {targets}"

    def check(self) -> None:
        self.at_least(0, "lora_rank")
        if not self.lora_alpha > 0:
            raise ValueError(f"model.lora_alpha={self.lora_alpha}: must be above 0")
        if not self.lora_targets:
            raise ValueError(
                f"model.lora_targets={self.lora_targets!r}: names of linear layers ([q_proj, v_proj]), or all-linear"
            )
        self.one_of("dtype", ("float32", "bfloat16"))
        self.one_of("optimizer", ("adamw", "adamw_bf16"))
        self.one_of("schedule", ("constant", "cosine"))
        self.one_of("checkpointing", ("none", "selective", "full"))
        self.one_of("attention", ("auto", "torch", "flash4"))
        self.at_least(0, "lr", "weight_decay", "warmup_steps")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"model.device={self.device!r}: auto, cpu, cuda or cuda:<index>")
        if self.compile not in ("auto", True, False):
            raise ValueError(f"model.compile={self.compile!r}: auto, true or false")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"model.betas={self.betas}: two numbers from 0 to below 1")
        if not 0 < self.server_memory < 1:
            raise ValueError(f"model.server_memory={self.server_memory}: a share of the GPU's memory, above 0, below 1")


# Law 4: what is sampled must be what the trainer computes. Key -> its only value.
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@dataclass(slots=True, kw_only=True)
class Rollout(Checked):
    GROUP: ClassVar[str] = "rollout"
    group_size: int
    max_staleness: int
    max_inflight: int
    temperature: float
    zero_variance: str
    zero_variance_batches: int
    seeded: bool
    servers: int
    keep_server: bool
    host: str
    port: int | None
    api_key: str | None
    tensor_parallel: int
    gpu_memory: float | None
    eager: bool
    compile_cache: str | None
    cpu_kv_gb: float
    cpu_threads: int | None
    request_timeout: float
    retries: int
    startup_timeout: float
    restarts: int
    reattach_timeout: float
    urls: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    extra_args: list[str] = field(default_factory=list)
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def check(self) -> None:
        self.at_least(1, "group_size", "max_inflight", "servers", "tensor_parallel", "zero_variance_batches")
        self.at_least(0, "max_staleness", "retries", "restarts")
        self.at_least(1, "request_timeout", "startup_timeout", "reattach_timeout", "cpu_threads")
        self.one_of("zero_variance", ("discard", "keep"))
        if not 0 < self.temperature < 100:
            raise ValueError(
                f"rollout.temperature={self.temperature}: above 0 (a greedy sampler gives a group equal completions)"
            )
        if not self.cpu_kv_gb > 0:
            raise ValueError(f"rollout.cpu_kv_gb={self.cpu_kv_gb}: must be above 0")
        for key, neutral in NEUTRAL.items():
            value = getattr(self, key)
            if value != neutral and not (key == "top_k" and value == -1):
                raise ValueError(
                    f"rollout.{key}={value}: only {neutral} (off); otherwise the sampler draws from another "
                    "distribution than the trainer computes, and every importance ratio is wrong"
                )
        if self.gpu_memory is not None and not 0 < self.gpu_memory <= 1:
            raise ValueError(f"rollout.gpu_memory={self.gpu_memory}: a share of the GPU's memory, above 0, at most 1")
        for url in self.urls:
            if not _is_server(url):
                raise ValueError(f"rollout.urls: {url!r} is no http://host:port")
            if url.rstrip("/").endswith("/v1"):
                raise ValueError(f"rollout.urls: {url!r}: give the server's root, without /v1")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"rollout.urls={self.urls}: the same server twice")
        if self.port is not None and not 0 < self.port <= 65536 - self.servers:
            raise ValueError(
                f"rollout.port={self.port}: 1 to 65535 (and the ports after it, for {self.servers} servers), or null "
                "for a free one"
            )


@dataclass(slots=True, kw_only=True)
class Sync(Checked):
    GROUP: ClassVar[str] = "sync"
    backend: str
    pause: str
    verify_every: int
    timeout: float
    dir: str | None

    def check(self) -> None:
        self.one_of("backend", ("auto", "disk", "ipc", "nccl"))
        self.one_of("pause", ("keep", "wait"))
        self.at_least(0, "verify_every")
        self.at_least(1, "timeout")


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as a user means it: True is no number, nor is NaN; 1 is a float."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, a) for a in arguments)
    if origin is list:
        return isinstance(value, list | tuple) and all(fits(v, arguments[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is type(None):
        return value is None
    return isinstance(value, hint)


def type_name(hint: Any) -> str:
    """An annotated type in words."""
    names = {int: "a whole number", float: "a finite number", str: "a text", bool: "true or false", type(None): "null"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(a) for a in arguments)
    if origin is list:
        return f"a list [...], each {type_name(arguments[0])}"
    return names.get(hint, str(hint))
