"""Packed attention equals plain transformers run on one sequence at a time: values and gradients, in float64."""

import copy
import importlib.util
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

from grpo import attention, flash4
from grpo.attention import KERNELS, NAME, implementation, packed_attention, packing

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


def reference_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    left: int,
    scale: float,
) -> Tensor:
    """Attention by its definition: a loop over sequences, a mask of who sees whom, key heads shared by groups."""
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        assert b - a <= max_q
        back = torch.arange(b - a)[:, None] - torch.arange(b - a)
        seen = (back >= 0) & (back <= left if left >= 0 else back >= 0)
        for head in range(query.shape[1]):
            scores = query[a:b, head] @ key[a:b, head // group].T * scale
            out[a:b, head] = scores.masked_fill(~seen, -torch.inf).softmax(1) @ value[a:b, head // group]
    return out


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("grouped", [{"enable_gqa": True}, {}])  # torch 2.12 and later; 2.11
def test_the_kernel_is_called_as_its_torch_wants(
    grouped: dict[str, bool], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **given: Any
    ) -> Tensor:
        scale, (left, right) = given.pop("scale"), given.pop("window_size")  # the window counts what lies to the left
        assert given == grouped
        assert right == 0
        return reference_varlen(q, k, v, cu_q, cu_k, max_q, max_k, left, scale)

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, sum(LENGTHS), 8, dtype=torch.float64, generator=draw)
    k, v = torch.randn(2, 1, 2, sum(LENGTHS), 8, dtype=torch.float64, generator=draw)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_GROUPED", grouped)
    given = {"scaling": 0.3, "sliding_window": window}
    on_gpu = {"cu_seq_lens_q": borders(LENGTHS), "max_length_q": 16}
    through_kernel, _ = packed_attention(Layer(), q, k, v, None, **given, **on_gpu)
    through_rows, _ = packed_attention(Layer(), q, k, v, None, **given, **packing(borders(LENGTHS), 12, torch.float64))
    torch.testing.assert_close(through_kernel, through_rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_another_kernel_gets_the_same_arguments(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float, left: int) -> Tensor:
        return reference_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, left, scale)

    draw = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, sum(LENGTHS), 8, dtype=torch.float64, generator=draw)
    k, v = torch.randn(2, 1, 2, sum(LENGTHS), 8, dtype=torch.float64, generator=draw)
    given = {"scaling": 0.3, "sliding_window": window}
    on_gpu = {"cu_seq_lens_q": borders(LENGTHS), "max_length_q": 16, "kernel": kernel}
    through_kernel, _ = packed_attention(Layer(), q, k, v, None, **given, **on_gpu)
    through_rows, _ = packed_attention(Layer(), q, k, v, None, **given, **packing(borders(LENGTHS), 12, torch.float64))
    torch.testing.assert_close(through_kernel, through_rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "said"),
    [
        ("cpu", torch.bfloat16, (9, 0), "needs a GPU, and the model is on cpu"),
        ("cuda", torch.float32, (9, 0), "model.dtype=float32"),
        ("cuda", torch.bfloat16, (8, 6), "this GPU has 8.6"),
        ("cuda", torch.bfloat16, (9, 0), "pip install flash-attn-4"),
    ],
)
def test_where_flash4_cannot_run_is_said(
    device: str, dtype: torch.dtype, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert said in str(flash4.missing(torch.device(device), dtype))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert flash4.missing(torch.device("cuda"), torch.bfloat16) is None or capability < (9, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore")  # of the DSL that flash4 is written in
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_cuda_packed_equals_alone_and_float64(kind: str, kernel: str) -> None:
    if kernel == "flash4" and (reason := flash4.missing(torch.device("cuda"), torch.bfloat16)):
        pytest.skip(reason)
    config = copy.deepcopy(CONFIGS[kind])
    config.head_dim = 64
    torch.manual_seed(0)
    narrow = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=implementation(kernel))
    narrow = narrow.cuda().eval()
    exact = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    exact.load_state_dict(narrow.state_dict())
    ids = [torch.randint(61, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]

    def run(rows: list[Tensor]) -> Tensor:
        lengths = [row.shape[1] for row in rows]
        arguments = packing(borders(lengths).cuda(), max(lengths), torch.bfloat16)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
        return narrow(input_ids=torch.cat(rows, 1).cuda(), position_ids=positions, use_cache=False, **arguments).logits[
            0
        ]

    together = run(ids)
    alone = torch.cat([run([row]) for row in ids])
    expected = torch.cat([exact(input_ids=row, use_cache=False).logits[0] for row in ids])
    assert (together.cpu() - expected).norm() < 0.05 * expected.norm()
    assert (together - alone).norm() < 0.02 * alone.norm()
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (together * weights.cuda().bfloat16()).sum().backward()
    (expected * weights).sum().backward()
    theirs = gradients(exact)
    for name, gradient in gradients(narrow).items():
        assert (gradient.cpu() - theirs[name]).norm() < 0.2 * theirs[name].norm(), name
