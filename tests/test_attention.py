"""Packed attention equals plain transformers run on one sequence at a time: values and gradients, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo.attention import NAME, packed_attention, packing

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen2": Qwen2Config(**SIZES, num_key_value_heads=4),
    # Layers that see four tokens back: the sequences below are longer and shorter than that.
    "mistral window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4),
    "qwen3 mixed": Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
}
LENGTHS = [7, 1, 3, 12, 4]


def model(config: PreTrainedConfig, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = copy.deepcopy(config)  # it remembers its implementation, and models share it
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=implementation).eval()


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_equals_one_by_one(kind: str) -> None:
    ids = [torch.randint(61, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    plain = model(CONFIGS[kind], "sdpa")  # "eager" takes its softmax in float32
    packed = model(CONFIGS[kind], NAME)
    weights = torch.randn(sum(LENGTHS), 61, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one_by_one = torch.cat([plain(input_ids=x, use_cache=False).logits[0] for x in ids])
    together = packed(
        input_ids=torch.cat(ids, 1),
        position_ids=torch.cat([torch.arange(n) for n in LENGTHS])[None],
        use_cache=False,
        **packing(borders(LENGTHS), max(LENGTHS), torch.float64),
    ).logits[0]
    torch.testing.assert_close(together, one_by_one, rtol=0, atol=1e-10)
    (one_by_one * weights).sum().backward()
    (together * weights).sum().backward()
    expected = gradients(plain)
    assert len(expected) > 10
    for name, gradient in gradients(packed).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_nothing_leaks_between_sequences() -> None:
    packed = model(CONFIGS["llama"], NAME).get_input_embeddings()
    hidden = packed(torch.arange(10)[None])
    body = model(CONFIGS["llama"], NAME).model

    def run(inputs: Tensor) -> Tensor:
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
        arguments = packing(borders([4, 6]), 6, torch.float64)
        return body(inputs_embeds=inputs, position_ids=positions, use_cache=False, **arguments).last_hidden_state

    before = run(hidden)
    changed = hidden.clone()
    changed[0, 4:7] += 100.0  # the second sequence's first three tokens
    after = run(changed)
    assert torch.equal(after[0, :4], before[0, :4])
    assert not torch.isclose(after[0, 4:], before[0, 4:]).all(1).any()


class Layer(nn.Module):
    is_causal = True


def attend(**changes: Any) -> Tensor:
    q = torch.ones(1, 2, 5, 8)
    arguments = {"scaling": None, **packing(borders([5]), 5, torch.float32), **changes}
    return packed_attention(Layer(), q, q, q, None, **arguments)[0]


def test_shape_is_what_transformers_expects() -> None:
    assert attend().shape == (1, 5, 2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": 30.0}, "Layer uses soft-capping"),
        ({"s_aux": torch.zeros(2)}, "Layer uses attention sinks"),
        ({"position_bias": torch.zeros(1)}, "Layer uses a position bias"),
        ({"is_causal": False}, "Layer is not causal"),
        ({"packed_gather_BL": None}, "Layer does not hand the sequences' borders"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**changes)
