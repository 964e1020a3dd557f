"""The sync's order and failures, and sync=disk, against the fake server; the proof of a sync. No vLLM.

ipc and nccl are in test_sync_vllm.py, the real server in test_sync_real.py.
"""

import contextlib
import fcntl
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fake_faults import Fault
from fake_server import FakeServer
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import other_weights
from torch import Tensor

from grpo.rollout.control import PlainControl
from grpo.rollout.errors import ServerError
from grpo.sync import auto, disk, server_backend
from grpo.sync.base import VersionNotConfirmed
from grpo.sync.disk import LOCK, PREFIX, DiskSync, remove_dead, write_safetensors
from grpo.sync.verify import SyncNotProven, verify

ORDER = [
    "pause",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "resume",
    "weight_info",
]


class Tensors:
    """Weights that are sent, in the policy's place."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield name, weight if dtype is None else weight.to(dtype)


@pytest.fixture
def weights(tiny_dir: Path, tmp_path: Path) -> Tensors:
    return Tensors(other_weights(tiny_dir, tmp_path / "drawn.safetensors", seed=3))


class Impatient(PlainControl):
    """One call, `impatient`, gets the hundredth part of a sync's deadline; what is short already stays as it is."""

    impatient = ""

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        return super().get(path, timeout=self._deadline(path, timeout))

    def post(self, path: str, *, timeout: float, **options: Any) -> dict[str, Any]:
        return super().post(path, timeout=self._deadline(path, timeout), **options)

    def _deadline(self, path: str, timeout: float) -> float:
        return timeout / 100 if path == self.impatient and timeout >= 30 else timeout


Made = Callable[..., DiskSync]


@pytest.fixture
def made(weights: Tensors, tmp_path: Path) -> Iterator[Made]:
    """Makes syncs of `weights` to some servers; closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(*servers: FakeServer, **changed: Any) -> DiskSync:
            options: dict[str, Any] = {
                "folder": str(tmp_path / "weights"),
                "fallback": tmp_path,
                "controls": [PlainControl(server.url) for server in servers],
                "policy": weights,
                "dtype": torch.float32,
                "pause": "keep",
                "timeout": 60.0,
            }
            sync = DiskSync(**(options | changed))
            stack.callback(sync.close)
            return sync

        yield make


@pytest.fixture
def two(tiny_dir: Path) -> Iterator[list[FakeServer]]:
    with FakeServer(tiny_dir) as one, FakeServer(tiny_dir) as other:
        yield [one, other]


def test_every_server_gets_the_weights_as_the_version(two: list[FakeServer], weights: Tensors, made: Made) -> None:
    sync = made(*two, pause="wait")
    for version in (0, 1):
        timings = sync.sync(version)
    for server in two:
        assert server.calls == ["init_weight_transfer_engine", *ORDER, *ORDER]
        assert [call.query for call in server.requests("pause")] == [{"mode": "wait", "clear_cache": "true"}] * 2
        (query,) = {tuple(call.query.items()) for call in server.requests("reset_prefix_cache")}
        assert query == (("reset_running_requests", "true"),)
        assert [c.body for c in server.requests("finish_weight_update")] == [
            {"weight_version": "0"},
            {"weight_version": "1"},
        ]
        state = server.engine.model.state_dict()
        assert all(torch.equal(state[name], weight) for name, weight in weights.weights.items())
    assert timings.bytes == sum(w.numel() * 4 for w in weights.weights.values())
    assert timings.as_dict().keys() == {
        *("export_s", "pause_s", "update_s", "resume_s", "paused_s", "total_s", "bytes"),
    }
    assert [file.name for file in sync.folder.iterdir()] == [LOCK], "a version stays behind"
    sync.close()
    assert not sync.folder.exists()


@pytest.mark.parametrize("call", ORDER[:-1])
def test_a_call_that_fails_on_one_server_leaves_all_running(two: list[FakeServer], call: str, made: Made) -> None:
    sync = made(*two)
    sync.sync(0)
    two[1].add_fault(Fault(call, status=500, times=1))
    with pytest.raises(ServerError, match=rf"{two[1].url}/{call}: 500"):
        sync.sync(1)
    for server in two:
        assert server.engine.paused is None
        assert not server.engine.session_open
        assert server.calls[-1] == "resume"
    sync.sync(2)
    assert [server.engine.version for server in two] == ["2", "2"]


@pytest.mark.parametrize("call", ORDER)
def test_a_server_that_hangs_is_given_up_by_the_deadline(two: list[FakeServer], made: Made, call: str) -> None:
    """In any call: each has a deadline (CASES 20), and both servers serve afterwards.

    Only the deadline of the call that hangs passes: a busy machine may be slow with the others.
    """
    controls = [Impatient(server.url) for server in two]
    sync = made(*two, controls=controls, timeout=60.0)
    sync.sync(0)
    controls[0].impatient = f"/{call}"
    fault = two[0].add_fault(Fault(call, hang=True, times=1))
    with pytest.raises(ServerError, match=rf"{two[0].url}/{call}: TimeoutError"):
        sync.sync(1)
    assert [server.engine.paused for server in two] == [None, None]
    if call == "update_weights":
        assert two[1].requests("finish_weight_update")[1:] == [], "no server may finish what another has not received"
    two[0].clear_faults()
    assert fault.hits == 1


def test_a_dead_server_is_named_and_the_others_resume(two: list[FakeServer], made: Made) -> None:
    sync = made(*two)
    sync.sync(0)
    two[1].die()
    with pytest.raises(ServerError, match=f"{two[1].url}/pause: ConnectionRefusedError") as caught:
        sync.sync(1)
    assert "could not be resumed" in "".join(caught.value.__notes__)
    assert two[0].engine.paused is None


def test_caches_of_old_weights_that_cannot_be_dropped_are_an_error(server: FakeServer, made: Made) -> None:
    sync = made(server)
    sync.sync(0)
    server.engine.reset_prefix_cache = lambda: False  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=r"reset_prefix_cache.*'success': False.*of no version"):
        sync.sync(1)


def test_another_set_of_servers_begins_with_the_handshake(two: list[FakeServer], made: Made) -> None:
    sync = made(*two)
    sync.sync(0)
    sync.use([server.url for server in two])  # the same
    sync.sync(1)
    sync.use([two[0].url])
    sync.sync(2)
    assert [server.calls.count("init_weight_transfer_engine") for server in two] == [2, 1]
    assert [server.engine.version for server in two] == ["2", "1"]


def test_all_servers_failing_are_named(two: list[FakeServer], made: Made) -> None:
    sync = made(*two)
    for server in two:
        server.add_fault(Fault("update_weights", status=500, times=1))
    with pytest.raises(ServerError, match=two[0].url) as caught:
        sync.sync(0)
    assert any(two[1].url in note for note in caught.value.__notes__)


def test_a_version_that_is_not_reported_is_an_error(two: list[FakeServer], made: Made) -> None:
    sync = made(*two)
    two[1].add_fault(Fault("finish_weight_update", apply="nothing"))
    with pytest.raises(VersionNotConfirmed, match=rf"{two[1].url}.*version 0 .*'default'"):
        sync.sync(0)


def test_an_update_that_a_killed_trainer_left_open_is_closed(server: FakeServer, made: Made) -> None:
    control = PlainControl(server.url)
    control.post("/start_weight_update", timeout=10)
    made(server).sync(0)
    assert server.engine.version == "0"
    assert not server.engine.session_open


def test_a_server_that_was_restarted_is_told_again_what_to_expect(server: FakeServer, made: Made) -> None:
    sync = made(server)
    sync.sync(0)
    server.die()
    server.restart()
    sync.reattach()
    sync.sync(0)
    assert server.calls.count("init_weight_transfer_engine") == 2
    assert server.engine.version == "0"


# The file


def test_the_serving_dtype_goes_into_the_file(server: FakeServer, weights: Tensors, made: Made) -> None:
    sync = made(server, dtype=torch.bfloat16)
    sync.prepare(0)
    written = load_file(sync._file(0))
    assert written.keys() == weights.weights.keys()
    for name, weight in weights.weights.items():
        assert torch.equal(written[name], weight.bfloat16())
    assert sync.bytes == 2 * sum(w.numel() for w in weights.weights.values())
    sync.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_is_written_is_what_safetensors_reads(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = {
        "matrix": torch.randn(5, 7, dtype=kind),
        "turned": torch.randn(3, 4, dtype=kind).T,
        "scalar": torch.tensor(2.5, dtype=kind),
        "empty": torch.zeros(0, 3, dtype=kind),
        "name ü": torch.randn(1, dtype=kind),
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "x", shapes, dtype, tensors.items())
    read = load_file(tmp_path / "x")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == kind
        assert torch.equal(read[name], tensor)
    assert int.from_bytes((tmp_path / "x").read_bytes()[:8], "little") % 8 == 0, "tensors are not aligned"
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_source_that_changes_between_announcing_and_sending_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not announced"):
        write_safetensors(tmp_path / "x", {"a": [2]}, "float32", [("b", torch.zeros(2))])
    with pytest.raises(AssertionError, match="fewer"):
        write_safetensors(tmp_path / "x", {"a": [2], "b": [2]}, "float32", [("a", torch.zeros(2))])


def test_memory_is_taken_where_there_is_room_for_two(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(disk, "MEMORY", memory)
    sync = made(server, folder=None)
    assert sync.folder.parent == memory
    assert sync.folder.name.startswith(f"{PREFIX}{os.getpid()}-")
    assert sync.folder.stat().st_mode & 0o777 == 0o755
    sync.close()

    usage = shutil.disk_usage(memory)._replace(free=2 * (sync.bytes + disk.RESERVE))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    sync = made(server, folder=None)
    assert sync.folder.parent == tmp_path
    sync.close()


def test_a_full_disk_is_said_before_anything_is_paused(
    server: FakeServer, weights: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Made
) -> None:
    class Usage(NamedTuple):
        total: int = 0
        used: int = 0
        free: int = 1000

    sync = made(server)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    with pytest.raises(OSError, match=rf"sync\.dir={tmp_path / 'weights'}: 0\.00 GB free.*needs"):
        sync.sync(0)
    assert "pause" not in server.calls
    sync.close()


def test_only_what_dead_runs_left_is_removed(tmp_path: Path) -> None:
    folders = {name: tmp_path / f"{PREFIX}1-{name}" for name in ("dead", "alive", "newborn", "lockless")}
    for folder in folders.values():
        folder.mkdir()
        (folder / "version_3.safetensors").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    (folders["dead"] / LOCK).touch()
    os.utime(folders["lockless"], (0, 0))
    with (folders["alive"] / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_dead(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"other", folders["alive"].name, folders["newborn"].name}


def test_a_second_run_in_the_same_folder_leaves_the_first_alone(server: FakeServer, made: Made) -> None:
    first = made(server)
    second = made(server)
    first.sync(0)
    assert first.folder != second.folder
    second.close()
    first.sync(1)
    first.close()


# Which backend


@pytest.mark.parametrize(
    ("device", "gpus", "attached", "backend", "reason"),
    [
        ("cpu", 0, False, "disk", "CPU"),
        ("cpu", 8, False, "disk", "CPU"),
        ("cuda", 1, False, "ipc", "share the one GPU"),
        ("cuda", 2, False, "nccl", "2 GPUs"),
        ("cuda:1", 4, False, "nccl", "4 GPUs"),
        ("cuda", 1, True, "disk", "not ours"),
    ],
)
def test_auto(device: str, gpus: int, attached: bool, backend: str, reason: str) -> None:
    chosen, why = auto(device=device, gpus=gpus, attached=attached)
    assert chosen == backend
    assert reason in why


def test_what_the_server_is_told() -> None:
    assert [server_backend(b) for b in ("disk", "ipc", "nccl")] == ["grpo_disk", "ipc", "nccl"]


# The proof

OURS = [-0.5, -1.25, -3.0, -0.125]


def prove(theirs: list[float], versions: list[int] | None = None, dtype: str = "float32") -> None:
    verify(ours=OURS, theirs=theirs, versions=versions or [7] * 4, version=7, dtype=dtype, url="http://s:1")


def test_equal_logprobs_under_the_right_label_are_a_proof() -> None:
    prove(OURS)
    prove([p + 1e-5 for p in OURS])
    prove([p + 0.05 for p in OURS], dtype="bfloat16")
    prove([OURS[0] + 0.3, *OURS[1:]], dtype="bfloat16")  # one unlikely token in bfloat16


@pytest.mark.parametrize(
    ("theirs", "dtype"),
    [
        ([*OURS[:3], OURS[3] + 2e-3], "float32"),  # one token
        ([p + 3e-4 for p in OURS], "float32"),  # a little, everywhere
        ([*OURS[:3], math.nan], "float32"),
        ([math.nan, *OURS[1:]], "float32"),
        ([*OURS[:3], -math.inf], "bfloat16"),
        ([*OURS[:3], OURS[3] - 2.0], "bfloat16"),
        ([p - 0.2 for p in OURS], "bfloat16"),
    ],
)
def test_other_logprobs_are_none(theirs: list[float], dtype: str) -> None:
    with pytest.raises(SyncNotProven, match=r"http://s:1: after the sync of version 7 .*tied head"):
        prove(theirs, dtype=dtype)


def test_equal_logprobs_under_another_label_are_none() -> None:
    with pytest.raises(SyncNotProven, match=r"labelled with versions \[6, 7\], the trainer synced 7"):
        prove(OURS, [7, 7, 6, 7])
