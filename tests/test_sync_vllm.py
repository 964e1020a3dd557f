"""ipc and nccl without a GPU: vLLM's factory is replaced by an engine that drives our client as vLLM's do."""

import base64
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo, worker_init_payload

from grpo.model import Policy
from grpo.rollout.errors import ServerError
from grpo.sync.base import VersionNotConfirmed
from grpo.sync.vllm import BUFFER, IPCSync, NCCLSync, PolicySource, VLLMSync, our_address, wire_safe


class Server:
    """A control plane that remembers. `fail`: this path raises. `hang`: this path waits for the event."""

    def __init__(self, url: str, world_size: int = 1, fail: str | None = None) -> None:
        self.url = url
        self.world_size = world_size
        self.fail = fail
        self.calls: list[tuple[str, Any]] = []
        self.version = "default"
        self.confirms = True
        self.hang: threading.Event | None = None

    def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        return {"world_size": self.world_size} if path == "/get_world_size" else {"weight_version": self.version}

    def post(self, path: str, *, json: Any = None, params: Any = None, timeout: float) -> dict[str, Any]:
        self.calls.append((path, json if json is not None else params))
        if path == self.fail:
            self.fail = None
            raise RuntimeError(f"{self.url}{path}: status 500")
        if path == "/update_weights" and self.hang is not None:
            self.hang.wait(30)
        if path == "/finish_weight_update" and json and self.confirms:
            self.version = json["weight_version"]
        return {"success": True}

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]


class Engine:
    """Does what vLLM's trainer engines do with the client, and keeps what it was given."""

    made: "Engine"

    def __init__(self, info: Any, client: Any, source: PolicySource) -> None:
        self.info, self.client, self.source = info, client, source
        self.closed = False
        Engine.made = self
        if info.backend == "nccl":
            told = NCCLWeightTransferInitInfo(
                master_address=info.master_address,
                master_port=info.master_port,
                rank_offset=1,
                world_size=info.world_size,
                packed=info.packed,
            )
            client.init_weight_transfer_engine(worker_init_payload(told))
        else:
            client.init_weight_transfer_engine({"packed": info.packed})

    def send_weights(self) -> None:
        assert not torch.is_grad_enabled(), "every tensor that is sent would be kept with a graph"
        assert threading.current_thread().daemon, "a collective that never returns would keep the process"
        self.client.start_weight_update()
        meta = self.source.metadata()
        sent = list(self.source)
        assert [(m.name, m.dtype, m.shape) for m in meta] == [(n, w.dtype, tuple(w.shape)) for n, w in sent]
        self.client.update_weights({"names": [m.name for m in meta], "ipc_handles": {"gpu": (1, "h")}})
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    def trainer_init(info: Any, *, client: Any, source: Any) -> Engine:
        return Engine(info, client, source)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", staticmethod(trainer_init))
    return Engine


def made(kind: type[VLLMSync], servers: list[Server], folder: Path, timeout: float = 60.0) -> VLLMSync:
    controls: list[Any] = list(servers)
    return kind(controls=controls, policy=Policy(folder), dtype=torch.bfloat16, pause="keep", timeout=timeout)


ORDER = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/reset_prefix_cache",
    "/resume",
]


@pytest.mark.parametrize("kind", [IPCSync, NCCLSync])
def test_the_order_the_version_and_the_serving_dtype(
    kind: type[VLLMSync], engine: type[Engine], tiny_dir: Path
) -> None:
    servers = [Server("http://127.0.0.1:1"), Server("http://127.0.0.1:2")][: 1 if kind is IPCSync else 2]
    sync = made(kind, servers, tiny_dir)
    for version in (0, 1):
        timings = sync.sync(version)
    for server in servers:
        assert server.paths == ["/init_weight_transfer_engine", *ORDER, *ORDER]
        assert server.version == "1"
        assert server.calls[1] == ("/pause", {"mode": "keep", "clear_cache": "true"})
    assert {w.dtype for _, w in engine.made.source} == {torch.bfloat16}
    assert timings.bytes == 2 * sum(p.numel() for p in sync.policy.parameters())
    sync.close()
    assert engine.made.closed


def test_our_client_is_what_vllm_expects(engine: type[Engine], tiny_dir: Path) -> None:
    assert isinstance(made(IPCSync, [Server("http://127.0.0.1:1")], tiny_dir).client, VLLMWeightSyncClient)


def test_ipc_buffers_hold_the_largest_tensor(
    engine: type[Engine], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = made(IPCSync, [Server("http://127.0.0.1:1")], tiny_dir)
    assert sync.trainer_init_info().packed_buffer_size_bytes == sync.bytes < BUFFER
    monkeypatch.setattr("grpo.sync.vllm.BUFFER", 16)
    small = made(IPCSync, [Server("http://127.0.0.1:1")], tiny_dir)
    largest = max(w.numel() for _, w in small.policy.named_weights())
    assert small.trainer_init_info().packed_buffer_size_bytes == 2 * largest


def test_ipc_handles_travel_as_a_pickle_and_nothing_else_does() -> None:
    sent = wire_safe({"names": ["a"], "ipc_handles": {"gpu": (1, "h")}, "tensor_sizes": None})
    assert sent.keys() == {"names", "ipc_handles_pickled"}
    assert pickle.loads(base64.b64decode(sent["ipc_handles_pickled"])) == {"gpu": (1, "h")}
    assert wire_safe({"names": ["a"]}) == {"names": ["a"]}


def test_nccl_gives_every_server_its_own_ranks(engine: type[Engine], tiny_dir: Path) -> None:
    servers = [Server("http://127.0.0.1:1", world_size=2), Server("http://127.0.0.1:2", world_size=3)]
    made(NCCLSync, servers, tiny_dir).sync(0)
    told = [server.calls[0][1]["init_info"] for server in servers]
    assert [t["rank_offset"] for t in told] == [1, 3]
    assert [t["world_size"] for t in told] == [6, 6]
    assert told[0]["master_port"] == told[1]["master_port"]
    assert engine.made.info.master_address == "127.0.0.1"


@pytest.mark.parametrize("path", ORDER)
def test_a_failed_call_leaves_every_server_running_and_is_raised(
    engine: type[Engine], tiny_dir: Path, path: str
) -> None:
    servers = [Server("http://127.0.0.1:1"), Server("http://127.0.0.1:2", fail=path)]
    sync = made(NCCLSync, servers, tiny_dir)
    with pytest.raises(RuntimeError, match=f":2{path}: status 500"):
        sync.sync(0)
    assert [server.paths[-1] for server in servers] == ["/resume", "/resume"]


def test_a_version_that_is_not_reported_is_an_error(engine: type[Engine], tiny_dir: Path) -> None:
    server = Server("http://127.0.0.1:1")
    server.confirms = False
    with pytest.raises(VersionNotConfirmed, match="reports version 'default'"):
        made(IPCSync, [server], tiny_dir).sync(0)


def test_a_transfer_whose_other_side_is_gone_ends_by_its_deadline(engine: type[Engine], tiny_dir: Path) -> None:
    server = Server("http://127.0.0.1:1")
    sync = made(IPCSync, [server], tiny_dir)
    sync.sync(0)
    server.hang = threading.Event()
    sync.timeout = 0.3
    with pytest.raises(TimeoutError, match=r"sync=ipc: the transfer of version 1 .*sync.timeout=0.3"):
        sync.sync(1)
    assert server.paths[-1] == "/resume"
    server.hang.set()


def test_a_handshake_whose_other_side_is_gone_ends_by_its_deadline(
    engine: type[Engine], tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def hang(info: Any, *, client: Any, source: Any) -> None:
        over.wait(30)

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", staticmethod(hang))
    server = Server("http://127.0.0.1:1")
    with pytest.raises(TimeoutError, match=r"sync=nccl: the handshake did not end within sync.timeout=0.3 s"):
        made(NCCLSync, [server], tiny_dir, timeout=0.3).sync(0)
    over.set()
    assert server.paths[-1] == "/resume"


def test_a_new_handshake_gives_back_what_the_old_group_holds(engine: type[Engine], tiny_dir: Path) -> None:
    """A server has left: its group would wait for it for ever, and holds a port and memory of the GPU."""
    servers = [Server("http://127.0.0.1:1"), Server("http://127.0.0.1:2")]
    sync = made(NCCLSync, servers, tiny_dir)
    sync.sync(0)
    old = engine.made
    assert not old.closed
    sync.use([servers[0].url])
    sync.sync(1)
    assert old.closed
    assert engine.made is not old
    assert not engine.made.closed
    assert engine.made.info.world_size == 2
    assert [server.version for server in servers] == ["1", "0"]


def test_whatever_ends_a_transfer_is_raised(engine: type[Engine], tiny_dir: Path) -> None:
    """A library that exits in the transfer's thread would end that thread only, and the sync would count as made."""
    server = Server("http://127.0.0.1:1")
    sync = made(IPCSync, [server], tiny_dir)
    sync.sync(0)

    def exits() -> None:
        raise SystemExit("no GPU")

    engine.made.send_weights = exits  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="no GPU"):
        sync.sync(1)
    assert server.paths[-1] == "/resume"


def test_ipc_with_more_than_one_gpu_or_server_is_refused(engine: type[Engine], tiny_dir: Path) -> None:
    for servers in ([Server("http://127.0.0.1:1", world_size=2)], [Server("http://a:1"), Server("http://b:1")]):
        with pytest.raises(ValueError, match=r"sync=ipc: one server of one GPU"):
            made(IPCSync, servers, tiny_dir).sync(0)


def test_a_cache_of_the_old_weights_that_stays_is_an_error(engine: type[Engine], tiny_dir: Path) -> None:
    server = Server("http://127.0.0.1:1")
    post = server.post
    server.post = lambda path, **kw: {"success": False} if "reset" in path else post(path, **kw)  # type: ignore[method-assign]
    with pytest.raises(ServerError, match=r"reset_prefix_cache.*old weights"):
        made(IPCSync, [server], tiny_dir).sync(0)
    assert server.paths[-1] == "/resume"


def test_the_address_is_one_that_every_server_can_reach() -> None:
    assert our_address(["http://127.0.0.1:8000"]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("routes", "chosen"),
    [
        (["127.0.0.1", "10.0.0.7"], "10.0.0.7"),  # the one elsewhere cannot reach 127.0.0.1
        (["10.0.0.7", "127.0.0.1"], "10.0.0.7"),
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["10.0.0.7", "10.0.0.8"], "10.0.0.7"),
    ],
)
def test_the_address_where_one_server_is_on_another_machine(
    routes: list[str], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {f"server{number}": route for number, route in enumerate(routes)}

    class Probe:
        def __init__(self, *kind: Any) -> None:
            self.route = ""

        def __enter__(self) -> "Probe":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            self.route = ours[address[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.route, 1

    monkeypatch.setattr("grpo.sync.vllm.socket.socket", Probe)
    assert our_address([f"http://{host}:8000" for host in ours]) == chosen
