"""A kept vLLM server changes nothing: the job that gets it is, bit for bit, what it is on a server of its own."""

import asyncio
import http.client
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import command
import pytest
from plain_http import call
from real import STARTUP, RealServer
from test_multirun import experiments, steps, surroundings

from grpo.rollout.kept import reset

TOKENS = 900  # some seconds
LONG = {"token_ids": [12, 7, 30], "sampling_params": {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}}

pytest_plugins = ["real_servers"]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_job_on_a_kept_server_is_what_it_is_alone(tmp_path: Path) -> None:
    """The same job twice, on a new server and on a used one. Between them one that runs ahead and breaks off: its
    requests are open, its weights are of version 2.
    """
    arguments = [*experiments(tmp_path), "-m", "experiment=good,bad,good", "train.steps=4", "train.batch_size=32"]
    arguments += ["train.threads=1", "train.eval_every=4", "data.eval_rows=32"]
    with command.start(*arguments, folder=tmp_path, **surroundings(tmp_path)) as process:
        out, err = process.communicate(timeout=STARTUP)
    assert process.returncode == 1, err  # the one that breaks off
    jobs = [tmp_path / "jobs" / str(number) for number in range(3)]
    states = [command.load(job / "status.json") for job in jobs]
    assert [state["state"] for state in states] == ["finished", "failed", "finished"], out + err
    assert [state["servers"] for state in states] == ["launched", "kept", "kept"]
    broken_off = command.lines(jobs[1] / "metrics.jsonl")
    assert [line["version"] for line in broken_off] == [0, 1]
    assert broken_off[-1]["tokens/in_flight"] > 0

    assert steps(jobs[2]) == steps(jobs[0])
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        assert command.lines(jobs[2] / name) == command.lines(jobs[0] / name)
    weights = [(job / "checkpoints/step_000004/model.safetensors").read_bytes() for job in (jobs[0], jobs[2])]
    assert weights[0] == weights[1]
    assert weights[0] != (jobs[1] / "checkpoints/step_000002/model.safetensors").read_bytes()


def holds_requests(url: str) -> bool:
    """Whether any request holds key-value blocks: then the cache cannot be reset."""
    return call(url, "/reset_prefix_cache")[1]["success"] is False


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def generated(url: str) -> float:
    """Tokens that the server has generated since its start, by its own count."""
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_closed_session_leaves_no_request_in_the_server(untied_server: RealServer) -> None:
    """vLLM aborts what nobody waits for any more, before it is done."""
    before = generated(untied_server.url)
    sockets = []
    for _ in range(4):
        connection = http.client.HTTPConnection(urlsplit(untied_server.url).netloc, timeout=30)
        connection.request("POST", "/inference/v1/generate", json.dumps(LONG), {"Content-Type": "application/json"})
        sockets.append(connection)
    wait(lambda: holds_requests(untied_server.url))
    for connection in sockets:
        connection.close()
    wait(lambda: not holds_requests(untied_server.url))
    assert 0 < generated(untied_server.url) - before < 4 * TOKENS


def test_a_reset_ends_what_still_runs(untied_server: RealServer, pool: ThreadPoolExecutor) -> None:
    """As many requests as it takes that a machine of any speed has some left when the reset comes."""
    left = [pool.submit(call, untied_server.url, "/inference/v1/generate", LONG) for _ in range(48)]
    wait(lambda: holds_requests(untied_server.url))
    asyncio.run(reset(untied_server.url, None))
    answers = [future.result()[1]["choices"][0] for future in left]
    aborted = [answer for answer in answers if answer["finish_reason"] == "abort"]
    assert aborted
    assert all(len(answer["token_ids"]) < TOKENS for answer in aborted)
    assert not holds_requests(untied_server.url)
    assert call(untied_server.url, "/is_paused", method="GET")[1] == {"is_paused": False}
