"""Each fault of the fake server does exactly what was asked, no more and no less often."""

import json
import math
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import fake_faults as faults
import pytest
from fake_faults import Fault
from fake_server import FakeServer
from plain_http import NEUTRAL, PROMPT, call, generate, logprobs_of, sync
from tiny import other_weights, reference_logprobs


def test_a_fault_is_limited_by_count_order_and_predicate(server: FakeServer) -> None:
    once = server.add_fault(Fault("generate", status=503, times=1, after=2))
    server.add_fault(Fault("generate", status=400, when=lambda call: call.body["token_ids"] == [9]))
    body = {"token_ids": PROMPT, "sampling_params": NEUTRAL}
    statuses = [call(server.url, "/inference/v1/generate", body)[0] for _ in range(4)]
    assert statuses == [200, 200, 503, 200]
    assert once.hits == 1
    assert call(server.url, "/inference/v1/generate", {**body, "token_ids": [9]})[0] == 400
    assert [record.status for record in server.requests()] == [200, 200, 503, 200, 400]


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (faults.null("logprobs"), lambda c: c["logprobs"] is None),
        (faults.missing("weight_versions"), lambda c: "weight_versions" not in c),
        (faults.short("logprobs"), lambda c: len(c["logprobs"]["content"]) == 11),
        (faults.short("token_ids", 2), lambda c: len(c["token_ids"]) == 10),
        (faults.short("weight_versions"), lambda c: c["weight_versions"][-1]["end"] == 11),
        (faults.logprob(math.nan), lambda c: math.isnan(logprobs_of(c)[-1])),
        (faults.logprob(-math.inf, at=3), lambda c: logprobs_of(c)[3] == -math.inf),
        (faults.logprob(None), lambda c: logprobs_of(c)[-1] is None),
        (faults.version("default-1"), lambda c: c["weight_versions"][0]["version"] == "default-1"),
        (faults.finish("abort"), lambda c: c["finish_reason"] == "abort"),
        (faults.chosen([7, 8], [-0.5, -2.0]), lambda c: c["token_ids"] == [7, 8] and logprobs_of(c) == [-0.5, -2.0]),
    ],
)
def test_edits(server: FakeServer, edit: faults.Edit, what: Any) -> None:
    clean = generate(server.url)
    assert not what(clean)
    server.add_fault(Fault("generate", edit=edit, times=1))
    assert what(generate(server.url))
    assert generate(server.url) == clean


def test_broken_answers(server: FakeServer) -> None:
    server.add_fault(Fault("generate", raw=b'{"choices": [', times=1))
    with pytest.raises(json.JSONDecodeError):
        generate(server.url)
    server.add_fault(Fault("generate", drop=True, times=1))
    with pytest.raises((OSError, HTTPException)):
        generate(server.url)
    server.add_fault(Fault("generate", cut=0.5, times=1))
    with pytest.raises((OSError, HTTPException)):
        generate(server.url)
    server.add_fault(Fault("generate", edit=faults.huge(3), times=1))
    status, answer = call(server.url, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": NEUTRAL})
    assert (status, len(answer["kv_transfer_params"]["padding"])) == (200, 3 * 2**20)
    assert len(server.requests()) == 4


def test_a_late_fault_does_the_work_and_a_hang_ends_with_the_fault(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    server.add_fault(Fault("pause", status=500, late=True, times=1))
    assert call(server.url, "/pause?mode=keep")[0] == 500
    assert call(server.url, "/is_paused", method="GET")[1]["is_paused"]
    server.add_fault(Fault("resume", hang=True))
    hanging = pool.submit(call, server.url, "/resume")
    server.wait_for(lambda s: s.calls[-1] == "resume")
    assert call(server.url, "/is_paused", method="GET")[1]["is_paused"]
    server.clear_faults()
    assert hanging.result(timeout=30)[0] == 200
    assert not call(server.url, "/is_paused", method="GET")[1]["is_paused"]


@pytest.mark.parametrize("folder", ["tiny_dir", "tied_dir"])
@pytest.mark.parametrize("apply", ["nothing", "all_but_head"])
def test_updates_that_answer_200_and_do_too_little(
    folder: str, apply: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model_dir: Path = request.getfixturevalue(folder)
    weights = other_weights(model_dir, tmp_path / "1.safetensors")
    with FakeServer(model_dir) as server:
        before = generate(server.url)
        server.add_fault(Fault("update_weights", apply=apply))
        assert sync(server.url, tmp_path / "1.safetensors", "1") == [200] * 5
        after = generate(server.url)
        server.clear_faults()
        sync(server.url, tmp_path / "1.safetensors", "2")
        mended = generate(server.url)
    assert after["weight_versions"][0]["version"] == "1"
    right = reference_logprobs(model_dir, PROMPT + mended["token_ids"], len(PROMPT), weights=weights)
    assert logprobs_of(mended) == pytest.approx(right, abs=1e-5)
    right = reference_logprobs(model_dir, PROMPT + after["token_ids"], len(PROMPT), weights=weights)
    assert (logprobs_of(after) == logprobs_of(before)) == (apply == "nothing")
    assert max(abs(a - b) for a, b in zip(logprobs_of(after), right, strict=True)) > 0.5


def test_a_finish_that_keeps_the_old_version(server: FakeServer, tiny_dir: Path, tmp_path: Path) -> None:
    other_weights(tiny_dir, tmp_path / "1.safetensors")
    server.add_fault(Fault("finish_weight_update", apply="nothing"))
    assert sync(server.url, tmp_path / "1.safetensors", "1") == [200] * 5
    assert call(server.url, "/weight_info", method="GET")[1] == {"weight_version": "default"}


def test_death_and_return_with_base_weights(
    server: FakeServer, tiny_dir: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    before = generate(server.url)
    other_weights(tiny_dir, tmp_path / "1.safetensors")
    sync(server.url, tmp_path / "1.safetensors", "1")
    server.hold()
    lost: list[Future[Any]] = [pool.submit(generate, server.url) for _ in range(3)]
    server.wait_for(lambda s: s.open_now == 3)
    server.add_fault(Fault("pause", die=True, times=1))
    with pytest.raises((OSError, HTTPException)):
        call(server.url, "/pause")
    for future in lost:
        with pytest.raises((OSError, HTTPException)):
            future.result(timeout=30)
    server.wait_for(lambda s: not s.alive and s.open_now == 0)
    with pytest.raises(OSError, match="refused"):
        call(server.url, "/health", method="GET")
    server.release()
    server.restart()
    assert generate(server.url) == before


def test_a_bug_in_an_edit_is_not_swallowed(tiny_dir: Path) -> None:
    server = FakeServer(tiny_dir)
    server.__enter__()
    server.add_fault(Fault("generate", edit=lambda answer: answer["no such key"]))
    with pytest.raises(json.JSONDecodeError):  # aiohttp's own 500
        generate(server.url)
    with pytest.raises(RuntimeError, match="fault's edit"):
        server.__exit__(None, None, None)
