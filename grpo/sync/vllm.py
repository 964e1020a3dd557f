"""sync=ipc and sync=nccl: vLLM's own trainer engines behind our order, deadlines and version.

ipc shares the trainer's memory with a server on the same GPU; nccl broadcasts to servers on other GPUs. vLLM's engine
drives start_weight_update, update_weights and finish_weight_update through a client with four methods; ours sends each
to every server at once, with our deadlines, and puts the version into finish. A transfer runs in a thread, because a
collective whose other side has died never returns: the deadline then ends the run, not the thread.

vLLM is imported here, in the trainer's process, so only these two backends pay for it (7 s on a slow core).
"""

import base64
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from grpo.sync.base import Control, Weights, WeightSync

BUFFER = 1 << 30  # bytes of vLLM's packed buffer, its default; more where the largest tensor needs it


class PolicySource(WeightSource):
    """The policy's weights in the serving dtype, cast one by one as they are sent."""

    def __init__(self, policy: Weights, dtype: torch.dtype) -> None:
        self.policy = policy
        self.dtype = dtype

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, self.dtype, tuple(w.shape)) for name, w in self.policy.named_weights()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.policy.named_weights(self.dtype)


class Client:
    """vLLM's `VLLMWeightSyncClient` over the control planes of all servers."""

    def __init__(self, sync: "VLLMSync") -> None:
        self.sync = sync
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Every server is told its own place in the group, where the backend has one."""
        bodies = {
            control.url: {"init_info": self.sync.init_info(init_info, number)}
            for number, control in enumerate(self.sync.controls)
        }
        self._post("/init_weight_transfer_engine", lambda control: bodies[control.url])

    def start_weight_update(self) -> None:
        self.sync.everywhere(self.sync.start)

    def update_weights(self, update_info: Any) -> None:
        body = {"update_info": wire_safe(update_info)}
        self._post("/update_weights", lambda _: body)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version or str(self.version)}
        self._post("/finish_weight_update", lambda _: body)

    def _post(self, path: str, body: Callable[[Control], dict[str, Any] | None]) -> None:
        self.sync.everywhere(lambda c: c.post(path, json=body(c), timeout=self.sync.timeout))


def wire_safe(update_info: dict[str, Any]) -> dict[str, Any]:
    """CUDA handles are no JSON: they go as a pickle, which the server takes from its own trainer only."""
    handles = update_info.get("ipc_handles")
    rest = {key: value for key, value in update_info.items() if key != "ipc_handles" and value is not None}
    if handles is None:
        return rest
    return {**rest, "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode()}


class VLLMSync(WeightSync):
    """What ipc and nccl share."""

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.source = PolicySource(self.policy, self.dtype)
        sizes = [w.numel() * self.dtype.itemsize for _, w in self.policy.named_weights()]
        self.buffer_bytes = max(min(BUFFER, self.bytes), max(sizes))
        self.client = Client(self)
        self.engine: Any = None

    def trainer_init_info(self) -> Any:
        raise NotImplementedError

    def init_info(self, init_info: dict[str, Any], number: int) -> dict[str, Any]:
        """What server `number` is told of vLLM's init info."""
        return init_info

    def attach(self) -> None:
        info = self.trainer_init_info()

        def handshake() -> None:
            if self.engine is not None:  # of a group that has lost a server
                self.engine.shutdown()
            self.engine = WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=self.source)

        self._within("the handshake", handshake)

    def transfer(self, version: int) -> None:
        self.client.version = version

        def send() -> None:
            self._synchronize()  # vLLM reads the weights on streams of its own: the optimizer's step must be over
            with torch.no_grad():
                self.engine.send_weights()
            self._synchronize()

        self._within(f"the transfer of version {version}", send)

    def close(self) -> None:
        super().close()
        if self.engine is not None:
            self.engine.shutdown()

    def world_sizes(self) -> list[int]:
        """Workers (GPUs) of each server."""
        return [int(c.get("/get_world_size", timeout=self.timeout)["world_size"]) for c in self.controls]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _within(self, what: str, work: Callable[[], None]) -> None:
        """Run in a thread with a deadline; its error is raised here."""
        failure: list[BaseException] = []

        def run() -> None:
            try:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)  # the current device belongs to a thread
                work()
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="weight-transfer", daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            raise TimeoutError(f"sync={self.backend}: {what} did not end within sync.timeout={self.timeout:g} s")
        if failure:
            raise failure[0]


class IPCSync(VLLMSync):
    """Trainer and server on one GPU: a handle is opened by one process, so there is one server of one worker."""

    backend = "ipc"

    def trainer_init_info(self) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        if self.world_sizes() != [1]:
            raise ValueError(
                f"sync=ipc: one server of one GPU shares the trainer's; there are {len(self.controls)} servers with "
                f"{self.world_sizes()} GPUs; use sync=nccl or sync=disk"
            )
        return IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=self.buffer_bytes)


class NCCLSync(VLLMSync):
    """One group: the trainer is rank 0, then every worker of the first server, of the second, ..."""

    backend = "nccl"
    offsets: list[int]

    def trainer_init_info(self) -> Any:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        sizes = self.world_sizes()
        self.offsets = [1 + sum(sizes[:number]) for number in range(len(sizes))]
        address = our_address([c.url for c in self.controls])
        return NCCLTrainerInitInfo(
            master_address=address,
            master_port=free_port(address),
            world_size=1 + sum(sizes),
            packed=True,
            packed_buffer_size_bytes=self.buffer_bytes,
            rank=0,
        )

    def init_info(self, init_info: dict[str, Any], number: int) -> dict[str, Any]:
        return {**init_info, "rank_offset": self.offsets[number]}


def our_address(urls: list[str]) -> str:
    """Our address as all the servers can reach it: 127.0.0.1 only where they are all on this machine."""
    addresses = []
    for url in urls:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((urlsplit(url).hostname or "", 9))  # chooses a route and sends nothing
            addresses.append(str(probe.getsockname()[0]))
    return next((a for a in addresses if not a.startswith("127.")), addresses[0])


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
