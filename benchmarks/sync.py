"""A weight sync, phase by phase, while the server generates: seconds, pause, bytes/s against a copy of the same bytes.

    python benchmarks/sync.py --out results.json                       # Qwen3-4B's shape on a GPU (`--sync ipc`)
    python benchmarks/sync.py --shape 0.6b                             # on a CPU: `--sync disk` through memory
    python benchmarks/sync.py --tiny                                   # a smoke test

The server runs in a process of its own with random weights of the shape, and `--open` requests are open all the time;
every sync sends other weights. The limit is a copy of one sync's bytes within the trainer's memory (GPU or CPU),
measured in the same run: no transport that ends with the weights in another place can take less. After the last sync
the server's logprobs are compared with the trainer's.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measure
import torch
from serving import Served, connected, random_prompts, served
from train_step import SHAPES

from grpo.batch import Sequence, pack
from grpo.model import Policy
from grpo.rollout.client import Client
from grpo.sync import auto
from grpo.sync.base import WeightSync
from grpo.types import Sampling

PHASES = ("export_s", "pause_s", "update_s", "resume_s", "paused_s", "total_s")


class Traffic:
    """Keeps requests open in a thread of its own until it is stopped."""

    def __init__(self, server: Served, requests: int, options: argparse.Namespace) -> None:
        self.server, self.requests, self.options = server, requests, options
        self.stopped = threading.Event()
        self.tokens = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.failure = error

    async def _main(self) -> None:
        sampling = Sampling(1.0, self.options.new_tokens, None, (), ())
        prompts = random_prompts(self.requests, self.options.length, self.server.vocabulary)
        async with Client([self.server.url], vocab_size=self.server.vocabulary) as client:

            async def ask(number: int, prompt: list[int]) -> None:
                while not self.stopped.is_set():
                    sampled = await client.generate(prompt, sampling, request_id=str(number))
                    self.tokens += len(sampled.token_ids)

            await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))


def change(policy: Policy) -> None:
    """Other weights, as an optimizer step would leave them."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.001)


def gap(server: Served, policy: Policy, options: argparse.Namespace) -> float:
    """Mean distance between the server's logprobs of a completion and the trainer's, in nats."""

    async def sample() -> Any:
        async with Client([server.url], vocab_size=server.vocabulary) as client:
            prompt = random_prompts(1, options.length, server.vocabulary)[0]
            sampling = Sampling(1.0, options.new_tokens, None, (), ())
            return prompt, await client.generate(prompt, sampling, request_id="proof")

    prompt, sampled = asyncio.run(sample())
    sequence = Sequence(prompt, sampled.token_ids, sampled.logprobs, [0] * len(sampled.token_ids), 0.0, 0.0)
    (batch,) = pack([sequence], tokens_per_microbatch=1 << 20, context=policy.context)
    with torch.no_grad():
        values, _ = policy.logprobs(batch.to(policy.device), 1.0)
    return float((values.float().cpu() - torch.tensor(sampled.logprobs)).abs().mean())


def timed(sync: WeightSync, policy: Policy, options: argparse.Namespace) -> dict[str, float]:
    taken = []
    for version in range(1, options.syncs + 1):
        change(policy)
        time.sleep(options.between)
        taken.append(sync.sync(version).as_dict())
    return {phase: statistics.median(t[phase] for t in taken) for phase in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="4b" if cuda else "0.6b")
    parser.add_argument("--sync", choices=["disk", "ipc", "nccl"])
    parser.add_argument("--pause", choices=["keep", "wait"], default="keep")
    parser.add_argument("--syncs", type=int, default=7)
    parser.add_argument("--between", type=float, default=1.0, help="seconds of generation between two syncs")
    parser.add_argument("--open", type=int, default=64 if cuda else 4, help="requests that are open")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--memory", type=float, default=0.3, help="the server's share of a shared GPU")
    parser.add_argument("--eager", action="store_true", help="a server without CUDA graphs: starts sooner")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.shape, options.syncs, options.between, options.open, options.new_tokens = "tiny", 2, 0.1, 2, 16
    device = "cuda" if cuda else "cpu"
    dtype = "float32" if options.tiny else "bfloat16"
    backend = options.sync or auto(device=device, gpus=torch.cuda.device_count(), attached=False)[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with served(
            options.shape,
            folder / "model",
            folder,
            device=device,
            dtype=dtype,
            backend=backend,
            max_model_len=options.length + options.new_tokens,
            max_inflight=max(64, options.open),
            memory=options.memory,
            eager=options.eager,
        ) as server:
            policy, sync = connected(server, folder, backend=backend, dtype=dtype, device=device, pause=options.pause)
            traffic = None
            try:
                sync.sync(0)  # with the handshake
                traffic = Traffic(server, options.open, options)
                row = timed(sync, policy, options)
            finally:
                if traffic is not None:
                    traffic.stop()
                sync.close()
            row["gap_nat"] = gap(server, policy, options)
    words = sync.bytes // 4
    source = torch.empty(words, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = measure.seconds(lambda: target.copy_(source), device, repeats=5, warmup=2)
    row |= {"gb": sync.bytes / 1e9, "update_gb_per_s": sync.bytes / 1e9 / row["update_s"], "copy_s": copy_s}
    row["paused_to_copy"] = row["paused_s"] / copy_s
    row["total_to_copy"] = row["total_s"] / copy_s
    kept = ("shape", "pause", "syncs", "open", "new_tokens")
    result = {**measure.environment(device), "sync": backend, **{name: getattr(options, name) for name in kept}}
    measure.write(options.out, {**result, "tokens_meanwhile": traffic.tokens, "row": row})
    print(f"sync={backend}, {options.shape}, {dtype}, {options.open} requests open, {traffic.tokens} tokens meanwhile")
    print(measure.table([row]))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
