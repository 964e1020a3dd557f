"""The policy: packed, padded and one by one agree; tied and untied heads; what cannot be trained is refused."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import save_tiny_model, tiny_tokenizer
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    PreTrainedModel,
    Qwen2Config,
)

from grpo import build, flash4
from grpo.batch import MicroBatch, Sequence, pack
from grpo.model import Policy
from grpo.optimizer import Optimizer


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param, max_length=64)


def sequences(shapes: list[tuple[int, int]] | None = None) -> list[Sequence]:
    draw = torch.Generator().manual_seed(1)
    rows = []
    for p, c in shapes or [(3, 5), (2, 9), (7, 4), (1, 1), (4, 12), (6, 2), (2, 3), (5, 8)]:
        ids = torch.randint(2, 50, (p + c,), generator=draw).tolist()
        old = (-torch.rand(c, generator=draw) * 3).tolist()
        rows.append(Sequence(ids[:p], ids[p:], old, [0] * c, float(torch.randn((), generator=draw)), 1 / 44))
    return rows


def batches(policy: Policy, budget: int, pad_to: int | None = None) -> list[MicroBatch]:
    return pack(sequences(), tokens_per_microbatch=budget, context=policy.context, pad_to=pad_to)


def loss_of(mb: MicroBatch, entropy_weight: float = 0.01) -> Callable[[Tensor, Tensor, slice], Tensor]:
    """The unclipped policy loss with an entropy bonus."""

    def loss(logprobs: Tensor, entropy: Tensor, at: slice) -> Tensor:
        ratio = torch.exp((logprobs - mb.sampler_logprobs_N[at]).clamp(-20, 2))
        return -(mb.weights_N[at] * (ratio * mb.advantages_N[at] + entropy_weight * entropy)).sum()

    return loss


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return found


def plain(model: PreTrainedModel, temperature: float) -> dict[int, tuple[Tensor, Tensor]]:
    """Logprobs and entropy of each completion by transformers alone, one sequence at a time, from full logits."""
    result = {}
    for row, s in enumerate(sequences()):
        logits = model(input_ids=torch.tensor([s.prompt_ids + s.completion_ids]), use_cache=False).logits[0]
        logp = (logits[len(s.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        chosen = logp.gather(1, torch.tensor(s.completion_ids)[:, None]).squeeze(1)
        result[row] = chosen, -(logp.exp() * logp).sum(1)
    return result


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("budget", "pad_to"), [(500, None), (500, 128), (25, None), (25, 16), (1, None)])
def test_packed_padded_and_one_by_one_agree(folder: Path, temperature: float, budget: int, pad_to: int | None) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    expected = plain(model, temperature)
    policy = Policy(folder, dtype="float64")
    seen = []
    for mb in batches(policy, budget, pad_to):
        logprobs_N, entropy_N = policy.logprobs(mb, temperature, entropy_grad=True)
        loss_of(mb)(logprobs_N, entropy_N, slice(None)).backward()
        for place, row in enumerate(mb.rows):
            mine_N = mb.sequence_N == place
            torch.testing.assert_close(logprobs_N[mine_N], expected[row][0], rtol=0, atol=1e-10)
            torch.testing.assert_close(entropy_N[mine_N], expected[row][1], rtol=0, atol=1e-10)
            seen.append(row)
    assert sorted(seen) == list(range(8))
    for row, s in enumerate(sequences()):
        ratio = torch.exp((expected[row][0] - torch.tensor(s.sampler_logprobs)).clamp(-20, 2))
        (-(ratio * s.advantage + 0.01 * expected[row][1]).sum() / 44).backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    ours = gradients(policy)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        # advantages and weights are float32 in a micro-batch, hence 1e-7 and not 1e-15
        assert (gradient - theirs[name]).abs().max() < 1e-6 * theirs[name].abs().max(), name


def test_ignoring_the_temperature_would_be_seen(folder: Path) -> None:
    policy = Policy(folder)
    (mb,) = batches(policy, 500)
    with torch.no_grad():
        tempered, raw = (policy.logprobs(mb, t)[0] for t in (0.6, 1.0))
    assert (tempered - raw).exp().sub(1).abs().max() > 0.1  # case 4 asks for 1e-4


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("block", [None, 4, 13])
def test_backward_equals_logprobs_then_backward(
    folder: Path, by_token: bool, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(folder, dtype="float64")
    values, expected = [], None
    for mb in batches(policy, 40, 8):
        logprobs_N, entropy_N = policy.logprobs(mb, 0.7, entropy_grad=True)
        loss_of(mb)(logprobs_N, entropy_N, slice(None)).backward()
        values.append(torch.stack([logprobs_N, entropy_N]).detach())
    expected = gradients(policy)
    if block:  # 4 rows: sequences of 12 do not fit, so that whole sequences need the other way
        monkeypatch.setattr("grpo.model.block_rows", lambda _: block)
    for mb, value in zip(batches(policy, 40, 8), values, strict=True):
        torch.testing.assert_close(torch.stack(policy.backward(mb, 0.7, loss_of(mb), by_token)), value)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_block_holds_whole_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(folder)
    monkeypatch.setattr("grpo.model.block_rows", lambda _: 13)
    (mb,) = batches(policy, 500)
    cuts = []

    def loss(logprobs: Tensor, entropy: Tensor, at: slice) -> Tensor:
        cuts.append(mb.sequence_N[at].tolist())
        return logprobs.sum()

    policy.backward(mb, 1.0, loss)
    assert len(cuts) > 2
    assert sum(len(set(rows)) for rows in cuts) == mb.num_sequences


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_changes_nothing(folder: Path, checkpointing: Any) -> None:
    results = []
    for choice in ("none", checkpointing):
        policy = Policy(folder, checkpointing=choice)
        for mb in batches(policy, 30):
            policy.backward(mb, 1.0, loss_of(mb))
        results.append(gradients(policy))
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # these two are torch.compile's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_checkpointing_changes_no_sum_of_a_bfloat16_model(folder: Path, checkpointing: Any, compile: bool) -> None:
    torch._dynamo.reset()
    results = []
    for choice in ("none", checkpointing):
        policy = Policy(folder, dtype="bfloat16", checkpointing=choice)
        Optimizer(policy.parameters(), lr=0.0)
        if compile and choice != "none":
            for layer in policy.body.layers:
                layer.compile(backend="aot_eager", dynamic=True)
        for mb in batches(policy, 30):
            policy.backward(mb, 1.0, loss_of(mb))
        assert all(p.grad is None for p in policy.parameters())
        results.append({name: p.main_grad for name, p in policy.model.named_parameters()})
    for name, gradient in results[0].items():
        assert gradient.norm() > 0, name
        assert (gradient - results[1][name]).norm() <= (0.05 if compile else 0.0) * gradient.norm(), name


class Calls(TorchDispatchMode):
    """Counts how often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def test_attention_is_never_computed_again(folder: Path) -> None:
    counts = []
    for choice in ("none", "full"):
        policy = Policy(folder, checkpointing=choice)  # type: ignore[arg-type]
        (mb,) = batches(policy, 500)
        with Calls() as calls:
            policy.backward(mb, 1.0, loss_of(mb))
        counts.append(calls.counts[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default])
    assert counts[0] == counts[1] > 0


def test_full_checkpointing_computes_layers_again(folder: Path) -> None:
    counts = []
    for choice in ("none", "full"):
        policy = Policy(folder, checkpointing=choice)  # type: ignore[arg-type]
        calls = []
        policy.body.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        (mb,) = batches(policy, 500)
        policy.backward(mb, 1.0, loss_of(mb))
        counts.append(len(calls))
    assert counts == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile's own, which it filters itself
def test_ragged_lengths_compile_nothing_after_the_first(folder: Path) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    eager, compiled = Policy(folder, dtype="float64"), Policy(folder, dtype="float64", checkpointing="full")
    for layer in compiled.body.layers:
        layer.compile(backend=counter, dynamic=True)
    counts = []
    for budget in (500, 16, 30, 20, 40):  # 16 has micro-batches of one sequence, which torch.compile treats apart
        for policy in (eager, compiled):
            for mb in batches(policy, budget, 8):
                policy.backward(mb, 1.0, loss_of(mb))
        counts.append(counter.frame_count)
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 4
    ours = gradients(compiled)
    for name, gradient in gradients(eager).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_bfloat16_gradients_meet_in_float32(folder: Path) -> None:
    """With an optimizer the head's gradient goes straight to `main_grad`; without one it lands in `.grad`."""
    policy = Policy(folder, dtype="bfloat16")
    (mb,) = batches(policy, 500)
    policy.backward(mb, 1.0, loss_of(mb))
    plain_grads = {name: gradient.float() for name, gradient in gradients(policy).items()}
    Optimizer(policy.parameters(), lr=0.0)
    policy.backward(mb, 1.0, loss_of(mb))
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is None
        assert parameter.main_grad.dtype == torch.float32
        scale = plain_grads[name].abs().max()
        assert (parameter.main_grad - plain_grads[name]).abs().max() < 0.02 * scale, name


def test_a_micro_batch_without_tokens_touches_every_parameter(folder: Path) -> None:
    policy = Policy(folder)
    (mb,) = pack(sequences()[:1], tokens_per_microbatch=500, context=64, rank=1, ranks=2)
    logprobs_N, _ = policy.logprobs(mb, 1.0)
    logprobs_N.sum().backward()
    found = gradients(policy)
    assert len(found) == len(policy.parameters())
    assert all((gradient == 0).all() for gradient in found.values())


def test_saved_models_load_elsewhere(folder: Path, tmp_path: Path) -> None:
    policy = Policy(folder, dtype="bfloat16", tokenizer=tiny_tokenizer())
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.5)
    policy.save(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config._attn_implementation != "grpo_packed"
    assert "grpo" not in (tmp_path / "saved" / "config.json").read_text()
    assert (tmp_path / "saved" / "tokenizer.json").exists()
    for (name, ours), theirs in zip(policy.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_named_weights_are_those_of_the_saved_file(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    policy = Policy(folder)
    policy.save(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    ours = dict(policy.named_weights())
    assert ours.keys() == saved.keys()
    assert ("lm_head.weight" in ours) != policy.config.tie_word_embeddings
    assert all(torch.equal(ours[name], saved[name]) for name in saved)
    assert {w.dtype for _, w in policy.named_weights(torch.bfloat16)} == {torch.bfloat16}
    assert not any(w.requires_grad for w in ours.values())


def test_facts_about_the_model(folder: Path) -> None:
    policy = Policy(folder, trainable=False)
    assert (policy.context, policy.vocab_size, policy.eos_token_ids, policy.parameters()) == (64, 57, [1], [])
    policy.model.generation_config.eos_token_id = [1, 7]
    assert policy.eos_token_ids == [1, 7]
    (mb,) = batches(policy, 500)
    assert not policy.logprobs(mb, 1.0)[0].requires_grad


def test_dropout_is_off(tmp_path: Path) -> None:
    sizes = {"vocab_size": 57, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = Policy(tmp_path)
    (mb,) = batches(policy, 500)
    assert torch.equal(policy.logprobs(mb, 1.0)[0], policy.logprobs(mb, 1.0)[0])


GEMMA = {"vocab_size": 57, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = {"vocab_size": 57, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
UNSUPPORTED = {
    "gemma2": (Gemma2Config(**GEMMA, **HEADS), "gemma2"),
    "logits scaled (granite)": (GraniteConfig(**SMALL, **HEADS, logits_scaling=8.0), "granite.*logits after the head"),
    "logits scaled (cohere)": (CohereConfig(**SMALL, **HEADS, logit_scale=0.06), "cohere.*logits after the head"),
    "soft-capped logits only": (
        Gemma2Config(**GEMMA, **HEADS, attn_logit_softcapping=None, final_logit_softcapping=3.0),
        "gemma2.*logits after the head",
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", UNSUPPORTED)
def test_models_that_would_be_trained_wrongly_are_refused(case: str, dtype: str, tmp_path: Path) -> None:
    config, message = UNSUPPORTED[case]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        Policy(tmp_path, dtype=dtype)


def test_an_older_model_without_rotary_positions(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=57, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'gpt2' has no list of layers .* model\.checkpointing=none"):
        Policy(tmp_path, checkpointing="full")
    policy = Policy(tmp_path)
    (mb,) = batches(policy, 500)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = plain(model, 1.0)
    with torch.no_grad():
        ours = policy.logprobs(mb, 1.0)[0]
    torch.testing.assert_close(ours, torch.cat([expected[row][0] for row in mb.rows]), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dtype": "float16"}, r"model\.dtype='float16'"), ({"checkpointing": "some"}, r"model\.checkpointing='some'")],
)
def test_mistakes(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(tmp_path, **settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_cuda_equals_the_cpu(folder: Path, dtype: str, compile: bool, checkpointing: Any) -> None:
    torch._dynamo.reset()
    exact, policy = (
        Policy(folder, dtype="float64"),
        Policy(folder, dtype=dtype, device="cuda", compile=compile, checkpointing=checkpointing),
    )
    exact.model.load_state_dict(policy.model.state_dict())  # the same rounded weights
    optimizer = Optimizer(policy.parameters(), lr=0.0, max_grad_norm=0.0)
    largest = 0.0
    for budget in (500, 30):
        exact.model.zero_grad()
        optimizer.zero_grad()
        for cpu, mb in zip(batches(exact, budget), batches(policy, budget, policy.pad_to), strict=True):
            expected = torch.stack(exact.backward(cpu, 0.7, loss_of(cpu)))
            mb = mb.to("cuda")
            largest = max(
                largest, float((torch.stack(policy.backward(mb, 0.7, loss_of(mb))).cpu() - expected).abs().max())
            )
    ours = {name: getattr(p, "main_grad", p.grad) for name, p in policy.model.named_parameters()}
    assert largest < (5e-4 if dtype == "float32" else 1.0)
    for name, gradient in gradients(exact).items():
        assert (ours[name].cpu() - gradient).norm() < (1e-3 if dtype == "float32" else 0.2) * gradient.norm(), name
    assert optimizer.step() > 0


def test_attention_that_cannot_run_here_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.attention=flash4: .*; or set model\.attention=torch"):
        Policy(folder, attention="flash4")


def test_attention_auto_takes_flash4_only_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Namespace(attention="auto", dtype="bfloat16")
    assert build._attention(model, "cpu") == "torch"
    monkeypatch.setattr(flash4, "missing", lambda device, dtype: None)
    assert build._attention(model, "cuda") == "flash4"
    model.attention = "torch"
    assert build._attention(model, "cuda") == "torch"
