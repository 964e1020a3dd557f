"""Token logprobs and entropy, forward and backward: time and extra memory against the head's three products alone.

    python benchmarks/token_logprobs.py --out results.json             # Qwen3's vocabulary, 32k tokens, CUDA
    python benchmarks/token_logprobs.py --tiny                         # a smoke test on any machine

Every variant computes the gradients of sum_n g_n logprob_n in hidden states and head, with the entropies beside it.
Each is checked against float64 on a few tokens, then timed. "Extra" memory is what is allocated at the peak beyond the
inputs, the hidden states' gradient and the float32 gradient of the head, which the optimizer keeps anyway.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from torch import Tensor

from grpo import logprobs

Result = tuple[Tensor | None, Tensor, Tensor]  # logprobs_N, hidden_grad_ND, weight_grad_VD


class Problem:
    """bfloat16 inputs whose logits have a standard deviation of about 3, as a language model's; upstream gradients."""

    def __init__(self, N: int, V: int, D: int, device: str) -> None:
        draw = torch.Generator(device).manual_seed(0)
        self.hidden_ND = torch.randn(N, D, device=device, generator=draw).bfloat16()
        self.weight_VD = (torch.randn(V, D, device=device, generator=draw) * 3 * D**-0.5).bfloat16()
        self.targets_N = torch.randint(V, (N,), device=device, generator=draw)
        self.upstream_N = torch.randn(N, device=device, generator=draw) / N
        self.weight_grad_VD = torch.zeros(V, D, device=device)

    def first(self, n: int) -> "Problem":
        part = object.__new__(Problem)
        part.hidden_ND, part.weight_VD = self.hidden_ND[:n], self.weight_VD
        part.targets_N, part.upstream_N = self.targets_N[:n], self.upstream_N[:n]
        part.weight_grad_VD = torch.zeros_like(self.weight_grad_VD)
        return part


def one_pass(p: Problem, rows: int | None = None) -> Result:
    """`head_backward`: three products."""
    N, rows = len(p.targets_N), rows or logprobs.block_rows(p.weight_VD)
    blocks = [slice(start, min(start + rows, N)) for start in range(0, N, rows)]

    def loss(logprobs_C: Tensor, _: Tensor, where: slice) -> Tensor:
        return (p.upstream_N[where] * logprobs_C).sum()

    values_N, _, hidden_grad_ND = logprobs.head_backward(
        p.hidden_ND, p.weight_VD, p.targets_N, 1.0, loss, blocks, p.weight_grad_VD
    )
    return values_N, hidden_grad_ND, p.weight_grad_VD


def two_passes(p: Problem) -> Result:
    """`token_logprobs` and its backward pass, which computes the logits again: four products."""
    hidden_ND, weight_VD = p.hidden_ND.detach().requires_grad_(), p.weight_VD.detach().requires_grad_()
    values_N, _ = logprobs.token_logprobs(hidden_ND, weight_VD, p.targets_N, 1.0)
    hidden_grad, weight_grad = torch.autograd.grad((p.upstream_N * values_N).sum(), [hidden_ND, weight_VD])
    p.weight_grad_VD += weight_grad
    return values_N.detach(), hidden_grad, p.weight_grad_VD


def full_logits(p: Problem) -> Result:
    """What most code does: all logits in float32, log_softmax, gather."""
    hidden_ND, weight_VD = p.hidden_ND.detach().requires_grad_(), p.weight_VD.detach().requires_grad_()
    values_NV = (hidden_ND @ weight_VD.t()).float().log_softmax(-1)
    values_N = values_NV.gather(1, p.targets_N[:, None]).squeeze(1)
    with torch.no_grad():
        _ = -(values_NV.exp() * values_NV).sum(1)
    hidden_grad, weight_grad = torch.autograd.grad((p.upstream_N * values_N).sum(), [hidden_ND, weight_VD])
    p.weight_grad_VD += weight_grad
    return values_N.detach(), hidden_grad, p.weight_grad_VD


def liger(p: Problem) -> Result:
    """Liger's fused linear cross-entropy, whose upstream gradient is the same for every token: g_n = -1 / N."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    hidden_ND, weight_VD = p.hidden_ND.detach().requires_grad_(), p.weight_VD.detach().requires_grad_()
    loss = LigerFusedLinearCrossEntropyLoss(accum_dtype=torch.float32)(weight_VD, hidden_ND, p.targets_N)
    hidden_grad, weight_grad = torch.autograd.grad(loss, [hidden_ND, weight_VD])
    p.weight_grad_VD += weight_grad
    return None, hidden_grad, p.weight_grad_VD


def exact(p: Problem, upstream_N: Tensor) -> Result:
    hidden, weight = p.hidden_ND.double().requires_grad_(), p.weight_VD.double().requires_grad_()
    values_N = (hidden @ weight.t()).log_softmax(-1).gather(1, p.targets_N[:, None]).squeeze(1)
    return values_N.detach(), *torch.autograd.grad((upstream_N.double() * values_N).sum(), [hidden, weight])


def products(N: int, V: int, D: int, device: str) -> dict[str, float]:
    """Seconds of the head's three products, each in one call with nothing around it, bfloat16 in and out."""
    h, w = torch.randn(N, D, device=device).bfloat16(), torch.randn(V, D, device=device).bfloat16()
    d = torch.empty(N, V, device=device, dtype=torch.bfloat16)
    for where in logprobs.even_blocks(N, max(1, 2**28 // V)):
        d[where] = torch.randn(where.stop - where.start, V, device=device)
    dh, dw = torch.empty_like(h), torch.empty_like(w)
    return {
        "dH = d W": measure.seconds(lambda: torch.mm(d, w, out=dh), device),
        "dW = d^T H": measure.seconds(lambda: torch.mm(d.t(), h, out=dw), device),
        "logits = H W^T": measure.seconds(lambda: torch.mm(h, w.t(), out=d), device),
    }


def parts(p: Problem, rows: int, device: str) -> list[dict[str, Any]]:
    """Each operation of one block of `one_pass`, times the number of blocks: where the time goes."""
    h, y, w = p.hidden_ND[:rows], p.targets_N[:rows], p.weight_VD
    few = min(rows, logprobs._logit_rows(w))  # rows whose logits exist at a time
    logits = logprobs._logits(h[:few], w, None)
    d = torch.empty(rows, len(w), dtype=w.dtype, device=device)
    logprobs._forward(h, w, None, y, 1.0, d)
    dh, g = torch.empty_like(h), p.upstream_N[:rows]
    steps: dict[str, tuple[int, Callable[[], object]]] = {
        "logits": (few, lambda: logprobs._logits(h[:few], w, None)),
        "softmax and residuals": (few, lambda: logprobs._softmax(logits, y[:few], 1.0, d[:few])),
        "dH": (rows, lambda: logprobs._head_products(d, g, h, w, dh, None, None)),
        "dW += ": (rows, lambda: logprobs._head_products(d, g, h, w, None, p.weight_grad_VD, None)),
    }
    often = 20 if device == "cuda" else 1  # in one timing: the wait for an empty queue must not count for each

    def several(run: Callable[[], object]) -> Callable[[], None]:
        def repeat() -> None:
            for _ in range(often):
                run()

        return repeat

    return [
        {
            "part": name,
            "rows": n,
            "ms in total": 1e3 * len(p.targets_N) / n * measure.seconds(several(run), device, repeats=3) / often,
        }
        for name, (n, run) in steps.items()
    ]


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2_560)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a smoke test")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    N, V, D = (256, 1000, 64) if options.tiny else (options.tokens, options.vocabulary, options.hidden)
    peak, copy = measure.matmul_ceiling(device), measure.copy_ceiling(device)
    print(
        f"{N} tokens, {V} vocabulary, {D} hidden; bf16 product {peak / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s"
    )
    alone = products(N, V, D, device)
    limit = sum(alone.values())
    print({name: f"{1e3 * t:.1f} ms" for name, t in alone.items()}, f"together {1e3 * limit:.1f} ms", flush=True)

    p = Problem(N, V, D, device)
    auto = logprobs.block_rows(p.weight_VD)
    variants: dict[str, Callable[[Problem], Result]] = {f"one pass ({auto} rows)": one_pass}
    for rows in (512, 1024, 1536) if not options.tiny else (100,):
        variants[f"one pass ({rows} rows)"] = partial(one_pass, rows=rows)
    variants |= {"two passes": two_passes, "liger fused cross-entropy": liger, "full logits": full_logits}
    small = p.first(min(N, 512))
    rows_out = []
    for name, run in variants.items():
        columns = ("ms", "ratio", "extra GB", "logprob error, mean", "dH error", "dW error")
        row: dict[str, Any] = {"variant": name, **dict.fromkeys(columns)}
        try:
            # liger minimises the mean of -logprob
            upstream = (
                torch.full_like(small.upstream_N, -1 / len(small.targets_N)) if run is liger else small.upstream_N
            )
            small.weight_grad_VD.zero_()
            values, hidden_grad, weight_grad = run(small)
            expected = exact(small, upstream)
            if values is not None:
                assert expected[0] is not None
                row["logprob error, mean"] = float((values - expected[0]).abs().mean())
            row["dH error"], row["dW error"] = error(hidden_grad, expected[1]), error(weight_grad, expected[2])
            del expected, values, hidden_grad, weight_grad
            row["extra GB"] = (measure.peak_bytes(partial(run, p), device) - p.hidden_ND.nbytes) / 1e9
            row["ms"] = 1e3 * measure.seconds(partial(run, p), device)
            row["ratio"] = row["ms"] / 1e3 / limit
        except (ImportError, torch.OutOfMemoryError) as failure:
            row["variant"] += f": {type(failure).__name__}"
        rows_out.append(row)
        print(row, flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    again = sum(products(N, V, D, device).values())
    breakdown = parts(p, min(auto, N), device)
    measure.write(
        options.out,
        {
            "environment": measure.environment(device),
            "shape": {"N": N, "V": V, "D": D},
            "ceilings": {"bf16_flops": peak, "copy_bytes_per_s": copy},
            "products_s": alone,
            "products_again_s": again,
            "variants": rows_out,
            "parts": breakdown,
        },
    )
    print(measure.table(breakdown), measure.table(rows_out), sep="\n\n")
    print(f"three products alone {1e3 * limit:.1f} ms before, {1e3 * again:.1f} ms after; ratio is to the first")


if __name__ == "__main__":
    main()
