"""A model with random weights and one server on it, started and synced as run.py does it."""

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from train_step import save_model

from grpo.model import Policy
from grpo.rollout.control import PlainControl
from grpo.rollout.server import plan_servers
from grpo.settings import Rollout, Sync
from grpo.sync import make_sync
from grpo.sync.base import WeightSync

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Served:
    """model: its folder, with a tokenizer. url: of the server. start_s: until it was ready."""

    model: Path
    url: str
    start_s: float
    vocabulary: int


def make_tokenizer(folder: Path, vocabulary: int) -> None:
    """One token per character, so that a prompt has as many tokens as characters; the other ids are names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    words += [f"<{i}>" for i in range(len(words), vocabulary)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def make_model(shape: str, folder: Path, device: str) -> int:
    """The vocabulary's size."""
    save_model(shape, folder, device)
    vocabulary: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    make_tokenizer(folder, vocabulary)
    return vocabulary


def random_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(2, vocabulary) for _ in range(length)] for _ in range(count)]


@contextlib.contextmanager
def served(
    shape: str,
    model: Path,
    folder: Path,
    *,
    device: str,
    dtype: str,
    backend: str,
    max_model_len: int,
    max_inflight: int,
    memory: float,
    eager: bool,
) -> Iterator[Served]:
    """model: where the weights go. The server's log is folder/server.log, whose end is printed after a failure."""
    vocabulary = make_model(shape, model, device)
    if device == "cuda":
        torch.cuda.empty_cache()
    defaults: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/rollout/vllm.yaml"), resolve=True)  # type: ignore[assignment]
    del defaults["_target_"]
    started = time.perf_counter()
    servers = plan_servers(
        Rollout(**{**defaults, "max_inflight": max_inflight, "eager": eager}),
        model=str(model),
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        backend=backend,
        memory=memory,
        folder=folder,
        inherited=dict(os.environ),
    )
    try:
        servers.launch()
        servers.wait_ready(600)
        start_s = time.perf_counter() - started
        print(f"server ready after {start_s:.0f} s", flush=True)
        yield Served(model, servers.urls[0], start_s, vocabulary)
    except BaseException:
        print((folder / "server.log").read_text()[-4000:])
        raise
    finally:
        servers.stop()


def connected(
    server: Served, folder: Path, *, backend: str, dtype: str, device: str, pause: str = "keep"
) -> tuple[Policy, WeightSync]:
    """The server's model as a policy, and the sync that sends it; nothing is sent yet."""
    policy = Policy(server.model, dtype=dtype, device=device)
    settings = Sync(backend=backend, pause=pause, verify_every=0, timeout=300, dir=None)
    sync = make_sync(
        settings,
        backend=backend,
        controls=[PlainControl(server.url)],
        policy=policy,
        dtype=getattr(torch, dtype),
        folder=folder,
    )
    return policy, sync
