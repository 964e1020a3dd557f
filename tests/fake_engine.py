"""The engine behind the fake server: a real transformers model on the CPU that samples as vLLM 0.32 does.

Every request is computed alone, one token at a time, in float32: its tokens and logprobs depend on nothing but the
weights, the prompt, the sampling parameters and (seed, position), whatever else is running. Runs on one event loop
and is not thread-safe. Left out: batching, streaming, logit_bias, bad_words, n-gram and grammar features.

Key-value caches are kept per request, and per prompt for the requests to come, as vLLM's prefix cache does (that one
in whole blocks). `pause(clear_cache=True)` drops both, so that an update gives exact logprobs; where the caches were
not cleared, logprobs are those of a mixture of weights.
"""

import asyncio
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

INITIAL_VERSION = "default"  # vLLM's label before the first /finish_weight_update with a version
FLOOR = -9999.0  # vLLM sends this for a logprob of -inf or NaN

# What a request that names nothing gets. A server's own defaults (generation_config.json) go on top of these.
DEFAULTS: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "skip_special_tokens": True,
}


@dataclass(eq=False)
class Running:
    """One sequence that is being generated."""

    request_id: str
    prompt: list[int]
    params: dict[str, Any]
    seed: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float, int]]] = field(default_factory=list)  # (id, logprob, rank), sampled one first
    versions: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    started: bool = False  # a paused server queues what is new
    cache: DynamicCache | None = None


class Engine:
    """Model, weights' version, pause state and the sequences that are running.

    `changed` is called (on the loop) after everything that a test may wait for.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        max_model_len: int | None,
        logprobs_mode: str,
        sampling_defaults: dict[str, Any],
        tokens_per_second: float | None,
        changed: Callable[[], None],
    ) -> None:
        self.model_dir = model_dir
        self.logprobs_mode = logprobs_mode
        self.sampling_defaults = sampling_defaults
        self.tokens_per_second = tokens_per_second
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._changed = changed
        self._event = asyncio.Event()
        self._seeds = itertools.count(1_000_003)  # for requests without a seed
        self.reset()
        self.max_model_len = max_model_len or self.model.config.max_position_embeddings
        # The tokenizer's end token, and what else generation_config.json names as one.
        self.eos_id = self.tokenizer.eos_token_id
        eos_ids = self.model.generation_config.eos_token_id
        self.other_eos_ids = (set(eos_ids) if isinstance(eos_ids, list) else {eos_ids}) - {self.eos_id}

    def reset(self) -> None:
        """The state of a server that has just started: base weights, no version, nothing running."""
        self.model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        self._shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}  # no tied head
        self.version = INITIAL_VERSION
        self.paused: str | None = None
        self.session_open = False
        self.sequences: list[Running] = []
        self._prefixes: dict[tuple[int, ...], tuple[DynamicCache, Tensor]] = {}  # cache and last logits of a prompt

    def notify(self) -> None:
        """Wake the coroutines in `until`, and whoever waits outside the loop."""
        self._event.set()
        self._event = asyncio.Event()
        self._changed()

    async def until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._event.wait()

    # Generation

    def sequence(self, request_id: str, prompt: list[int], params: dict[str, Any], index: int) -> Running:
        """Sequence `index` of a request's `n`; params as the request named them."""
        merged = {**DEFAULTS, **self.sampling_defaults, **params}
        seed = next(self._seeds) if merged["seed"] in (None, -1) else merged["seed"]
        return Running(request_id, prompt, merged, seed + index)

    async def generate(self, sequence: Running, allowed: Callable[[], float]) -> None:
        """Run a sequence to its end: finished, aborted, or its client gone (then this coroutine is cancelled).

        `allowed()` is how many tokens it may have by now.
        """

        def ready() -> bool:
            frozen = self.paused == "keep" or len(sequence.token_ids) >= allowed()
            return sequence.finish_reason is not None or not frozen

        self.sequences.append(sequence)
        try:
            await self.until(lambda: self.paused is None or sequence.finish_reason is not None)
            sequence.started = True
            while True:
                await self.until(ready)
                if sequence.finish_reason is not None:
                    return
                self._compute_token(sequence)
                self.notify()
                await asyncio.sleep(0 if self.tokens_per_second is None else 1 / self.tokens_per_second)
        finally:
            if sequence in self.sequences:
                self.sequences.remove(sequence)
            self.notify()

    @torch.inference_mode()
    def _compute_token(self, sequence: Running) -> None:
        logits_V = self._next_logits(sequence)
        processed_V = self._process(logits_V, sequence)
        token = sample(processed_V, sequence)
        reported_V = processed_V if self.logprobs_mode == "processed_logprobs" else logits_V
        sequence.token_ids.append(token)
        sequence.logprobs.append(_ranked(reported_V.log_softmax(-1), token, sequence.params["logprobs"] or 0))
        sequence.versions.append(self.version)
        self._check_end(sequence, token)

    def _next_logits(self, sequence: Running) -> Tensor:
        ids = tuple(sequence.prompt + sequence.token_ids)
        if sequence.cache is None and ids in self._prefixes:
            cache, logits_V = self._prefixes[ids]
            sequence.cache = copy.deepcopy(cache)
            return logits_V
        if sequence.cache is None:
            sequence.cache = DynamicCache(config=self.model.config)
        inputs = torch.tensor([ids[sequence.cache.get_seq_length() :]])
        logits_V = self.model(input_ids=inputs, past_key_values=sequence.cache, use_cache=True).logits[0, -1]
        if not sequence.token_ids:
            self._prefixes[ids] = copy.deepcopy(sequence.cache), logits_V
        return logits_V

    def _process(self, logits_V: Tensor, sequence: Running) -> Tensor:
        """Penalties, temperature, min-p, top-k, top-p, in vLLM's order; removed tokens get -inf."""
        params = sequence.params
        logits_V = logits_V.clone()
        if len(sequence.token_ids) < params["min_tokens"]:
            ends = {self.eos_id, *self.other_eos_ids, *(params["stop_token_ids"] or ())}  # eos also where it is ignored
            logits_V[list(ends)] = -torch.inf
        counts_V = torch.bincount(torch.tensor(sequence.token_ids, dtype=torch.int64), minlength=len(logits_V))
        seen_V = counts_V > 0
        seen_V[sequence.prompt] = True
        scale = params["repetition_penalty"]
        logits_V = torch.where(seen_V, torch.where(logits_V > 0, logits_V / scale, logits_V * scale), logits_V)
        logits_V -= params["frequency_penalty"] * counts_V + params["presence_penalty"] * (counts_V > 0)
        if params["temperature"] < 1e-5:
            return logits_V  # greedy
        logits_V /= max(params["temperature"], 0.01)  # vLLM's floor
        if params["min_p"] > 0:
            probs_V = logits_V.softmax(-1)
            logits_V[probs_V < params["min_p"] * probs_V.max()] = -torch.inf
        if params["top_k"] > 0:
            kth = logits_V.topk(min(params["top_k"], len(logits_V))).values[-1]
            logits_V[logits_V < kth] = -torch.inf
        if params["top_p"] < 1:
            sorted_V, order_V = logits_V.sort(descending=True)
            before_V = sorted_V.softmax(-1).cumsum(-1) - sorted_V.softmax(-1)
            logits_V[order_V[before_V >= params["top_p"]]] = -torch.inf
        return logits_V

    def _check_end(self, sequence: Running, token: int) -> None:
        params, length = sequence.params, len(sequence.token_ids)
        if length < params["min_tokens"]:
            return
        stops = [params["stop"]] if isinstance(params["stop"], str) else params["stop"] or []
        text = self.tokenizer.decode(sequence.token_ids, skip_special_tokens=params["skip_special_tokens"])
        named = set(params["stop_token_ids"] or ()) | (set() if params["ignore_eos"] else self.other_eos_ids)
        if token == self.eos_id and not params["ignore_eos"]:
            sequence.finish_reason = "stop"
        elif token in named:
            sequence.finish_reason, sequence.stop_reason = "stop", token
        elif found := [stop for stop in stops if stop in text]:
            sequence.finish_reason, sequence.stop_reason = "stop", found[0]
        elif length == params["max_tokens"] or len(sequence.prompt) + length >= self.max_model_len:
            sequence.finish_reason = "length"

    @torch.inference_mode()
    def prompt_logprobs(self, prompt: list[int], top: int) -> list[list[tuple[int, float, int]] | None]:
        """Logprobs of the prompt's own tokens, without temperature (as vLLM has it); None for the first."""
        logprobs_TV = self.model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        rows = [_ranked(logprobs_TV[i], token, top) for i, token in enumerate(prompt[1:])]
        return [None, *rows]

    # Control

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Returns when nothing computes any more: requests aborted, finished (wait) or frozen where they are (keep)."""
        self.paused = mode
        if mode == "abort":
            self.abort(self.sequences)
        self.notify()
        if mode == "wait":
            await self.until(lambda: not any(s.started for s in self.sequences))  # also where it is resumed meanwhile
        if clear_cache:
            self._prefixes.clear()
            for sequence in self.sequences:
                sequence.cache = None
        self.notify()

    def reset_prefix_cache(self) -> bool:
        """Whether it was done: not while a request holds a cache."""
        done = all(sequence.cache is None for sequence in self.sequences)
        if done:
            self._prefixes.clear()
        return done

    def resume(self) -> None:
        self.paused = None
        self.notify()

    def abort(self, sequences: list[Running]) -> None:
        for sequence in sequences:
            sequence.finish_reason = "abort"
        self.notify()

    def load(self, path: str, *, all_but_head: bool = False) -> None:
        """Load a safetensors file into the model; one that lacks or adds tensors (a tied head aside) changes nothing.

        As strict as our own engine in the real server (`grpo.sync.disk_engine`). Raises ValueError.

        `all_but_head` is the fault of a prepacked output head: it keeps its weights, also where it is tied.
        """
        weights = load_file(path)
        shapes = self._shapes
        sent = {name: tensor.shape for name, tensor in weights.items()}
        wrong = sorted(name for name in sent.keys() | shapes.keys() if sent.get(name) != shapes.get(name))
        if wrong:
            raise ValueError(f"{path} does not fit the model: {', '.join(wrong[:5])}")
        head = self.model.lm_head
        if all_but_head:
            head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
            weights.pop("lm_head.weight", None)
        self.model.load_state_dict(weights, strict=False)
        if self.model.config.tie_word_embeddings and not all_but_head:
            self.model.tie_weights()


def sample(logits_V: Tensor, sequence: Running) -> int:
    """Gumbel-max with noise from (seed, position) alone, so that a request samples the same in any company."""
    if sequence.params["temperature"] < 1e-5:
        return int(logits_V.argmax())
    generator = torch.Generator().manual_seed((sequence.seed * 1_000_003 + len(sequence.token_ids)) % 2**63)
    uniform_V = torch.rand(logits_V.shape, generator=generator, dtype=torch.float64)
    return int((logits_V.double() - (-uniform_V.log()).log()).argmax())


def _ranked(logprobs_V: Tensor, token: int, top: int) -> list[tuple[int, float, int]]:
    """(id, logprob, rank) of the sampled token, then of the `top` most likely others."""
    best = logprobs_V.topk(top).indices.tolist() if top else []
    chosen = [token, *(i for i in best if i != token)]
    return [(i, max(float(logprobs_V[i]), FLOOR), int((logprobs_V > logprobs_V[i]).sum()) + 1) for i in chosen]
