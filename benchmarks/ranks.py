"""The same optimizer steps on 1, 2, 3 ... ranks: whether the numbers are those of one process, and seconds a step.

    python benchmarks/ranks.py --ranks 1 2 3 --out results.json    # a tiny model on this CPU, over gloo
    python benchmarks/ranks.py --shape 4b --ranks 1 2              # GPUs, over NCCL: bfloat16, layers compiled

Every run takes `--steps` AdamW steps on the same ragged sequences from the same weights, as `run.py` does under
torchrun (its packing, loss, policy and optimizer; no server). Compared with the first of `--ranks`, over all steps:
losses and gradient norms, relative; and the parameters at the end, beside how far they have moved. AdamW's first steps
are about a gradient's sign, so where a gradient is rounding alone a parameter moves by up to the learning rate,
differently each time: float64 tells that from a fault. Exits with 1 where a difference is beyond BOUNDS.
"""

import argparse
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
from train_step import DATASHEET, PROBED, SHAPES, Step, make_batch, save_model
from transformers.utils import logging as transformers_logging

from grpo import distributed
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.sharded import ShardedOptimizer, ShardedPolicy

# dtype -> largest difference of losses and norms, relative, and of parameters. None: not compared.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-5, 1e-5),
    "bfloat16": (2e-2, None),
}
RUN_TIMEOUT = 1800  # seconds


def peak_gb() -> float:
    """The most memory of this process's GPU so far; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0


class Memory:
    """On every rank."""

    def __init__(self, *, team: Any, name: str) -> None:
        pass

    def peak_gb(self) -> float:
        return peak_gb()


def probe(policy: Policy, every: bool) -> dict[str, torch.Tensor]:
    """Parameters on the CPU; of a large model a few."""
    wide = torch.float64 if policy.dtype == torch.float64 else torch.float32
    named = policy.named_weights(wide)  # gathering is every rank's work: go through all of them
    return {name: weight.detach().cpu().clone() for name, weight in named if every or name.endswith(PROBED)}


def one_run(options: argparse.Namespace) -> None:
    """What rank 0 does of one run. The result goes to `options.result`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    team = distributed.open_team(device, threads=1)
    shaped: dict[str, Any] = {
        "dtype": options.dtype,
        "checkpointing": options.checkpointing,
        "compile": device == "cuda",
    }
    settings: dict[str, Any] = {"lr": options.lr, "max_grad_norm": 1.0}
    try:
        if team is None:
            policy = Policy(options.model, device=device, **shaped)
            optimizer = Optimizer(policy.parameters(), **settings)
        else:
            policy = team.make("policy", ShardedPolicy, options.model, **shaped)
            optimizer = team.make("optimizer", ShardedOptimizer, **settings)
            team.make("memory", Memory)
        rows = make_batch(**options.workload, vocabulary=policy.vocab_size)
        small = options.shape == "tiny"
        before = probe(policy, small)
        step = Step(policy, [], one_pass=False)
        steps = []
        for _ in range(options.steps):
            started = time.perf_counter()
            loss, passes = 0.0, policy.pack(rows, tokens_per_microbatch=options.microbatch, pad_to=policy.pad_to)
            for mb in passes:
                on_device = mb.to(policy.device)
                logprobs_N, entropy_N = policy.logprobs(on_device, 1.0)
                part = step.block_loss(on_device)(logprobs_N, entropy_N, slice(None))
                part.backward()
                loss += float(part.detach())
            norm = optimizer.step()
            measure.synchronize(device)
            steps.append({"loss": loss, "grad_norm": norm, "s": time.perf_counter() - started, "passes": len(passes)})
        torch.save(
            {
                "steps": steps,
                "before": before,
                "after": probe(policy, small),
                "peak_gb": max(team.everywhere("memory", "peak_gb")) if team else peak_gb(),
                "parameters": sum(weight.numel() for _, weight in policy.named_weights()),
                "tokens": sum(map(len, rows)),
            },
            options.result,
        )
    finally:
        distributed.close_team()


def start(ranks: int, dtype: str, model: Path, result: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run in processes of its own."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *torchrun, __file__, "--model", str(model), "--result", str(result)]
    command += ["--dtype", dtype, "--shape", options.shape, "--steps", str(options.steps), "--lr", str(options.lr)]
    command += ["--microbatch", str(options.microbatch), "--checkpointing", options.checkpointing]
    command += ["--workload", *map(str, options.workload.values())]
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    run: dict[str, Any] = torch.load(result, weights_only=True)
    return run


def compare(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    def relative(key: str) -> float:
        pairs = [(ours[key], theirs[key]) for ours, theirs in zip(run["steps"], reference["steps"], strict=True)]
        scale = max(abs(theirs) for _, theirs in pairs)
        return max(abs(ours - theirs) for ours, theirs in pairs) / scale

    def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return max(float((a[name] - b[name]).abs().max()) for name in b)

    return {
        "loss gap": relative("loss"),
        "norm gap": relative("grad_norm"),
        "parameter gap": furthest(run["after"], reference["after"]),
        "moved": furthest(reference["after"], reference["before"]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--dtype", choices=BOUNDS, help="default: float64 and float32 on a CPU, bfloat16 on GPUs")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2, help="steps at the start whose seconds are not counted")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--checkpointing", default="none")
    parser.add_argument("--microbatch", type=int, help="tokens of each rank's pass")
    parser.add_argument("--workload", type=int, nargs=4, help="sequences, prompt tokens, completion tokens from, to")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = options.shape == "tiny"
    sizes = options.workload or ([48, 16, 16, 96] if tiny else [64, 200, 64, 512])
    options.workload = dict(zip(("count", "prompt", "low", "high"), sizes, strict=True))
    options.microbatch = options.microbatch or (512 if tiny else 8192)
    return options


def main() -> None:
    options = parse()
    if options.result is not None:
        one_run(options)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < max(options.ranks):
        sys.exit(f"--ranks {max(options.ranks)}: a rank takes a GPU, this machine has {torch.cuda.device_count()}")
    dtypes = [options.dtype] if options.dtype else ["float64", "float32"] if device == "cpu" else ["bfloat16"]
    table: list[dict[str, Any]] = []
    beyond = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(options.shape, folder / "model", device)
        for dtype in dtypes:
            reference: dict[str, Any] | None = None
            for ranks in options.ranks:
                run = start(ranks, dtype, folder / "model", folder / "result.pt", options)
                reference = reference or run
                gaps = compare(run, reference)
                seconds = statistics.median(line["s"] for line in run["steps"][options.skip :])
                row = {"dtype": dtype, "ranks": ranks, "passes": run["steps"][0]["passes"], "s/step": seconds, **gaps}
                row["tokens/s"] = run["tokens"] / seconds
                if device == "cuda":
                    rate = 6 * run["parameters"] * run["tokens"] / seconds / ranks
                    row |= {"MFU 989": rate / DATASHEET, "peak GB": run["peak_gb"]}
                table.append(row)
                print(row, flush=True)
                values, parameters = BOUNDS[dtype]
                if max(gaps["loss gap"], gaps["norm gap"]) > values or gaps["parameter gap"] > (parameters or 1e9):
                    beyond.append(f"{dtype}, {ranks} ranks: {gaps}, bounds {BOUNDS[dtype]}")
    about = {"benchmark": "ranks", **measure.environment(device), "shape": options.shape}
    about |= {"workload": options.workload}
    about |= {"steps": options.steps, "lr": options.lr, "microbatch": options.microbatch}
    measure.write(options.out, {**about, "rows": table})
    print(measure.table(table))
    if beyond:
        sys.exit("beyond the bound: " + "; ".join(beyond))


if __name__ == "__main__":
    with distributed.ranks():  # a follower of a run follows here and ends
        main()
