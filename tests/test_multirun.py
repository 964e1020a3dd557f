"""Jobs of a multirun share a process: what one leaves behind, and that the next is what it would be alone."""

import gc
import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import command
import pytest
import torch
import yaml  # type: ignore[import-untyped]
from composed import ROOT, composed
from fake_server import FakeServer

from grpo import isolation, sweep
from grpo.memory import peak_gb

EXPERIMENTS: dict[str, dict[str, Any]] = {
    "good": {"rollout": {"max_staleness": 0}, "loss": {"_target_": "my_probes.Probed"}},
    "bad": {"seed": 5, "rollout": {"max_staleness": 4}, "loss": {"_target_": "my_probes.Fails"}},
}


def experiments(folder: Path, **urls: str) -> list[str]:
    """Overrides that make `experiment=good` and `experiment=bad` known. urls: their own servers."""
    (folder / "more" / "experiment").mkdir(parents=True)
    for name, settings in EXPERIMENTS.items():
        if name in urls:
            settings = {**settings, "rollout": settings["rollout"] | {"urls": [urls[name]]}}
        text = "# @package _global_\n" + yaml.safe_dump(settings)
        (folder / "more" / "experiment" / f"{name}.yaml").write_text(text)
    return [f"hydra.searchpath=[file://{folder / 'more'}]", "hydra.sweep.dir=jobs"]


def surroundings(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "GRPO_PROBES": str(folder / "probes.jsonl")}


def steps(job: Path) -> list[dict[str, object]]:
    """metrics.jsonl without what clock and memory say. The next groups may be made before a step's line is written."""
    timed = re.compile("time/|throughput/|sync/|sampler/|memory/|.*/seconds_|tokens/(generated|in_flight)$")
    return [{k: v for k, v in line.items() if not timed.match(k)} for line in command.lines(job / "metrics.jsonl")]


@pytest.mark.slow
def test_a_job_leaves_nothing_to_the_next(tmp_path: Path, server: FakeServer) -> None:
    """A good job, one that fails in its third step, and the first one again; with wandb, offline."""
    ended = command.run(
        *command.small(server),
        *experiments(tmp_path),
        *("-m", "experiment=good,bad,good", "train.steps=4", "track=wandb", "track.mode=offline"),
        folder=tmp_path,
        WANDB_SILENT="true",
        **surroundings(tmp_path),
    )
    assert ended.returncode == 1, ended.stderr
    jobs = [tmp_path / "jobs" / str(number) for number in range(3)]
    assert [command.load(job / "status.json")["state"] for job in jobs] == ["finished", "failed", "finished"]

    # The third job is what the first one was: seeds, weights, versions.
    assert steps(jobs[2]) == steps(jobs[0])
    assert command.lines(jobs[2] / "rollouts.jsonl") == command.lines(jobs[0] / "rollouts.jsonl")
    weights = [(job / "checkpoints/step_000004/model.safetensors").read_bytes() for job in jobs[::2]]
    assert weights[0] == weights[1]

    # The process holds after the failed job what it held after the good one: no model, no thread, no file.
    first, second, third = (json.loads(line) for line in (tmp_path / "probes.jsonl").read_text().splitlines())
    assert second["handlers"].pop().endswith("jobs/1/run.log")
    assert third["handlers"].pop().endswith("jobs/2/run.log")
    assert third == second
    assert (second["parameters"], second["tensors"]) == (0, 0)
    assert not {name for name in second["threads"] if "rollout" in name or "weight" in name}
    assert second["signals"] == first["signals"]
    assert not any("jobs/" in name for name in second["files"])
    assert not second["wandb"]

    about = r"; about \d+ s left \(\d+ s a job\)"
    said = re.findall("^sweep: .*", ended.stdout, re.MULTILINE)
    assert len(said) == 2
    assert re.fullmatch(f"sweep: job 2 of 3 is next; 1 finished, 0 failed{about}", said[0])
    assert re.fullmatch(f"sweep: job 3 of 3 is next; 1 finished, 1 failed{about}", said[1])

    # Each log and each wandb run is of one job.
    for job in jobs:
        text = (job / "run.log").read_text()
        assert len(re.findall("^.* - model     ", text, re.MULTILINE)) == 1
        assert ("a loss that fails" in text) == (job.name == "1")
        assert len(list(job.glob("wandb/offline-run-*"))) == 1


def test_fail_fast_ends_the_sweep_with_the_first_failure(tmp_path: Path) -> None:
    arguments = ("-m", "model.lr=abc,0.1", "rollout.urls=['http://127.0.0.1:9']", "hydra.sweep.dir=jobs")
    ended = command.run(*arguments, "fail_fast=true", folder=tmp_path)
    assert ended.returncode == 1
    assert sorted(path.name for path in (tmp_path / "jobs").glob("[0-9]")) == ["0"]
    assert "Traceback" not in ended.stderr
    assert "job 0: model.lr='abc': expected a finite number" in ended.stderr
    assert "not all jobs were started" in ended.stdout


def test_a_failure_of_a_run_ends_a_sweep_that_asks_for_it(tmp_path: Path) -> None:
    for asked, kind in ((False, sweep.JobFailed), (True, sweep.Stopped)):
        assert type(sweep.failed(tmp_path, "why", composed(f"fail_fast={asked}"))) is kind
    assert not issubclass(sweep.Stopped, Exception)  # which Hydra would take for one job's


def test_an_error_that_is_kept_keeps_no_frame(tmp_path: Path) -> None:
    class Model:
        pass

    gone = []

    def job() -> None:
        model = Model()
        gone.append(weakref.ref(model))
        try:
            raise ValueError("inner")
        except ValueError as inner:
            raise RuntimeError("outer") from inner

    def outer() -> None:
        try:
            job()
        except RuntimeError:
            raise sweep.JobFailed("job") from None  # only its context knows what was behind it

    with pytest.raises(sweep.JobFailed) as caught:
        outer()
    assert gone[0]() is not None
    isolation.forget_frames(caught.value)
    gc.collect()
    assert gone[0]() is None


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel does not let us")
def test_the_largest_resident_set_is_counted_anew() -> None:
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    del block
    before = peak_gb(torch.device("cpu"))
    isolation.clean()
    assert peak_gb(torch.device("cpu")) < before - 0.15


def test_memory_statistics_begin_anew_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: calls.append(f"{name}{device}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    isolation.clean()
    assert calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    isolation.clean()
    assert calls == ["empty_cache()", "ipc_collect()", "reset_peak_memory_stats(0,)", "reset_peak_memory_stats(1,)"]
