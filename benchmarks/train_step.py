"""The training step without its optimizer step: forward and backward of one batch of ragged sequences.

    python benchmarks/train_step.py --out results.json                 # Qwen3-4B's shape, random weights, CUDA
    python benchmarks/train_step.py --tiny                             # a smoke test on any machine
    python benchmarks/train_step.py --only "packed compiled 8k" ...
    python benchmarks/train_step.py --group 8 --only "packed compiled 8k, shared prompts" ...

64 sequences of 200 prompt tokens and 64 to 512 completion tokens, uniform, `--group` of them with the same prompt.
MFU counts 6 FLOP per parameter and real token (no padding, no attention, no recomputation), over the datasheet's 989
TFLOP/s and over what a large product reaches on this machine in this run. Each variant is checked against `plain`,
what a user would write with transformers: rows padded on the right, full logits in float32, gradient checkpointing.
"""

import argparse
import gc
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from grpo.batch import MicroBatch, Sequence, pack
from grpo.lora import LoRAPolicy
from grpo.losses import PPOClip
from grpo.losses.base import LossInputs
from grpo.model import Checkpointing, Policy
from grpo.optimizer import Optimizer, accumulate_in_float32

DATASHEET = 989e12  # dense bfloat16 of an H100 or H200
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@dataclass
class Variant:
    name: str
    budget: int  # tokens of a micro-batch
    checkpointing: Checkpointing = "none"
    compile: bool = False
    attention: str = "torch"
    share_prompts: bool = False
    static: bool = False  # T filled up to the budget, and layers specialised for it
    one_pass: bool = True  # `Policy.backward` rather than `Policy.logprobs` and a backward pass
    lora_rank: int = 0  # adapters on all linear layers; MFU still counts 6 FLOP a parameter, of which 4 are done
    optimizer: bool = False  # AdamW with its state, and its step in the time
    profile: bool = False


VARIANTS = [
    Variant("packed compiled 8k", 8192, compile=True, profile=True),
    Variant("packed compiled 8k, flash4", 8192, compile=True, attention="flash4", profile=True),
    Variant("packed compiled 8k, shared prompts", 8192, compile=True, share_prompts=True),
    Variant("packed compiled 8k, flash4, shared prompts", 8192, compile=True, attention="flash4", share_prompts=True),
    Variant("packed compiled 8k, flash4, LoRA 16", 8192, compile=True, attention="flash4", lora_rank=16),
    Variant("packed compiled 8k, static T", 8192, compile=True, static=True),
    Variant("packed compiled 8k, two passes", 8192, compile=True, one_pass=False),
    Variant("packed compiled 11k", 11008, compile=True),
    Variant("packed eager 8k", 8192),
    Variant("selective compiled 8k", 8192, "selective", compile=True),
    Variant("selective compiled 4k", 4096, "selective", compile=True),
    Variant("full compiled 8k", 8192, "full", compile=True),
    Variant("full compiled 8k, flash4", 8192, "full", compile=True, attention="flash4"),
    Variant("full compiled 8k, with AdamW's step", 8192, "full", compile=True, optimizer=True),
]


def save_model(shape: str, folder: Path, device: str) -> None:
    config = Qwen3Config(
        vocab_size=512 if shape == "tiny" else 151_936,
        head_dim=32 if shape == "tiny" else 128,
        num_key_value_heads=2 if shape == "tiny" else 8,
        max_position_embeddings=1024 if shape == "tiny" else 40_960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def make_batch(count: int, prompt: int, low: int, high: int, vocabulary: int, group: int = 1) -> list[Sequence]:
    draw = random.Random(0)
    lengths = [draw.randint(low, high) for _ in range(count)]
    rows: list[Sequence] = []
    for row, n in enumerate(lengths):
        ids = [draw.randrange(4, min(vocabulary, 100_000)) for _ in range(prompt + n)]
        if row % group:
            ids[:prompt] = rows[-1].prompt_ids
        # about what a random model gives, so that some ratios are clipped and most are not
        old = [-11.9 + 0.3 * draw.gauss(0, 1) for _ in range(n)]
        rows.append(Sequence(ids[:prompt], ids[prompt:], old, [0] * n, draw.gauss(0, 1), 1 / sum(lengths)))
    return rows


class Step:
    """Forward and backward of all micro-batches, the real loss included."""

    def __init__(self, policy: Policy, micro_batches: list[MicroBatch], one_pass: bool) -> None:
        self.policy, self.micro_batches, self.one_pass = policy, micro_batches, one_pass
        self.loss = PPOClip(clip_low=0.2, clip_high=0.28)

    def block_loss(self, mb: MicroBatch) -> Callable[[Tensor, Tensor, slice], Tensor]:
        def loss(logprobs: Tensor, entropy: Tensor, at: slice) -> Tensor:
            return self.loss(
                LossInputs(
                    logprobs_N=logprobs,
                    sampler_logprobs_N=mb.sampler_logprobs_N[at],
                    advantages_N=mb.advantages_N[at],
                    weights_N=mb.weights_N[at],
                    sequence_N=mb.sequence_N[at],
                    num_sequences=mb.num_sequences,
                    entropy_N=entropy.detach(),
                )
            ).loss

        return loss

    def __call__(self) -> list[Tensor]:
        values = []
        for mb in self.micro_batches:
            if self.one_pass:
                values.append(self.policy.backward(mb, 1.0, self.block_loss(mb))[0])
            else:
                logprobs_N, entropy_N = self.policy.logprobs(mb, 1.0)
                self.block_loss(mb)(logprobs_N, entropy_N, slice(None)).backward()
                values.append(logprobs_N.detach())
        return values


def forget_gradients(policy: Policy) -> None:
    for p in policy.parameters():
        p.grad = None
        if hasattr(p, "main_grad"):
            p.main_grad.zero_()


# Gradients that are compared: the embedding that is also the head, products in the first and second layer, a norm.
PROBED = (
    "embed_tokens.weight",
    "layers.0.self_attn.q_proj.weight",
    "layers.1.mlp.down_proj.weight",
    "model.norm.weight",
)


def probe(model: torch.nn.Module) -> dict[str, Tensor]:
    grads: dict[str, Any] = {
        name: getattr(p, "main_grad", p.grad)
        for name, p in model.named_parameters()
        if name.endswith(PROBED) and p.requires_grad
    }
    return {name: grad.detach().float().cpu().clone() for name, grad in grads.items()}


def by_row(micro_batches: list[MicroBatch], values: list[Tensor]) -> dict[int, Tensor]:
    rows = {}
    for mb, values_N in zip(micro_batches, values, strict=True):
        for row, part in zip(mb.rows, values_N.split(mb.lengths), strict=True):
            rows[row] = part.float().cpu()
    return rows


def run_variant(v: Variant, folder: Path, rows: list[Sequence], device: str, repeats: int) -> dict[str, Any]:
    torch._dynamo.reset()
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": device,
        "checkpointing": v.checkpointing,
        "compile": v.compile and not v.static,
        "attention": v.attention,
    }
    if v.lora_rank:
        policy: Policy = LoRAPolicy(folder, rank=v.lora_rank, alpha=32.0, targets="all-linear", **settings)
    else:
        policy = Policy(folder, **settings)
    if v.static:
        for layer in policy.body.layers:
            layer.compile()
    optimizer = None
    if v.optimizer:
        optimizer = Optimizer(policy.parameters(), lr=1e-6)
    else:
        for p in policy.parameters():
            accumulate_in_float32(p)
    start = time.perf_counter()
    packed = pack(
        rows,
        tokens_per_microbatch=v.budget,
        context=policy.context,
        pad_to=v.budget if v.static else policy.pad_to,
        share_prompts=v.share_prompts,
    )
    pack_ms = 1e3 * (time.perf_counter() - start)
    packed = [mb.to(device) for mb in packed]
    step = Step(policy, packed, v.one_pass)
    start = time.perf_counter()
    first = by_row(packed, step())
    measure.synchronize(device)
    warm_s = time.perf_counter() - start
    gradients = probe(policy.model)
    forget_gradients(policy)
    step()  # a second warm-up: torch.compile may still be choosing
    forget_gradients(policy)
    torch._dynamo.config.error_on_recompile = True  # the promise: nothing is compiled after the warm-up

    def timed() -> None:
        step()
        if optimizer is not None:
            optimizer.step()

    try:
        timed()
        peak = 0.0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = measure.seconds(timed, device, repeats=repeats)
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 1e9
    finally:
        torch._dynamo.config.error_on_recompile = False
    tokens = sum(len(mb.ids_T) for mb in packed)
    return {
        "s": seconds,
        "peak GB": peak,
        "micro-batches": len(packed),
        "computed / real": tokens / sum(map(len, rows)),  # padding makes it more than 1, shared prompts less
        "warm-up s": warm_s,
        "pack ms": pack_ms,
        "_logprobs": first,
        "_gradients": gradients,
        "_kernels": profile(timed) if v.profile and device == "cuda" else [],
    }


def plain(folder: Path, rows: list[Sequence], device: str, at_once: int, repeats: int) -> dict[str, Any]:
    """Right-padded rows, full logits in float32, checkpointing: transformers as most people call it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    logprobs: dict[int, Tensor] = {}

    def step() -> None:
        for start in range(0, len(order), at_once):
            part = order[start : start + at_once]
            width = max(len(rows[i]) for i in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            mask = torch.zeros(len(part), width)
            old, advantages = torch.zeros(len(part), width), torch.tensor([rows[i].advantage for i in part])
            for j, i in enumerate(part):
                s, p = rows[i], len(rows[i].prompt_ids)
                ids[j, : len(s)] = torch.tensor(s.prompt_ids + s.completion_ids)
                mask[j, p : len(s)], old[j, p : len(s)] = s.weight, torch.tensor(s.sampler_logprobs)
            ids, mask, old, advantages = (x.to(device) for x in (ids, mask[:, 1:], old[:, 1:], advantages))
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            values = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
            del logits
            ratio, a = torch.exp((values - old) * (mask > 0)), advantages[:, None]
            (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) * mask).sum().backward()
            for j, i in enumerate(part):
                p = len(rows[i].prompt_ids)
                logprobs[i] = values[j, p - 1 : len(rows[i]) - 1].detach().float()

    step()
    first = {i: x.cpu() for i, x in logprobs.items()}
    gradients = probe(model)

    def timed() -> None:
        model.zero_grad(set_to_none=True)
        step()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = measure.seconds(timed, device, repeats=repeats)
    return {
        "s": seconds,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0,
        "micro-batches": -(-len(rows) // at_once),
        "_logprobs": first,
        "_gradients": gradients,
    }


def profile(run: Callable[[], None]) -> list[tuple[float, int, str]]:
    """The kernels that one step spends its time in: milliseconds, calls, name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)
    return [(e.self_device_time_total / 1e3, e.count, e.key[:110]) for e in events[:25]]


def one_by_one(
    folder: Path, rows: list[Sequence], device: str, budget: int, attention: str = "torch"
) -> dict[str, float]:
    """Packed against each sequence alone, eager, forward only: how many logprobs differ at all, and by how much."""
    policy = Policy(folder, dtype="bfloat16", device=device, attention=attention)
    results = []
    with torch.no_grad():
        for tokens in (budget, 1):
            mbs = [mb.to(device) for mb in pack(rows, tokens_per_microbatch=tokens, context=policy.context)]
            results.append(by_row(mbs, [policy.logprobs(mb, 1.0)[0] for mb in mbs]))
    gaps = torch.cat([results[0][row] - results[1][row] for row in results[0]]).abs()
    parameters = sum(p.numel() for p in policy.parameters())
    return {
        "parameters": parameters,
        "tokens": len(gaps),
        "differing": int((gaps > 0).sum()),
        "largest difference": float(gaps.max()),
    }


def compare(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    rows = reference["_logprobs"]
    gaps = torch.cat([result["_logprobs"][row] - rows[row] for row in rows]).abs()
    errors = {
        name: float((result["_gradients"][name] - exact).norm() / exact.norm())
        for name, exact in reference["_gradients"].items()
        if name in result["_gradients"]  # LoRA has none of them
    }
    found = {"gradient gap, most": max(errors.values())} if errors else {}
    return {"logprob gap, mean": float(gaps.mean()), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and batch, for a smoke test")
    parser.add_argument("--only", nargs="*", help="names of variants")
    parser.add_argument("--group", type=int, default=1, help="sequences with the same prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = "tiny" if options.tiny else options.shape
    workload = (8, 5, 4, 30) if options.tiny else (64, 200, 64, 512)
    variants = [v for v in VARIANTS if not options.only or v.name in options.only]
    if options.tiny:
        variants = [Variant("packed eager", 64), Variant("packed eager, shared prompts", 64, share_prompts=True)]
        variants += [Variant("packed eager, LoRA", 64, lora_rank=4)]
        variants += [Variant("full, with AdamW's step", 40, "full", optimizer=True)]
    ceiling = measure.matmul_ceiling(device)
    print(f"bf16 product: {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(shape, folder, device)
        rows = make_batch(*workload, 512 if shape == "tiny" else 151_936, options.group)
        tokens = sum(map(len, rows))
        alone = {
            kernel: one_by_one(folder, rows, device, 64 if options.tiny else 8192, kernel)
            for kernel in dict.fromkeys(v.attention for v in variants)
        }
        jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("plain, 4 at once", lambda: plain(folder, rows, device, 4, max(1, options.repeats - 1)))
        ]
        jobs += [(v.name, lambda v=v: run_variant(v, folder, rows, device, options.repeats)) for v in variants]  # type: ignore[misc]
        reference: dict[str, Any] | None = None
        parameters = int(next(iter(alone.values()))["parameters"])
        kernels: list[tuple[float, int, str]] = []
        about: dict[str, Any] = {
            "environment": measure.environment(device),
            "shape": shape,
            "parameters": parameters,
            "sequences, prompt, completion from, to": workload,
            "sequences of a prompt": options.group,
            "tokens": tokens,
            "bf16_flops": ceiling,
            "packed against one by one": alone,
        }
        print("packed against one by one:", alone, flush=True)
        for name, job in jobs:
            row: dict[str, Any] = {"variant": name}
            try:
                result = job()
                reference = reference or result
                kernels = result.pop("_kernels", []) or kernels
                rate = 6 * parameters * tokens / result["s"]
                row |= {
                    "s": result["s"],
                    "tokens/s": tokens / result["s"],
                    "MFU 989": rate / DATASHEET,
                    "MFU ceiling": rate / ceiling,
                    "x plain": reference["s"] / result["s"],
                }
                row |= {k: v for k, v in result.items() if k != "s" and not k.startswith("_")}
                row |= compare(result, reference)
                if result is not reference:
                    del result
            except Exception as failure:  # one variant's failure must not cost the others their machine time
                if not isinstance(failure, torch.OutOfMemoryError):
                    traceback.print_exc()
                row["variant"] += f": {type(failure).__name__}"
            table.append(row)
            print(row, flush=True)
            measure.write(options.out, {**about, "variants": table, "kernels": kernels})
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    about["bf16_flops_after"] = measure.matmul_ceiling(device)
    measure.write(options.out, {**about, "variants": table, "kernels": kernels})
    for ms, count, name in kernels:
        print(f"{ms:8.1f} ms {count:5d} x {name}")
    columns = dict.fromkeys(key for row in table for key in row)
    print(measure.table([columns | row for row in table]))
    print(f"{parameters / 1e9:.3f} B parameters, {tokens} real tokens")
    print(f"bf16 product: {ceiling / 1e12:.0f} TFLOP/s before, {about['bf16_flops_after'] / 1e12:.0f} after")


if __name__ == "__main__":
    main()
