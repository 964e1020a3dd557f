"""What the benchmarks share: the machine's ceilings, timing, memory, a table, a JSON file. Nothing here knows grpo."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(run: Callable[[], object], device: str, *, repeats: int = 5, warmup: int = 1) -> float:
    """Median wall-clock of `repeats` runs, each with the device's queue drained before and after."""
    times = []
    for i in range(warmup + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        if i >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Memory that a run takes at most, above what was allocated before it (0 where there is no counter)."""
    if device != "cuda":
        run()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def matmul_ceiling(device: str) -> float:
    """FLOP/s of a large square bfloat16 product of random numbers, kept up for a second or so (CPU: a small one)."""
    n, inner = (8192, 40) if device == "cuda" else (512, 2)
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)

    def run() -> None:
        for _ in range(inner):
            torch.mm(a, b, out=out)

    return 2 * n**3 * inner / seconds(run, device, repeats=5, warmup=2)


def copy_ceiling(device: str) -> float:
    """Bytes/s of a copy within the device's memory, read and written counted."""
    source = torch.randn(2**30 if device == "cuda" else 2**20, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), device, repeats=10, warmup=2)


def environment(device: str) -> dict[str, Any]:
    """Hardware, versions and date, for a results file that still means something in a year."""
    import transformers

    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text; the columns are those of the first row."""
    columns = list(rows[0])
    cells = [columns] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(out: Path | None, result: dict[str, Any]) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
