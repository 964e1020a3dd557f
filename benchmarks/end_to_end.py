"""Asynchronous training end to end: `python run.py` on one server, at several bounds of staleness, and a peer.

    python benchmarks/end_to_end.py --out results.json                  # Qwen3-4B's shape, random weights, one GPU
    python benchmarks/end_to_end.py --peer trl ...                      # and TRL's GRPOTrainer with vLLM colocated
    python benchmarks/end_to_end.py --tiny                              # a smoke test on any machine

Every step trains 8 prompts of 200 tokens x 8 completions of up to 512 tokens (random weights hardly ever sample the
end token). The server is started once, as run.py starts it, and every run attaches to it. The first steps compile and
warm up; what is reported is the mean of those after `--skip`. tokens/s counts trained completion tokens per second
of wall-clock from the end of one step to the end of the next, so that nothing is left out: waiting, training, sync,
recording.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measure
import torch
from serving import ROOT, served
from train_step import SHAPES

from grpo.sync import auto

PROMPT = 200
COLUMNS = (
    *("run", "tokens_per_s", "to_peer", "s_per_step", "waiting_s", "training_s", "sync_s", "paused_s"),
    *("trainer_idle", "sampler_idle", "trained_over_generated", "lag_max", "peak_gb"),
)
SHARES = {"waiting": "time/wait_rollouts_s", "training": "time/train_s", "sync": "time/sync_s"}


def noise(prompt: str, completion: str, **columns: Any) -> float:
    """A reward that costs nothing and is hardly ever equal within a group."""
    digest = hashlib.blake2b(completion.encode("utf-8", "replace"), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32


def make_prompts(path: Path, count: int, length: int) -> list[str]:
    draw = random.Random(0)
    prompts = ["".join(chr(draw.randint(35, 122)) for _ in range(length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return prompts


def train(
    model: Path, data: Path, url: str, staleness: int, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """One run; means over the steps after `skip`."""
    command = [
        *(sys.executable, "run.py", f"hydra.run.dir={folder}", f"model.path={model}", f"rollout.urls=[{url}]"),
        *(f"rollout.max_staleness={staleness}", f"rollout.group_size={options.group}", "rollout.seeded=false"),
        *("rollout.zero_variance=keep", f"train.steps={options.steps}", "train.eval_every=0"),
        *(f"train.batch_size={options.prompts * options.group}", "train.checkpoint_every=0"),
        *(f"train.tokens_per_microbatch={options.microbatch}", f"model.checkpointing={options.checkpointing}"),
        *("data=jsonl", f"data.path={data}", "data.answer=null", "data.eval_rows=0", "data.template=plain"),
        f"data.reward=[{{kind: python, path: '{Path(__file__).resolve()}:noise', workers: 4}}]",
        *(f"data.max_prompt_tokens={options.length}", f"data.max_tokens={options.new_tokens}"),
        *(f"model.dtype={options.dtype}", "model=_base", "model.lr=1e-6", f"sync={options.sync}"),
        "sync.verify_every=0" if options.sync == "disk" else "sync.verify_every=10",
        *options.override,
    ]
    started = time.perf_counter()
    ended = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        log = (folder / "run.log").read_text()[-5000:] if (folder / "run.log").exists() else ""
        return {"run": f"S={staleness}", "error": f"{ended.stdout[-3000:]}\n{log}"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steady = lines[options.skip :]
    span = steady[-1]["time/elapsed_s"] - lines[options.skip - 1]["time/elapsed_s"]
    tokens = steady[-1]["tokens/trained"] - lines[options.skip - 1]["tokens/trained"]

    def mean(key: str) -> float:
        return statistics.mean(line.get(key, 0.0) for line in steady)

    last = lines[-1]
    return {
        "run": f"S={staleness}",
        "tokens_per_s": tokens / span,
        "s_per_step": span / len(steady),
        **{f"{name}_s": mean(key) for name, key in SHARES.items()},
        "paused_s": mean("sync/paused_s"),
        "sync_gb": last["sync/bytes"] / 1e9,
        "trainer_idle": mean("time/wait_rollouts_s") / (span / len(steady)),
        "sampler_idle": mean("sampler/idle_fraction"),
        "open_requests": mean("sampler/open_requests_mean"),
        "trained_over_generated": last["tokens/trained"] / (last["tokens/generated"] - last["tokens/in_flight"]),
        "lag_max": max(line["lag/max"] for line in lines),
        "lag_0_kl": next((line["lag_0/kl"] for line in lines if "lag_0/kl" in line), None),
        "peak_gb": last.get("memory/peak_gb"),
        "probe_mean": next((line["sync/probe_mean"] for line in lines if "sync/probe_mean" in line), None),
        "start_s": lines[0]["time/elapsed_s"],
        "whole_run_s": time.perf_counter() - started,
    }


def peer_trl(model: Path, prompts: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, on the empty card."""
    script = Path(__file__).with_name("peer_trl.py")
    shape = (options.prompts, options.group, options.new_tokens, options.length)
    command = [sys.executable, str(script), str(model), str(prompts), str(options.peer_steps), *map(str, shape)]
    ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ended.returncode:
        return {"run": "TRL", "error": ended.stdout[-4000:]}
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and batch, for a smoke test")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="steps at the start that are not counted")
    parser.add_argument("--prompts", type=int, default=8, help="groups of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a group")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--checkpointing", default="full")
    parser.add_argument("--microbatch", type=int, default=16384)
    parser.add_argument("--memory", type=float, default=0.3, help="the server's share of a shared GPU")
    parser.add_argument("--eager", action="store_true", help="a server without CUDA graphs: starts sooner")
    parser.add_argument("--peer", choices=["trl"])
    parser.add_argument("--peer-steps", type=int, default=5)
    parser.add_argument("--override", nargs="*", default=[], help="further overrides for run.py")
    parser.add_argument("--keep", type=Path, help="leave run folders and logs here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.length = PROMPT
    options.dtype = "bfloat16"
    if options.tiny:
        options.shape, options.dtype, options.length = "tiny", "float32", 20
        options.prompts, options.group, options.new_tokens, options.steps, options.skip = 2, 2, 8, 3, 1
        options.microbatch, options.checkpointing = 256, "none"
    return options


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpus = torch.cuda.device_count()
    options.sync = auto(device=device, gpus=gpus, attached=False)[0]
    result: dict[str, Any] = {"benchmark": "end_to_end", **measure.environment(device), "sync": options.sync}
    result["matmul_tflops"] = measure.matmul_ceiling(device) / 1e12
    result["workload"] = {key: getattr(options, key) for key in ("shape", "prompts", "group", "length", "new_tokens")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        data = folder / "prompts.jsonl"
        make_prompts(data, 512, options.length)
        rows = []
        with served(
            options.shape,
            Path(temporary) / "model",  # never in what --keep leaves
            folder,
            device=device,
            dtype=options.dtype,
            backend=options.sync,
            max_model_len=options.length + options.new_tokens,
            max_inflight=max(256, 2 * options.prompts * options.group),
            memory=options.memory,
            eager=options.eager,
        ) as server:
            result["server_start_s"] = server.start_s
            for staleness in options.staleness:
                row = train(server.model, data, server.url, staleness, folder / f"S{staleness}", options)
                rows.append(row)
                print(json.dumps(row), flush=True)
        model = server.model
        if options.peer:
            rows.append(peer_trl(model, data, options))
    peer = next((row.get("tokens_per_s") for row in rows if row["run"] == "TRL"), None)
    for row in rows:
        row["to_peer"] = row["tokens_per_s"] / peer if peer and "tokens_per_s" in row else None
    result["rows"] = rows
    measure.write(options.out, result)
    print(measure.table([{column: row.get(column) for column in COLUMNS} for row in rows]))
    for row in rows:
        if "error" in row:
            sys.exit(f"{row['run']} failed:\n{row['error']}")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
