"""The memory plan against what was measured on an H200 at Qwen3-4B's shape (benchmarks/NOTES.md), and its limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, Qwen3Config

from grpo.budget import Budget, budget, plan_memory, shape_of
from grpo.settings import Model, Rollout

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
MODEL = Model(
    path="somewhere",
    dtype="bfloat16",
    device="auto",
    optimizer="adamw",
    lr=1e-6,
    weight_decay=0.0,
    betas=[0.9, 0.999],
    warmup_steps=0,
    schedule="constant",
    checkpointing="full",
    attention="torch",
    compile="auto",
    server_memory=0.3,
)
H200 = 150.8
ROOT = Path(__file__).parent.parent


def plan(checkpointing: str = "full", microbatch: int = 16_384, *, card: float = H200, ranks: int = 1) -> Budget:
    shape = shape_of(QWEN3_4B)
    assert shape is not None
    model = replace(MODEL, checkpointing=checkpointing)
    return budget(shape, model, microbatch=microbatch, reference=False, server_share=0.3, card=card, ranks=ranks)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    small = {**QWEN3_4B, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500, "tie_word_embeddings": tied}
    shape = shape_of(small)
    assert shape is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**small))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.parameters == matrices


def test_exact_parts_of_qwen3_4b() -> None:
    parts = plan()
    assert parts.weights == pytest.approx(8.04, abs=0.01)
    assert parts.gradients == pytest.approx(16.09, abs=0.01)
    assert parts.optimizer == pytest.approx(48.27, abs=0.02)
    assert parts.server == pytest.approx(0.3 * H200)
    assert parts.fixed == pytest.approx(parts.weights + parts.gradients + parts.optimizer + parts.server)


@pytest.mark.parametrize(
    ("checkpointing", "microbatch", "measured"),
    [("none", 8192, 33.7), ("selective", 4096, 5.5), ("full", 16_384, 11.4)],
)
def test_activations_are_near_what_was_measured(checkpointing: str, microbatch: int, measured: float) -> None:
    assert plan(checkpointing, microbatch).activations == pytest.approx(measured, rel=0.15)


def test_less_state_with_bfloat16_moments_and_a_reference_costs_its_weights() -> None:
    shape = shape_of(QWEN3_4B)
    assert shape is not None
    model = replace(MODEL, optimizer="adamw_bf16")
    parts = budget(shape, model, microbatch=1, reference=True, server_share=0.0, card=H200)
    assert plan().optimizer - parts.optimizer == pytest.approx(4 * shape.parameters / 1e9)
    assert parts.reference == parts.weights
    assert parts.server == 0.0
    assert "reference 8.0" in parts.line()
    assert "server" not in parts.line()


@pytest.mark.parametrize("targets", ["all-linear", "o_proj", ["k_proj", "down_proj"]])
def test_with_lora_only_adapters_have_gradients_and_state(targets: str | list[str]) -> None:
    shape = shape_of(QWEN3_4B)
    assert shape is not None
    model = replace(MODEL, lora_rank=16, lora_targets=targets)
    parts = budget(shape, model, microbatch=1, reference=True, server_share=0.0, card=H200)
    # in + out of Qwen3-4B's layers: 2560 hidden, 4096 queries, 1024 keys, 9728 in the MLP
    widths = {"q_proj": 6656, "k_proj": 3584, "v_proj": 3584, "o_proj": 6656}
    widths |= {"gate_proj": 12_288, "up_proj": 12_288, "down_proj": 12_288}
    chosen = widths if targets == "all-linear" else [targets] if isinstance(targets, str) else targets
    adapters = 36 * 16 * sum(widths[name] for name in chosen) / 1e9
    assert parts.gradients == pytest.approx(4 * adapters)
    assert parts.optimizer == pytest.approx(12 * adapters)
    assert parts.weights == pytest.approx(2 * (shape.parameters / 1e9 + adapters))
    assert parts.reference == 0.0


def test_ranks_share_the_state_but_not_the_activations() -> None:
    one, four = plan(), plan(ranks=4)
    assert four.optimizer == pytest.approx(one.optimizer / 4)
    assert four.activations == one.activations
    # Qwen3-4B's layer has 100.9 M parameters, its tied embedding 389 M: gathered in bfloat16, besides the shards.
    assert four.weights == pytest.approx(2 * (0.3890 + 2 * 0.1009), abs=0.001)
    assert four.gradients == pytest.approx(one.gradients / 4 + four.weights)
    shape = shape_of(QWEN3_4B)
    assert shape is not None
    model = replace(MODEL, dtype="float32")
    wide = budget(shape, model, microbatch=1, reference=False, server_share=0.0, card=H200, ranks=4)
    assert wide.weights == pytest.approx(4 * shape.parameters / 4e9 + 2 * four.weights)  # masters and weights are one


def test_what_cannot_fit_is_refused_and_what_may_not_is_said() -> None:
    plan().check(MODEL)
    assert "TIGHT" not in plan().line()
    tight = plan(card=118.0)
    tight.check(MODEL)
    assert tight.line().endswith("TIGHT, activations may not fit")
    with pytest.raises(ValueError, match=r"model.optimizer=adamw: .* 72 GB .*server 24 GB, the GPU has 80 GB; use"):
        plan(card=80.0).check(MODEL)


@pytest.mark.parametrize("config", [{}, {**QWEN3_4B, "num_experts": 8}, {**QWEN3_4B, "num_attention_heads": 0}])
def test_other_shapes_are_not_guessed_at(config: dict[str, object]) -> None:
    assert shape_of(config) is None


@pytest.fixture
def rollout() -> Rollout:
    settings: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/rollout/vllm.yaml"))  # type: ignore[assignment]
    del settings["_target_"]
    return Rollout(**{**settings, "api_key": None})


def test_no_plan_on_a_cpu(rollout: Rollout) -> None:
    assert plan_memory(QWEN3_4B, MODEL, rollout, microbatch=1, reference=False, device="cpu", backend="disk") is None


@pytest.mark.parametrize(
    ("gpus", "backend", "changes", "share"),
    [
        (1, "ipc", {}, 0.3),
        (1, "ipc", {"gpu_memory": 0.2}, 0.2),
        (1, "disk", {}, 0.3),
        (2, "disk", {}, 0.0),
        (2, "nccl", {}, 0.0),
        (1, "ipc", {"urls": ["http://127.0.0.1:8000"]}, 0.0),
    ],
)
def test_the_server_counts_where_it_shares_the_gpu(
    monkeypatch: pytest.MonkeyPatch, rollout: Rollout, gpus: int, backend: str, changes: dict[str, Any], share: float
) -> None:
    class Card:
        total_memory = H200 * 1e9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parts = plan_memory(
        QWEN3_4B, MODEL, replace(rollout, **changes), microbatch=1, reference=False, device="cuda", backend=backend
    )
    assert parts is not None
    assert parts.server == pytest.approx(share * H200)
