"""Hydra's plugins (`pip install 'grpo[parallel]'`, `'grpo[optuna]'`): jobs in processes of their own, and an optimiser.

Neither lock file has them, so these tests are skipped where they are not installed, in CI too.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import command
import pytest
from fake_server import FakeServer
from test_multirun import experiments, surroundings

from grpo import gpu_slots
from grpo.gpu_slots import announce, own_gpus


def installed(plugin: str) -> pytest.MarkDecorator:
    found = find_spec("hydra_plugins") is not None and find_spec(f"hydra_plugins.{plugin}") is not None
    return pytest.mark.skipif(not found, reason=f"{plugin} is not installed")


@pytest.fixture
def servers(tiny_dir: Path) -> Iterator[list[FakeServer]]:
    """Two, since jobs at the same time may not share one."""
    with FakeServer(tiny_dir) as first, FakeServer(tiny_dir) as second:
        yield [first, second]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        pytest.param("joblib", ["hydra.launcher.n_jobs=2"], marks=installed("hydra_joblib_launcher")),
        pytest.param("submitit_local", [], marks=installed("hydra_submitit_launcher")),
    ],
)
def test_jobs_in_processes_of_their_own(
    tmp_path: Path, servers: list[FakeServer], launcher: str, options: list[str]
) -> None:
    """One goes well, one fails: states, logs, table and exit status are as in any sweep; each has its own GPU."""
    ended = command.run(
        *(override for override in command.small(servers[0]) if not override.startswith("rollout.urls")),
        *experiments(tmp_path, good=servers[0].url, bad=servers[1].url),
        *("-m", "experiment=good,bad", "train.steps=3", f"hydra/launcher={launcher}", *options),
        folder=tmp_path,
        CUDA_VISIBLE_DEVICES="5,7",
        **surroundings(tmp_path),
    )
    jobs = [tmp_path / "jobs" / str(number) for number in range(2)]
    assert ended.returncode == 1, ended.stderr
    assert [command.load(job / "status.json")["state"] for job in jobs] == ["finished", "failed"], ended.stderr
    assert len(command.lines(jobs[0] / "metrics.jsonl")) == 3
    assert "a loss that fails" in (jobs[1] / "run.log").read_text()
    assert "job 1: RuntimeError: a loss that fails" in ended.stderr
    assert re.search("^0 +finished", ended.stdout, re.MULTILINE)
    assert (tmp_path / "jobs" / "report.html").is_file()
    probes = command.lines(tmp_path / "probes.jsonl")
    assert len({command.load(job / "status.json")["pid"] for job in jobs}) == 2
    assert sorted(probe["gpus"] for probe in probes) == ["5", "7"]


@pytest.mark.slow
@installed("hydra_optuna_sweeper")
def test_an_optimiser_gets_what_a_job_has_reached(tmp_path: Path, server: FakeServer) -> None:
    ended = command.run(
        *command.small(server),
        *("-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize", "hydra.sweeper.n_trials=2"),
        *("hydra.sweeper.n_jobs=1", "model.lr=tag(log,interval(1e-4,1e-2))", "train.steps=2", "hydra.sweep.dir=jobs"),
        folder=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    reached = [command.load(tmp_path / "jobs" / job / "summary.json")["objective"] for job in "01"]
    assert f"best_value: {max(reached)}" in (tmp_path / "jobs" / "optimization_results.yaml").read_text()
    assert "sweep: job 2 of 2 is next; 1 finished, 0 failed" in ended.stdout


# ---- slots, without plugins ----


@pytest.fixture(autouse=True)
def no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_slots, "_slot", [])
    monkeypatch.setattr(gpu_slots, "POLL", 0.01)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def use(folder: Path, job: int, count: int, log: Path) -> None:
    """A job: notes which GPUs it has when it begins and when it ends."""
    gpu_slots.POLL = 0.01
    with own_gpus(folder, job, count):
        gpus = os.environ["CUDA_VISIBLE_DEVICES"]
        with log.open("a") as file:
            file.write(json.dumps([job, gpus, "begins"]) + "\n")
        time.sleep(0.1)
        with log.open("a") as file:
            file.write(json.dumps([job, gpus, "ends"]) + "\n")


def test_no_two_jobs_have_a_gpu_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    announce()
    log = tmp_path / "log"
    jobs = [get_context("fork").Process(target=use, args=(tmp_path, job, 2, log)) for job in range(5)]
    for process in jobs:
        process.start()
    for process in jobs:
        process.join(30)
    assert [process.exitcode for process in jobs] == [0] * 5
    using: dict[str, int] = {}
    lines: list[Any] = command.lines(log)
    assert len(lines) == 10
    for job, gpus, what in lines:
        if what == "begins":
            assert gpus in ("0,1", "2,3")
            assert gpus not in using
            using[gpus] = job
        else:
            assert using.pop(gpus) == job


def test_a_process_keeps_to_its_slot_and_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "a,b")
    announce()
    for job in (1, 2):  # its number alone would give job 2 the other one
        with own_gpus(tmp_path, job, 1):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "b"
    monkeypatch.setattr(gpu_slots, "_slot", [])
    with own_gpus(tmp_path, 1, 1):  # as another process: it is free again
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "b"


def test_too_few_gpus_and_bad_values_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    announce()
    for count, message in ((4, "gpus_per_job=4: this machine has 2"), (0, "at least 1"), (True, "whole number")):
        with pytest.raises(ValueError, match=message), own_gpus(tmp_path, 0, count):
            pass


def test_nothing_changes_without_a_gpu(tmp_path: Path) -> None:
    announce()
    with own_gpus(tmp_path, 0, 1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert list(tmp_path.iterdir()) == []
