"""The cost of the rollout client per request and per token, with 1,024 requests open; does its event loop keep up?

    python benchmarks/loader.py --out results.json
    python benchmarks/loader.py --tiny                                   # a smoke test

A server in another process answers every request, after a delay, with one ready-made answer of the size that vLLM sends
for `--new-tokens` tokens, so that the client's side is all that is measured. Three clients do the same work in the same
run, each counted in seconds of this process's CPU:

    bytes     aiohttp alone: post a ready-made body, read the answer, look at nothing. The limit.
    json      the same with the body encoded and the answer decoded by the standard library.
    grpo      `Client.generate`: what a run uses; every field of every token checked.

loop_lag is how late a sleep of 10 ms came back at worst while all requests were open. Two libraries that could make it
faster are timed beside it where they are installed: orjson (decoding alone) and uvloop (the whole of it).
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import measure
from aiohttp import web

from grpo.rollout.client import Client, sampling_params
from grpo.types import Sampling

PATH = "/inference/v1/generate"
VOCABULARY = 151_936


def ready_answer(tokens: int) -> bytes:
    """As vLLM 0.32 answers with `logprobs=0`: about 70 bytes a token."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCABULARY) for _ in range(tokens)]
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{i}", "logprob": -draw.random() * 5, "bytes": None, "top_logprobs": []} for i in ids
    ]
    choice = {
        "index": 0,
        "token_ids": ids,
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [{"version": "3", "start": 0, "end": tokens}],
    }
    return json.dumps({"request_id": "0-0-0", "choices": [choice]}).encode()


def serve(pipe: Connection, body: bytes, delay: float) -> None:
    """The server's process: tells its port, ends with its parent."""
    draw = random.Random(0)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(delay * (0.5 + draw.random()))  # as completions of different lengths do
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post(PATH, answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        pipe.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


async def work(ask: Callable[[int], Awaitable[object]], requests: int, inflight: int) -> dict[str, float]:
    """`requests` calls of `ask`, `inflight` of them open at any time; seconds of CPU and wall-clock, and lateness."""
    numbers = iter(range(requests))
    late = 0.0

    async def worker() -> None:
        for number in numbers:
            await ask(number)

    async def tick() -> None:
        nonlocal late
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late = max(late, time.perf_counter() - due)

    ticker = asyncio.create_task(tick())
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(inflight)))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    ticker.cancel()
    return {"cpu_s": cpu, "wall_s": wall, "loop_lag_s": late}


async def plain(url: str, sampling: Sampling, prompt: list[int], options: argparse.Namespace, decode: bool) -> Any:
    request = {"request_id": "0-0-0", "token_ids": prompt, "sampling_params": sampling_params(sampling)}
    ready = json.dumps(request).encode()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(number: int) -> object:
            body = json.dumps(request).encode() if decode else ready
            async with session.post(url + PATH, data=body, headers={"Content-Type": "application/json"}) as response:
                answer = await response.read()
            return json.loads(answer) if decode else answer

        return await work(ask, options.requests, options.open)


async def ours(url: str, sampling: Sampling, prompt: list[int], options: argparse.Namespace) -> Any:
    async with Client([url], vocab_size=VOCABULARY) as client:

        async def ask(number: int) -> object:
            sampled = await client.generate(prompt, sampling, request_id=str(number))
            assert len(sampled.token_ids) == options.new_tokens
            return sampled

        return await work(ask, options.requests, options.open)


def rows(url: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    sampling = Sampling(1.0, options.new_tokens, 7, (), (1,))
    prompt = list(range(options.length))
    variants: dict[str, Callable[[], Any]] = {
        "bytes": lambda: asyncio.run(plain(url, sampling, prompt, options, decode=False)),
        "json": lambda: asyncio.run(plain(url, sampling, prompt, options, decode=True)),
        "grpo": lambda: asyncio.run(ours(url, sampling, prompt, options)),
    }
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        variants["grpo on uvloop"] = lambda: uvloop.run(ours(url, sampling, prompt, options))
    best: dict[str, dict[str, Any]] = {}
    for _ in range(options.repeats):  # interleaved: a slow moment of the machine meets all of them
        for name, run in variants.items():
            result = run()
            if name not in best or result["cpu_s"] < best[name]["cpu_s"]:
                best[name] = result
    limit = best["bytes"]["cpu_s"]
    return [
        {
            "client": name,
            "ms_per_request": 1e3 * result["cpu_s"] / options.requests,
            "us_per_token": 1e6 * result["cpu_s"] / options.requests / options.new_tokens,
            "tokens_per_s": options.requests * options.new_tokens / result["wall_s"],
            "ratio_to_bytes": result["cpu_s"] / limit,
            "loop_lag_ms": 1e3 * result["loop_lag_s"],
        }
        for name, result in best.items()
    ]


def repeat(decode: Callable[[bytes], Any], body: bytes) -> None:
    for _ in range(20):
        decode(body)


def decoders(body: bytes) -> dict[str, float]:
    """Milliseconds to decode one answer."""
    found: dict[str, Callable[[bytes], Any]] = {"json": json.loads}
    with contextlib.suppress(ImportError):
        import orjson

        found["orjson"] = orjson.loads
    return {name: 1e3 * measure.seconds(partial(repeat, decode, body), "cpu") / 20 for name, decode in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--open", type=int, default=1024)
    parser.add_argument("--length", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--delay", type=float, default=1.0, help="mean seconds until the server answers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a few requests, for a smoke test")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.requests, options.open, options.new_tokens, options.delay, options.repeats = 64, 32, 16, 0.05, 1
    body = ready_answer(options.new_tokens)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there, body, options.delay), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{here.recv()}"
        table = rows(url, options)
    finally:
        server.terminate()
        server.join()
    decoding = decoders(body)
    shape = {name: getattr(options, name) for name in ("requests", "open", "length", "new_tokens", "delay", "repeats")}
    measure.write(
        options.out,
        {
            **measure.environment("cpu"),
            "shape": shape,
            "answer_bytes": len(body),
            "rows": table,
            "decode_ms_per_answer": decoding,
        },
    )
    size = f"answers of {len(body):,} bytes ({options.new_tokens} tokens)"
    print(f"{options.requests} requests, {options.open} open, {size}")
    print("decoding one answer: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in decoding.items()))
    print(measure.table(table))


if __name__ == "__main__":
    main()
