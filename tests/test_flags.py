"""Flags and environment of launched servers."""

import json
from pathlib import Path
from typing import Any

import pytest

from grpo.rollout.flags import gpus_of_servers, server_threads, vllm_arguments, vllm_environment


def arguments(**changed: Any) -> list[str]:
    options: dict[str, Any] = {
        "model": "DIR",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 96,
        "backend": "disk",
        "host": "127.0.0.1",
        "port": 8001,
        "max_num_seqs": 256,
        "gpu_memory": 0.3,
        "tensor_parallel": 1,
        "eager": False,
        "cpu_kv_gb": 0.5,
    }
    return vllm_arguments(**(options | changed))


def value(flags: list[str], name: str) -> str:
    assert flags.count(name) == 1
    return flags[flags.index(name) + 1]


def test_what_is_sampled_is_what_is_reported() -> None:
    """Law 4: no defaults from the model's folder, logprobs of the distribution that was sampled, tokens in and out."""
    for flags in (arguments(), arguments(device="cuda")):
        assert value(flags, "--logprobs-mode") == "processed_logprobs"
        assert value(flags, "--generation-config") == "vllm"
        assert "--enable-scale-out" in flags


def test_flags_of_a_cpu_server() -> None:
    flags = arguments()
    assert value(flags, "--kv-cache-memory-bytes") == str(2**29)
    assert "--enforce-eager" in flags
    assert "--no-enable-chunked-prefill" in flags
    assert "--gpu-memory-utilization" not in flags
    assert json.loads(value(flags, "--weight-transfer-config")) == {"backend": "grpo_disk"}
    assert value(flags, "--max-num-seqs") == "256"
    assert value(flags, "--max-model-len") == "96"


def test_flags_of_a_gpu_server() -> None:
    flags = arguments(device="cuda", backend="ipc", dtype="bfloat16", tensor_parallel=2)
    assert value(flags, "--gpu-memory-utilization") == "0.3"
    assert value(flags, "--tensor-parallel-size") == "2"
    assert value(flags, "--dtype") == "bfloat16"
    assert json.loads(value(flags, "--weight-transfer-config")) == {"backend": "ipc"}
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--no-enable-chunked-prefill"} & set(flags)
    assert "--enforce-eager" in arguments(device="cuda", eager=True)


def test_extra_arguments_come_last() -> None:
    assert arguments(extra=["--seed", "5"])[-2:] == ["--seed", "5"]


def environment(inherited: dict[str, str], **changed: Any) -> dict[str, str]:
    options: dict[str, Any] = {
        "device": "cpu",
        "backend": "disk",
        "threads": 3,
        "gpus": [],
        "tensor_parallel": 1,
        "api_key": None,
    }
    return vllm_environment(inherited, **(options | changed))


def test_the_compile_cache_is_where_the_run_or_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment({"VLLM_CACHE_ROOT": "/mine"})["VLLM_CACHE_ROOT"] == "/mine"
    assert "VLLM_CACHE_ROOT" not in environment({})
    both = environment({"VLLM_CACHE_ROOT": "/mine"}, compile_cache="cache")
    assert both["VLLM_CACHE_ROOT"] == str(tmp_path / "cache"), "the server may run in another folder"


def test_the_users_environment_is_kept() -> None:
    kept = {"HF_HUB_OFFLINE": "1", "NCCL_SOCKET_IFNAME": "eth1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PATH": "/bin"}
    assert kept.items() <= environment(kept).items()


def test_torchrun_means_the_trainer_and_not_the_server() -> None:
    assert (
        not {"RANK", "WORLD_SIZE", "MASTER_ADDR"}
        & environment({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}).keys()
    )


def test_a_cpu_server_leaves_the_trainer_its_cores() -> None:
    env = environment({"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "40"})
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env["TORCH_COMPILE_DISABLE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment({}, tensor_parallel=2)
    assert [server_threads(cores, servers) for cores, servers in ((1, 1), (2, 1), (2, 2), (16, 1), (16, 3))] == [
        1,
        1,
        1,
        8,
        2,
    ]


def test_pickles_are_taken_for_ipc_only() -> None:
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment({})
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment({}, device="cuda", gpus=[1], backend="nccl")
    assert environment({}, device="cuda", gpus=[0], backend="ipc")["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


def test_the_key_is_no_flag() -> None:
    assert environment({}, api_key="secret")["VLLM_API_KEY"] == "secret"
    assert "VLLM_API_KEY" not in environment({})


def test_gpus_are_counted_among_those_the_run_may_use() -> None:
    assert environment({}, device="cuda", gpus=[1, 2])["CUDA_VISIBLE_DEVICES"] == "1,2"
    inherited = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-7f"}
    assert environment(inherited, device="cuda", gpus=[0, 2])["CUDA_VISIBLE_DEVICES"] == "4,GPU-7f"


def test_our_plugin_is_loaded_where_the_user_names_some() -> None:
    assert environment({"VLLM_PLUGINS": "mine"})["VLLM_PLUGINS"] == "mine,grpo"
    assert environment({"VLLM_PLUGINS": "grpo,mine"})["VLLM_PLUGINS"] == "grpo,mine"
    assert "VLLM_PLUGINS" not in environment({})


@pytest.mark.parametrize(
    ("device", "available", "backend", "servers", "tensor_parallel", "trainers", "expected"),
    [
        ("cuda", 1, "ipc", 1, 1, 1, ([[0]], True)),
        ("cuda:2", 4, "ipc", 1, 1, 1, ([[2]], True)),
        ("cuda", 2, "nccl", 1, 1, 1, ([[1]], False)),
        ("cuda:1", 4, "nccl", 3, 1, 1, ([[0], [2], [3]], False)),
        ("cuda", 8, "nccl", 2, 2, 4, ([[4, 5], [6, 7]], False)),
        ("cuda", 1, "disk", 1, 1, 1, ([[0]], True)),
        ("cuda", 2, "disk", 1, 1, 1, ([[1]], False)),
    ],
)
def test_gpus_of_servers(
    device: str, available: int, backend: str, servers: int, tensor_parallel: int, trainers: int, expected: Any
) -> None:
    assert expected == gpus_of_servers(
        device=device,
        available=available,
        backend=backend,
        servers=servers,
        tensor_parallel=tensor_parallel,
        trainers=trainers,
    )


def test_too_few_gpus_are_said() -> None:
    with pytest.raises(ValueError, match=r"rollout\.servers=2 x rollout\.tensor_parallel=2 needs 4 .*are 3 of .* 4"):
        gpus_of_servers(device="cuda", available=4, backend="nccl", servers=2, tensor_parallel=2, trainers=1)
    with pytest.raises(ValueError, match=r"rollout\.servers=2 .*sync=ipc takes the trainer's own"):
        gpus_of_servers(device="cuda", available=4, backend="ipc", servers=2, tensor_parallel=1, trainers=1)
