"""Generation through the server and the client, as a run does it, against vLLM's offline engine in the same run.

    python benchmarks/generation.py --out results.json                 # Qwen3-4B's shape on a GPU, 0.6B's on a CPU
    python benchmarks/generation.py --tiny                             # a smoke test

All requests are open at once and sample `--new-tokens` tokens each, with logprobs and weight versions; the offline
engine has the same model, prompts, sizes and threads, no HTTP, and nobody who checks its answers. First the one, then
the other, each alone on the machine. A completion may be shorter where it samples the end token, hardly ever with
random weights; what is counted is tokens that came.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch
from serving import ROOT, Served, connected, random_prompts, served
from train_step import SHAPES

from grpo.rollout.client import Client
from grpo.rollout.flags import server_threads, vllm_environment
from grpo.sync import auto
from grpo.types import Sampling


def through_the_server(server: Served, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    sampling = Sampling(1.0, options.new_tokens, None, (), ())

    async def main() -> dict[str, Any]:
        seconds, tokens = [], 0
        async with Client([server.url], vocab_size=server.vocabulary) as client:
            for repeat in range(options.repeats + 1):
                started, cpu = time.perf_counter(), time.process_time()
                answers = await asyncio.gather(
                    *(client.generate(p, sampling, request_id=f"{repeat}-{i}") for i, p in enumerate(prompts))
                )
                cpu = time.process_time() - cpu
                seconds.append(time.perf_counter() - started)
                tokens = sum(len(answer.token_ids) for answer in answers)
        return {"seconds": seconds[1:], "tokens": tokens, "client_cpu_s": cpu}

    return asyncio.run(main())


def offline(model: Path, folder: Path, prompts: list[list[int]], dtype: str, device: str, options: Any) -> Any:
    """`peer_vllm.py` in a process of its own, with the environment of a server."""
    arguments: dict[str, Any] = {"model": str(model), "dtype": dtype, "max_num_seqs": max(64, len(prompts))}
    arguments |= {"max_model_len": options.length + options.new_tokens, "generation_config": "vllm"}
    arguments |= {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    if device == "cpu":
        arguments |= {"enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}
    else:
        arguments |= {"gpu_memory_utilization": options.memory, "enforce_eager": options.eager}
    (folder / "arguments.json").write_text(json.dumps(arguments))
    (folder / "prompts.json").write_text(json.dumps(prompts))
    environment = vllm_environment(
        dict(os.environ),
        device=device,
        backend="disk",
        threads=server_threads(len(os.sched_getaffinity(0)), 1),
        gpus=list(range(torch.cuda.device_count()))[:1],
        tensor_parallel=1,
        api_key=None,
    )
    command = [sys.executable, str(ROOT / "benchmarks" / "peer_vllm.py"), str(folder / "arguments.json")]
    command += [str(folder / "prompts.json"), str(options.new_tokens), str(options.repeats)]
    ended = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        sys.exit(f"the offline engine failed:\n{ended.stdout[-4000:]}")
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b" if cuda else "0.6b")
    parser.add_argument("--requests", type=int, default=256 if cuda else 16)
    parser.add_argument("--length", type=int, default=200 if cuda else 64)
    parser.add_argument("--new-tokens", type=int, default=512 if cuda else 32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.5, help="the server's share of a GPU")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs: starts sooner")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.shape, options.requests, options.new_tokens, options.repeats = "tiny", 8, 16, 1
    device, dtype = "cuda" if cuda else "cpu", "float32" if options.tiny else "bfloat16"
    backend = auto(device=device, gpus=min(1, torch.cuda.device_count()), attached=False)[0]
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
            max_inflight=max(64, options.requests),
            memory=options.memory,
            eager=options.eager,
        ) as server:
            prompts = random_prompts(options.requests, options.length, server.vocabulary)
            policy, sync = connected(server, folder, backend=backend, dtype=dtype, device=device)
            sync.sync(0)
            sync.close()
            del policy
            ours = through_the_server(server, prompts, options)
        limit = offline(server.model, folder, prompts, dtype, device, options)
    rows: list[dict[str, Any]] = []
    for name, result in (("offline engine", limit), ("server and client", ours)):
        seconds = statistics.median(result["seconds"])
        row = {"path": name, "tokens": result["tokens"], "s": seconds, "tokens_per_s": result["tokens"] / seconds}
        rows.append(row | {"client_cpu_s": result.get("client_cpu_s")})
    for row in rows:
        row["to_offline"] = row["tokens_per_s"] / rows[0]["tokens_per_s"]
    shape = {name: getattr(options, name) for name in ("shape", "requests", "length", "new_tokens", "repeats")}
    measure.write(options.out, {**measure.environment(device), **shape, "dtype": dtype, "rows": rows})
    print(measure.table(rows))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
