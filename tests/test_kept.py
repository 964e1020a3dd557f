"""Servers between the jobs of a multirun: which are kept, which never, and what is reset. (A whole sweep with kept
servers: test_multirun.py; with the real vLLM: test_kept_real.py.)
"""

import asyncio
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from composed import composed
from fake_faults import Fault
from fake_server import FakeServer
from plain_http import call

from grpo.objects import build
from grpo.preflight import check_server
from grpo.rollout import guard
from grpo.rollout import kept as kept_module
from grpo.rollout import server as server_module
from grpo.rollout.errors import ServerError, ServersLost
from grpo.rollout.kept import Kept, _key, reset
from grpo.rollout.server import ServerDied, Servers, VLLMServer, check_port, free_ports, plan_servers
from grpo.settings import Rollout
from grpo.signals import Interrupted
from grpo.sync.verify import SyncNotProven

PROGRAM = Path(__file__).with_name("fake_program.py")
READY = 30.0  # seconds


class Program(VLLMServer):
    """Planned as vLLM, launched as the fake program."""

    def launch(self, *, patience: float = 0.0) -> None:
        planned, self.command = self.command, [sys.executable, str(PROGRAM), str(self.port)]
        super().launch(patience=patience)
        self.command = planned


class Sweep:
    """Jobs in one process, as run.py makes them. `resets` are the urls that were reset; `refuses` makes it fail."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root, self.model = root, model
        self.kept = Kept()
        self.kept.open(root)
        self.resets: list[str] = []
        self.api_keys: list[str | None] = []
        self.refuses = False
        self.jobs = 0

    async def reset(self, url: str, api_key: str | None) -> None:
        self.resets.append(url)
        self.api_keys.append(api_key)
        if self.refuses:
            raise ServerError("does not want to")

    def shape(self, *overrides: str) -> dict[str, Any]:
        """What shapes the launch, on a CPU. overrides: rollout.key=value."""
        common: dict[str, Any] = {"model": str(self.model), "dtype": "float32", "device": "cpu", "max_model_len": 32}
        return {**common, "rollout": rollout(*overrides), "backend": "disk", "memory": 0.5}

    def begin(self, *overrides: str, env_set: dict[str, str] | None = None, **shape: Any) -> Servers:
        folder = self.root / str(self.jobs)
        folder.mkdir(parents=True)
        self.jobs += 1
        servers = self.kept.take(folder=folder, env_set=env_set or {}, **(self.shape(*overrides) | shape))
        servers.wait_ready(READY)
        return servers

    def end(self, failure: BaseException | None = None, *, synced: bool = True) -> None:
        self.kept.ended(failure, synced=synced)
        self.kept.give_back()

    def job(self, *overrides: str, **options: Any) -> int:
        """A job that goes well; the process id of its (only) server."""
        servers = self.begin(*overrides, **options)
        self.end()
        return pid(servers)


def rollout(*overrides: str) -> Rollout:
    pairs = [override.removeprefix("rollout.").partition("=") for override in overrides]
    return dataclasses.replace(default_rollout(), **{key: yaml.safe_load(value) for key, _, value in pairs})


@functools.cache
def default_rollout() -> Rollout:
    return build(composed().rollout, "rollout", Rollout)


def pid(servers: Servers) -> int:
    process = servers.launched[0].process
    return process.pid if process is not None else 0


@pytest.fixture
def sweep(tmp_path: Path, tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sweep]:
    shutil.copytree(tiny_dir, tmp_path / "model")
    sweep = Sweep(tmp_path / "sweep", tmp_path / "model")
    monkeypatch.setattr(server_module, "VLLMServer", Program)
    monkeypatch.setattr(kept_module, "reset", sweep.reset)
    yield sweep
    sweep.kept.give_back()
    sweep.kept.close()


# ---- which servers are kept ----


def test_the_next_job_gets_the_running_server_after_a_reset(sweep: Sweep) -> None:
    first = sweep.begin("rollout.max_staleness=0")
    assert not sweep.kept.reused
    assert sweep.resets == []
    sweep.end()
    second = sweep.begin("rollout.max_staleness=4", "rollout.group_size=4")
    assert sweep.kept.reused
    assert second is first
    assert sweep.resets == first.urls
    sweep.end()
    running = pid(first)
    sweep.kept.close()
    assert not guard.title(running)


def test_another_launch_is_another_server_and_the_first_has_ended(sweep: Sweep) -> None:
    first = sweep.job()
    assert guard.title(first)
    servers = sweep.begin("rollout.max_inflight=8")
    assert not sweep.kept.reused
    assert not guard.title(first)
    assert pid(servers) != first
    sweep.end()
    again = sweep.begin("rollout.max_inflight=8")
    assert sweep.kept.reused
    assert again is servers


OTHER: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flag": (["rollout.max_inflight=8"], {}),
    "extra flag": (["rollout.extra_args=[--seed,'3']"], {}),
    "context": ([], {"max_model_len": 64}),
    "dtype": ([], {"dtype": "bfloat16"}),
    "model": ([], {"model": "owner/name"}),
    "backend": ([], {"backend": "ipc"}),
    "key": (["rollout.api_key=secret"], {}),
    "threads": (["rollout.cpu_threads=3"], {}),
    "compile cache": (["rollout.compile_cache=cache"], {}),
    "environment": ([], {"inherited": {"VLLM_LOGGING_LEVEL": "DEBUG"}}),
    "address": (["rollout.host=localhost"], {}),
    "port": (["rollout.port=8123"], {}),
    "number": (["rollout.servers=2"], {}),
}


@pytest.mark.parametrize("name", OTHER)
def test_everything_that_shapes_a_launch_tells_servers_apart(sweep: Sweep, name: str) -> None:
    def key(*overrides: str, **options: Any) -> Any:
        shape = sweep.shape(*overrides) | {"folder": sweep.root, "inherited": {}} | options
        return _key(plan_servers(**shape), shape["rollout"], shape["model"])

    overrides, options = OTHER[name]
    assert key(*overrides, **options) == key(*overrides, **options)
    assert key(*overrides, **options) != key()


def test_other_files_of_the_model_are_another_server(sweep: Sweep) -> None:
    first = sweep.job()
    (sweep.model / "config.json").write_text((sweep.model / "config.json").read_text() + " ")
    assert sweep.job() != first


@pytest.mark.parametrize("what", ["size", "time"])
def test_a_model_is_other_files_by_their_size_and_by_their_time(sweep: Sweep, what: str) -> None:
    file = sweep.model / "config.json"
    before = file.stat()
    first = sweep.job()
    if what == "size":
        file.write_text(file.read_text() + " ")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    assert sweep.job() != first


def test_all_servers_are_reset_with_their_key(sweep: Sweep) -> None:
    servers = sweep.begin("rollout.servers=2", "rollout.api_key=secret")
    sweep.end()
    sweep.begin("rollout.servers=2", "rollout.api_key=secret")
    assert sweep.kept.reused
    assert sweep.resets == servers.urls
    assert len(servers.urls) == 2
    assert sweep.api_keys == ["secret"] * 2


def test_servers_that_get_weights_by_ipc_are_kept(sweep: Sweep) -> None:
    sweep.job(backend="ipc")
    sweep.begin(backend="ipc")
    assert sweep.kept.reused


def test_env_set_of_the_first_job_is_not_the_seconds(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job's environment is the base of all, and Hydra has put its env_set into it."""
    with monkeypatch.context() as job:
        job.setenv("ONLY", "of job 0")
        sweep.begin(env_set={"ONLY": "of job 0"})
        sweep.end()
    second = sweep.begin()
    assert not sweep.kept.reused
    assert "ONLY" not in second.launched[0].environment


def test_what_imports_put_into_the_environment_is_no_other_launch(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's compiler and vLLM set variables when they are imported, in the middle of the first job."""
    servers = sweep.begin(env_set={"SET": "1"})
    monkeypatch.setenv("SET_BY_AN_IMPORT", "/somewhere")
    sweep.end()
    assert sweep.job(env_set={"SET": "1"}) == pid(servers)
    sweep.begin(env_set={"OTHER": "1"})
    assert not sweep.kept.reused
    environment = sweep.kept._lease.servers.launched[0].environment  # type: ignore[union-attr]
    assert environment["OTHER"] == "1"
    assert not {"SET", "SET_BY_AN_IMPORT"} & environment.keys()


def test_env_set_is_taken_back_to_what_was_there(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVEL", "before")
    sweep.kept.open(sweep.root)
    with monkeypatch.context() as job:  # as Hydra does around a job
        job.setenv("LEVEL", "of job 0")
        first = sweep.begin(env_set={"LEVEL": "of job 0"})
        sweep.end()
    second = sweep.begin()
    assert [s.launched[0].environment["LEVEL"] for s in (first, second)] == ["of job 0", "before"]


@pytest.mark.parametrize("overrides", [["rollout.keep_server=false"], []], ids=["asked for", "nccl"])
def test_a_server_that_may_not_be_kept_ends_with_its_job(sweep: Sweep, overrides: list[str]) -> None:
    """And it does not find a kept one beside it."""
    kept = sweep.job()
    servers = sweep.begin(*overrides, backend="disk" if overrides else "nccl")
    assert not guard.title(kept)
    running = pid(servers)
    sweep.end()
    assert not guard.title(running)
    assert servers.launched[0].log.parent == sweep.root / "1"


def test_a_job_with_attached_servers_leaves_the_kept_one_alone(sweep: Sweep) -> None:
    first = sweep.begin()
    sweep.end()
    assert sweep.job() == pid(first)
    attached = sweep.begin(f"rollout.urls=[{first.urls[0]}]")
    assert not sweep.kept.reused
    sweep.end()
    assert attached.launched == []
    assert sweep.job() == pid(first)


def test_a_single_run_ends_its_server(sweep: Sweep) -> None:
    sweep.kept.root = None
    servers = sweep.begin()
    running = pid(servers)
    sweep.end()
    assert not guard.title(running)
    assert servers.launched[0].log == sweep.root / "0" / "server.log"
    assert "copied to here" not in servers.launched[0].log.read_text()


# ---- servers in doubt ----


def wrapped(error: BaseException) -> Exception:
    outer = RuntimeError("the step failed")
    outer.__cause__ = error
    return outer


@pytest.mark.parametrize(
    ("failure", "synced", "stays"),
    [
        (None, True, True),
        (FloatingPointError("the loss is NaN"), True, True),
        (FloatingPointError("the loss is NaN"), False, False),  # within a sync
        (ServersLost("given up"), True, False),
        (ServerDied("died"), True, False),
        (SyncNotProven("other logprobs"), True, False),
        (TimeoutError("no group finished"), True, False),
        (AssertionError("law 1 is broken"), True, False),
        (MemoryError("no room"), True, False),
        (wrapped(ServersLost("given up")), True, False),
        (Interrupted(signal.SIGTERM), True, False),
    ],
)
def test_a_server_in_doubt_is_not_kept(sweep: Sweep, failure: BaseException | None, synced: bool, stays: bool) -> None:
    servers = sweep.begin()
    running = pid(servers)
    sweep.end(failure, synced=synced)
    assert bool(guard.title(running)) == stays
    sweep.begin()
    assert sweep.kept.reused == stays


@pytest.mark.parametrize(("failure", "ended_by"), [(None, signal.SIGTERM), (ServerDied("died"), signal.SIGKILL)])
def test_the_servers_of_a_run_that_failed_get_no_grace(
    sweep: Sweep, failure: BaseException | None, ended_by: signal.Signals
) -> None:
    process = sweep.begin().launched[0].process
    assert process is not None
    sweep.end(failure, synced=False)
    assert process.returncode == 128 + ended_by


def test_a_job_that_could_not_say_how_it_ended_gives_back_no_server(sweep: Sweep) -> None:
    running = pid(sweep.begin())
    sweep.kept.give_back()
    assert not guard.title(running)


@pytest.mark.parametrize("when", ["in the job", "after it"])
def test_a_dead_server_is_not_kept(sweep: Sweep, when: str) -> None:
    servers = sweep.begin()
    if when == "after it":
        sweep.end()
    running = pid(servers)
    os.kill(running, signal.SIGTERM)
    while guard.title(running):
        time.sleep(0.01)
    if when == "in the job":
        sweep.end()
        assert pid(servers) == 0  # ended
    sweep.begin()
    assert not sweep.kept.reused


def test_a_server_that_cannot_be_reset_is_replaced(sweep: Sweep) -> None:
    first = sweep.job()
    sweep.refuses = True
    second = sweep.begin()
    assert not sweep.kept.reused
    assert not guard.title(first)
    assert guard.title(pid(second))


def test_a_job_whose_launch_fails_leaves_nothing_in_hand(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: VLLMServer) -> None:
        raise ValueError("rollout.port: cannot be used")

    with monkeypatch.context() as failing:
        failing.setattr(Program, "launch", taken)
        with pytest.raises(ValueError, match="cannot be used"):
            sweep.begin()
    sweep.kept.give_back()
    sweep.job()


def test_the_port_of_a_kept_server_is_no_taken_port(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    first = sweep.job(f"rollout.port={port}")
    monkeypatch.setattr(kept_module, "servers", sweep.kept)
    with pytest.raises(ValueError, match="cannot be used"):
        check_port("127.0.0.1", port)
    check_server(rollout(f"rollout.port={port}"))
    assert sweep.job(f"rollout.port={port}") == first
    assert sweep.job(f"rollout.port={port}", "rollout.max_inflight=8") != first  # it had to end first


# ---- logs ----


def test_each_job_has_its_part_of_the_log(sweep: Sweep) -> None:
    for number in range(3):
        servers = sweep.begin("rollout.max_inflight=8") if number == 2 else sweep.begin()
        (log,) = {server.log for server in servers.launched}
        assert log == sweep.root / "server.log"
        with log.open("a") as file:
            file.write(f"line of job {number}\n")
        assert "line of job" not in (sweep.root / str(number) / "server.log").read_text()
        assert "in ../server.log from byte" in (sweep.root / str(number) / "server.log").read_text()
        sweep.end()
    parts = [(sweep.root / str(number) / "server.log").read_text() for number in range(3)]
    for number, (part, how) in enumerate(zip(parts, ("launched", "kept", "launched"), strict=True)):
        lines = [line for line in part.splitlines() if line.startswith("line of") or line.startswith("----")]
        assert lines == [f"---- {number}: {how} ----", f"line of job {number}"]


# ---- what a reset does, at a server that speaks vLLM's protocol ----


def run_reset(server: FakeServer) -> None:
    asyncio.run(reset(server.url, None))


def test_a_reset_ends_open_requests_and_leaves_the_server_running(server: FakeServer, pool: ThreadPoolExecutor) -> None:
    server.hold()
    body = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 8, "logprobs": 0}}
    left = pool.submit(call, server.url, "/inference/v1/generate", body)
    server.wait_for(lambda s: s.open_now == 1)
    assert call(server.url, "/pause?mode=keep")[0] == 200
    run_reset(server)
    assert left.result()[1]["choices"][0]["finish_reason"] == "abort"
    assert server.open_now == 0
    assert server.engine.paused is None
    assert server.calls[-3:] == ["pause", "reset_prefix_cache", "resume"]
    server.release()
    assert call(server.url, "/inference/v1/generate", body)[0] == 200


@pytest.mark.parametrize("name", ["pause", "reset_prefix_cache", "resume"])
def test_a_reset_that_fails_is_an_error(server: FakeServer, name: str) -> None:
    server.add_fault(Fault(name, status=500))
    with pytest.raises(ServerError, match=name):
        run_reset(server)


def test_caches_that_stay_are_an_error(server: FakeServer) -> None:
    def stays(answer: dict[str, Any]) -> None:
        answer["success"] = False

    server.add_fault(Fault("reset_prefix_cache", edit=stays))
    with pytest.raises(ServerError, match="hold key-value caches"):
        run_reset(server)
