"""Flags and environment of a launched vLLM server, as pure functions of what the run needs.

Why each is there is said beside it.

Law 4 lives here for the server's side: processed logprobs, and no sampling defaults from the model's folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from grpo.sync import server_backend

# Set by torchrun for the trainer's ranks; vLLM reads some of them as its own.
TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)


def vllm_arguments(
    *,
    model: str,
    dtype: str,
    device: str,
    max_model_len: int,
    backend: str,
    host: str,
    port: int,
    max_num_seqs: int,
    gpu_memory: float,
    tensor_parallel: int,
    eager: bool,
    cpu_kv_gb: float,
    extra: Sequence[str] = (),
) -> list[str]:
    """What follows `python -m grpo.rollout.vllm_main`. backend: disk, ipc or nccl. extra comes last, so it wins."""
    cpu = device == "cpu"
    arguments = {
        "--model": model,
        "--dtype": dtype,
        "--max-model-len": str(max_model_len),
        "--max-num-seqs": str(max_num_seqs),  # what the loader keeps open, runs
        "--logprobs-mode": "processed_logprobs",  # of the distribution that was sampled (law 4)
        "--generation-config": "vllm",  # no repetition_penalty or top_k from the model's folder (law 4)
        "--weight-transfer-config": json.dumps({"backend": server_backend(backend)}),
        "--host": host,
        "--port": str(port),
        "--tensor-parallel-size": str(tensor_parallel),
    }
    if cpu:
        arguments["--kv-cache-memory-bytes"] = str(int(cpu_kv_gb * 2**30))
    else:
        arguments["--gpu-memory-utilization"] = str(gpu_memory)
    flat = [word for pair in arguments.items() for word in pair]
    flat.append("--enable-scale-out")  # /inference/v1/generate answers 403 without it
    flat.append("--disable-uvicorn-access-log")  # a line for each completion
    if cpu:
        # A prompt in parts makes vLLM 0.32 step a request's random generator back, which ends the engine on a CPU
        # ("CPU Generator does not use offset"). It would come at a sync: kept requests are computed again, all at once.
        flat.append("--no-enable-chunked-prefill")
    if cpu or eager:
        flat.append("--enforce-eager")
    return [*flat, *extra]


def vllm_environment(
    inherited: dict[str, str],
    *,
    device: str,
    backend: str,
    threads: int,
    gpus: Sequence[int],
    tensor_parallel: int,
    api_key: str | None,
    compile_cache: str | None = None,
) -> dict[str, str]:
    """The server's environment: the run's own (HF_*, NCCL_*, VLLM_* are kept) and what is needed besides.

    threads: OpenMP threads of a CPU server. gpus: indices among those that the run may use. compile_cache: the folder
    of what vLLM compiles and tunes; None leaves it where the environment or vLLM has it (~/.cache/vllm).
    """
    environment = {k: v for k, v in inherited.items() if k not in TORCHRUN}
    environment |= {
        "VLLM_SERVER_DEV_MODE": "1",  # the control calls of a weight sync
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONUNBUFFERED": "1",  # the log is complete when it dies
    }
    if "VLLM_PLUGINS" in inherited and "grpo" not in inherited["VLLM_PLUGINS"].split(","):
        environment["VLLM_PLUGINS"] = f"{inherited['VLLM_PLUGINS']},grpo"
    if api_key is not None:
        environment["VLLM_API_KEY"] = api_key  # not a flag: those are seen by every user, and logged
    if compile_cache is not None:
        environment["VLLM_CACHE_ROOT"] = str(Path(compile_cache).expanduser().absolute())
    if backend == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # unpickles our IPC handles, and what else is sent
    if device == "cpu":
        environment["OMP_NUM_THREADS"] = str(threads)
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # binding would take the trainer's cores
        # vLLM compiles a small sampling function even with --enforce-eager: 4 to 6 s of the first request, and a C++
        # compiler that the machine may not have.
        environment["TORCH_COMPILE_DISABLE"] = "1"
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # wins over --kv-cache-memory-bytes
        if tensor_parallel == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the worker within the engine's process: vllm_main
    else:
        visible = inherited.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else None
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[g] if names else str(g) for g in gpus)
    return environment


def server_threads(cores: int, servers: int) -> int:
    """Threads of each CPU server. Trainer and servers work at the same time: the trainer has half of the cores."""
    return max(1, (cores - max(1, cores // 2)) // servers)


def gpus_of_servers(
    *, device: str, available: int, backend: str, servers: int, tensor_parallel: int, trainers: int
) -> tuple[list[list[int]], bool]:
    """(GPU indices of each server, whether they are the trainer's too).

    device: the trainer's, cuda or cuda:<index>. trainers: its processes on this machine; with more than one, process r
    is on GPU r. ipc shares the trainer's GPUs, nccl never does, disk takes others where there are enough.
    Raises ValueError when there are too few.
    """
    first = int(device.partition(":")[2] or 0)
    training = [first] if trainers == 1 else list(range(trainers))
    free = [g for g in range(available) if g not in training]
    needed = servers * tensor_parallel
    shared = backend == "ipc" or (backend == "disk" and len(free) < needed)
    pool = training if shared else free
    if len(pool) < needed:
        which = "the trainer's own" if shared else f"besides the trainer's {len(training)}"
        raise ValueError(
            f"rollout.servers={servers} x rollout.tensor_parallel={tensor_parallel} needs {needed} GPUs; "
            f"sync={backend} takes {which}, which are {len(pool)} of this machine's {available}"
        )
    return [pool[i * tensor_parallel : (i + 1) * tensor_parallel] for i in range(servers)], shared


def visible_gpus() -> int:
    """GPUs that this process may use."""
    import torch

    return torch.cuda.device_count()
