"""What slow rewards cost generation, and what the math verifier says on answers that were decided by hand.

    PYTHONPATH=. python benchmarks/rewards.py --out results.json        # models/tiny behind a vLLM server of its own
    PYTHONPATH=. python benchmarks/rewards.py --part verdicts           # no server

**overlap**: 32 requests are kept open at the server. 64 rewards of half a second each are asked for at once, in the
event loop of the requests: as a coroutine, as a plain function that blocks, and (what one must not do) blocking in the
loop itself. Counted meanwhile and, for as long, just before: generated tokens per second, the longest time without an
answer, the longest time in which the loop did not come back to a timer of 5 ms.

**verdicts**: the table of `tests/test_math_verify.py` on the main thread and on another, and each verdict
that is not that of the hand.
"""

import argparse
import asyncio
import importlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import measure
from omegaconf import OmegaConf

from grpo.rewards import Rewards, build_rewards
from grpo.rollout.client import Client, sampling_params
from grpo.rollout.server import plan_servers
from grpo.settings import Rollout
from grpo.types import Completion, Prompt, Sampling

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
SECONDS = 0.5  # of one reward
COUNT = 64
STREAMS = 32
TOKENS = 16  # of one request
LEAST = 4.0  # seconds of a measurement


async def waits(prompt: str, completion: str) -> float:
    await asyncio.sleep(SECONDS)
    return 1.0


def blocks(prompt: str, completion: str) -> float:
    time.sleep(SECONDS)
    return 1.0


@dataclass
class Watch:
    """Answers as they come, and how late the loop was."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)

    async def tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            self.late.append((now, now - before - 0.005))

    async def stream(self, client: Client, url: str, number: int) -> None:
        """Requests, one after the other."""
        count = 0
        while True:
            sampling = sampling_params(Sampling(1.0, TOKENS, seed=number * 10**6 + count))
            body = {"request_id": f"{number}-{count}", "token_ids": [3 + number % 10, 13], "sampling_params": sampling}
            answer = await client.call(url, "POST", "/inference/v1/generate", body=body, timeout=60)
            self.answers.append((time.perf_counter(), len(answer["choices"][0]["token_ids"])))
            count += 1

    def between(self, start: float, end: float) -> dict[str, float]:
        inside = [(at, tokens) for at, tokens in self.answers if start <= at < end]
        times = [start, *(at for at, _ in inside), end]
        return {
            "tokens_per_s": sum(tokens for _, tokens in inside) / (end - start),
            "longest_without_answer_s": max(b - a for a, b in pairwise(times)),
            "loop_late_s": max((late for at, late in self.late if start <= at < end + 0.01), default=end - start),
        }


async def ask(rewards: Rewards) -> float:
    """64 at once, again until there is enough to measure. Seconds of one round."""
    rounds, started = 0, time.perf_counter()
    while rounds == 0 or time.perf_counter() - started < LEAST:
        completions = [Completion(0, i, [1], [0.0], [0], "stop", text="x") for i in range(COUNT)]
        await asyncio.gather(*(rewards.score(Prompt(0, "row", "p", [1], {}), c) for c in completions))
        assert all(c.reward == 1.0 for c in completions)
        rounds += 1
    return (time.perf_counter() - started) / rounds


async def in_the_loop() -> float:
    """What one must not do, for an eighth of them."""
    started = time.perf_counter()
    for _ in range(COUNT // 8):
        blocks("p", "x")
    return (time.perf_counter() - started) * 8


async def overlap(url: str) -> list[dict[str, Any]]:
    watch, rows = Watch(), []
    async with Client([url], vocab_size=10**6) as client:
        tasks = [asyncio.create_task(watch.stream(client, url, i)) for i in range(STREAMS)]
        tasks.append(asyncio.create_task(watch.tick()))
        await asyncio.sleep(2)
        for name, function in (("coroutine", "waits"), ("blocking", "blocks"), ("in the loop itself", None)):
            spec = [{"kind": f"{HERE}:{function}"}] if function else "exact_match"
            with Rewards(build_rewards(spec, max_tokens=8)) as rewards:
                await asyncio.to_thread(rewards.wait_ready)
                if function:  # starts the workers: blocking calls have up to eight
                    await ask(rewards)
                calm = time.perf_counter()
                await asyncio.sleep(LEAST)
                start = time.perf_counter()
                each = await (ask(rewards) if function else in_the_loop())
                end = time.perf_counter()
                await asyncio.sleep(0.2)
            before, during = watch.between(calm, start), watch.between(start, end)
            rows.append({"rewards": name, "seconds": each} | during)
            rows[-1] |= {"before": before["tokens_per_s"], "late_before_s": before["loop_late_s"]}
        for task in tasks:
            task.cancel()
        failed = [r for r in await asyncio.gather(*tasks, return_exceptions=True) if isinstance(r, Exception)]
    assert not failed, failed
    return rows


def serve(folder: Path, run: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """`run` with the address of a server of models/tiny."""
    given = OmegaConf.load(ROOT / "conf/rollout/vllm.yaml")
    defaults: dict[str, Any] = OmegaConf.to_container(given, resolve=True)  # type: ignore[assignment]
    del defaults["_target_"]
    servers = plan_servers(
        Rollout(**defaults),
        model=str(ROOT / "models/tiny"),
        dtype="float32",
        device="cpu",
        max_model_len=64,
        backend="disk",
        memory=0.0,
        folder=folder,
        inherited=dict(os.environ),
    )
    servers.launch()
    try:
        servers.wait_ready(600)
        return run(servers.urls[0])
    finally:
        servers.stop()


def verdicts() -> dict[str, Any]:
    """Counts, and each disagreement with the hand or between threads."""
    sys.path.insert(0, str(ROOT / "tests"))
    table = importlib.import_module("test_math_verify")
    right = [*table.RIGHT, *table.TOO_STRICT]
    pairs = [(*pair, 1.0) for pair in right] + [(*pair, 0.0) for pair in table.WRONG]

    async def everything(rewards: Rewards) -> list[float | None]:
        completions = [Completion(0, 0, [1], [0.0], [0], "stop", text=text) for _, text, _ in pairs]
        rows = [Prompt(0, "row", "p", [1], {"answer": gold}) for gold, _, _ in pairs]
        await asyncio.gather(*(rewards.score(row, c) for row, c in zip(rows, completions, strict=True)))
        return [c.reward for c in completions]

    patient = [{"kind": "math_verify", "timeout": 60.0}]  # a busy machine is not to decide what is right
    with Rewards(build_rewards(patient, max_tokens=8)) as rewards:
        rewards.wait_ready()
        here = asyncio.run(everything(rewards))
        there: list[list[float | None]] = []
        thread = threading.Thread(target=lambda: there.append(asyncio.run(everything(rewards))))
        thread.start()
        thread.join()
    disagree = [(*pair, verdict) for pair, verdict in zip(pairs, here, strict=True) if verdict != pair[2]]
    return {
        "answers": len(pairs),
        "right_by_hand": len(right),
        "agree": len(pairs) - len(disagree),
        "same_off_the_main_thread": there == [here],
        "disagree": [dict(zip(("gold", "completion", "hand", "verifier"), case, strict=True)) for case in disagree],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "overlap", "verdicts"], default="all")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "rewards", **measure.environment("cpu"), "cores": os.cpu_count()}
    if options.part != "overlap":
        result["verdicts"] = found = verdicts()
        print({key: value for key, value in found.items() if key != "disagree"})
        for case in found["disagree"]:
            print("disagree:", case)
    if options.part != "verdicts":
        with tempfile.TemporaryDirectory() as folder:
            result["rows"] = serve(Path(folder), lambda url: asyncio.run(overlap(url)))
        result["load"] = os.getloadavg()[0]
        print(measure.table(result["rows"]))
    measure.write(options.out, result)


if __name__ == "__main__":
    main()
