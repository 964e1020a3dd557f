"""Starts the real vLLM for tests as a run launches its own. The servers that tests share are in real_servers.py."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from grpo.rollout.flags import vllm_arguments, vllm_environment
from grpo.rollout.server import VLLMServer, free_ports

STARTUP = 240.0  # seconds; a busy machine
CONTEXT = 1024  # tokens


@dataclass(frozen=True)
class RealServer:
    """A server that is ready, and the folder of the model that it was started from."""

    url: str
    model: Path
    tied: bool


def launch(model: Path, *, log: Path, dtype: str = "float32") -> VLLMServer:
    """Start a server as a run would, with room for 256 requests; returns at once."""
    (port,) = free_ports("127.0.0.1", 1)
    arguments = vllm_arguments(
        model=str(model),
        dtype=dtype,
        device="cpu",
        max_model_len=CONTEXT,
        backend="disk",
        host="127.0.0.1",
        port=port,
        max_num_seqs=256,
        gpu_memory=0.9,
        tensor_parallel=1,
        eager=False,
        cpu_kv_gb=0.25,
    )
    environment = vllm_environment(
        dict(os.environ), device="cpu", backend="disk", threads=1, gpus=[], tensor_parallel=1, api_key=None
    )
    command = [sys.executable, "-P", "-m", "grpo.rollout.vllm_main", *arguments]
    server = VLLMServer(command, host="127.0.0.1", port=port, environment=environment, log=log)
    server.launch()
    return server
