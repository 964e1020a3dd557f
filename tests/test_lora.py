"""LoRA: adapters alone are trained, whole merged weights are served and saved, and a run goes on from both."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_model import batches, gradients, loss_of, plain
from test_shared_prompts import computed
from tiny import save_tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.checkpoint import Checkpoints, Damaged, Progress, inspect, load
from grpo.lora import LoRAPolicy
from grpo.model import Policy
from grpo.optimizer import Optimizer

MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param, max_length=64)


def made(folder: Path, *, moved: bool = True, rank: int = 3, **settings: Any) -> LoRAPolicy:
    """moved: with adapters that do something, as after a while of training."""
    policy = LoRAPolicy(folder, **{"rank": rank, "alpha": 6.0, "targets": "all-linear", **settings})
    if moved:
        draw = torch.Generator().manual_seed(3)
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.data.copy_(noise / parameter.shape[1] ** 0.5)
    return policy


def merged_by_hand(folder: Path, policy: LoRAPolicy) -> Any:
    """transformers' model with W + (alpha / rank) B A, float64, from the names alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    found = dict(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in found:
            down, up = (found[f"{stem}.lora_{x}.weight"].detach().double() for x in "AB")
            parameter.data += 6.0 / down.shape[0] * up @ down
    return model


def values(policy: Any) -> Tensor:
    with torch.no_grad():
        return torch.cat([policy.logprobs(mb, 0.7)[0] for mb in batches(policy, 500)])


def trained(policy: Policy, steps: int = 2, optimizer: Optimizer | None = None) -> Optimizer:
    optimizer = optimizer or Optimizer(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        for mb in batches(policy, 30):
            policy.backward(mb, 1.0, loss_of(mb))
        optimizer.step()
    return optimizer


# ---- what is computed ----


def test_it_begins_as_the_model_itself(folder: Path) -> None:
    policy = made(folder, moved=False)
    assert torch.equal(values(policy), values(Policy(folder)))
    assert all(torch.equal(w, v) for (_, w), (_, v) in same_names(policy, Policy(folder)))


def same_names(one: Policy, other: Policy, dtype: torch.dtype = torch.float32) -> Any:
    """Pairs of weights, of equal names in equal order."""
    ours, theirs = list(one.named_weights(dtype)), list(other.named_weights(dtype))
    assert [(n, w.shape, w.dtype) for n, w in ours] == [(n, w.shape, w.dtype) for n, w in theirs]
    return zip(ours, theirs, strict=True)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_logprobs_and_gradients_are_those_of_the_merged_model(folder: Path, checkpointing: str) -> None:
    policy = made(folder, dtype="float64", checkpointing=checkpointing)
    reference = merged_by_hand(folder, policy)
    expected, (mb,) = plain(reference, 0.7), batches(policy, 500)
    logprobs_N = policy.logprobs(mb, 0.7)[0]
    for place, row in enumerate(mb.rows):
        torch.testing.assert_close(logprobs_N[mb.sequence_N == place], expected[row][0], rtol=0, atol=1e-10)
    assert (values(policy) - values(Policy(folder, dtype="float64"))).abs().max() > 0.1  # the adapters do something
    policy.backward(mb, 0.7, loss_of(mb))
    # The merged matrix's gradient G gives those of its factors: s B^T G and s G A^T.
    entropy = torch.cat([expected[row][1] for row in mb.rows])
    loss_of(mb)(torch.cat([expected[row][0] for row in mb.rows]), entropy, slice(None)).backward()
    whole = {name: p.grad for name, p in reference.named_parameters()}
    ours, weights = gradients(policy), dict(policy.model.named_parameters())
    assert len(ours) == 2 * len(MATRICES) * 2  # two layers
    for name, gradient in ours.items():
        stem, _, kind = name.removesuffix(".weight").rpartition(".lora_")
        down, up = (weights[f"{stem}.lora_{x}.weight"].detach() for x in "AB")
        grad = whole[f"{stem}.weight"]
        theirs = 2.0 * (up.T @ grad if kind == "A" else grad @ down.T)
        assert (gradient - theirs).abs().max() < 1e-6 * theirs.abs().max(), name


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # these two are torch.compile's own
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_sums_of_bfloat16_adapters_are_float32_compiled_or_not(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, tied=True, max_length=64)  # once, and one layer: compiling is slow
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        checkpointing = "full" if compiled else "none"
        policy = made(folder, dtype="bfloat16", checkpointing=checkpointing, targets=["q_proj", "down_proj"])
        Optimizer(policy.parameters(), lr=0.0)
        if compiled:
            policy.body.layers[0].compile(backend="aot_eager", dynamic=True)
        for mb in batches(policy, 30):
            policy.backward(mb, 1.0, loss_of(mb))
        assert all(p.grad is None for p in policy.model.parameters())
        results.append({n: p.main_grad for n, p in policy.model.named_parameters() if p.requires_grad})
    for name, gradient in results[0].items():
        assert gradient.dtype == torch.float32
        assert gradient.norm() > 0, name
        assert (gradient - results[1][name]).norm() <= 0.05 * gradient.norm(), name


def test_a_prompt_that_is_shared_is_seen_with_its_adapters(folder: Path) -> None:
    policy = made(folder, dtype="float64")
    policy.check_shared_prompts()
    (alone, expected), (shared, gradients) = (computed(policy, 500, share, None) for share in (False, True))
    for row, values in shared.items():
        torch.testing.assert_close(values, alone[row], rtol=0, atol=1e-10)
    assert gradients.keys() == expected.keys() == {n for n, p in policy.model.named_parameters() if p.requires_grad}
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 1e-6 * expected[name].abs().max(), name


def test_steps_move_the_adapters_alone(folder: Path) -> None:
    policy = made(folder, moved=False)
    start = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    optimizer = trained(policy)
    assert {id(p) for p in optimizer.parameters} == {id(p) for p in policy.parameters()}
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, start[name]) != (".lora_" in name), name


def test_the_reference_is_the_base_for_nothing(folder: Path) -> None:
    policy = made(folder)
    before = values(policy)
    assert torch.equal(values_of_base(policy), values(Policy(folder, trainable=False)))
    assert torch.equal(values(policy), before)
    assert all(p.requires_grad for p in policy.parameters())
    assert len(policy.parameters()) == 28


def values_of_base(policy: LoRAPolicy) -> Tensor:
    base = policy.base()
    with torch.no_grad():
        return torch.cat([base.logprobs(mb, 0.7)[0] for mb in batches(policy, 500)])


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj", "down_proj"], "all-linear", "o_proj"])
def test_the_targets_get_an_adapter_and_nothing_else_does(folder: Path, targets: Any) -> None:
    policy = made(folder, moved=False, targets=targets)
    names = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    asked = {targets} - {"all-linear"} or MATRICES if isinstance(targets, str) else set(targets)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == asked
    assert len(names) == 2 * 2 * len(asked)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "c_attn", "proj"])
def test_a_target_that_is_not_there_is_refused_by_name(folder: Path, target: str) -> None:
    message = rf"^model.lora_targets=\['q_proj', '{target}'\]: .* called '{target}' .*there are down_proj, .*, or all-l"
    with pytest.raises(ValueError, match=message):
        made(folder, targets=["q_proj", target])


# ---- what is served ----


@pytest.mark.parametrize(
    ("dtype", "asked"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_merged_weights_are_added_up_wide_and_rounded_once(folder: Path, dtype: str, asked: str) -> None:
    policy = made(folder, dtype=dtype)
    base, served = Policy(folder, dtype=dtype), getattr(torch, asked)
    hand, file = dict(merged_by_hand(folder, policy).named_parameters()), dict_of(folder)
    for (name, ours), (_, own) in same_names(policy, base, served):
        assert not ours.requires_grad
        if name.split(".")[-2] not in MATRICES:
            assert torch.equal(ours, own), name
            continue
        # merged_by_hand begins with the float32 file: what rounding took from the base is taken here too
        exact = hand[name].detach() - file[name].double() + own.double()
        rounding = (exact.to(served).double() - exact).abs()
        assert ((ours.double() - exact).abs() <= rounding + 1e-6).all(), name  # as near as any number of that dtype
        assert not torch.equal(ours, own), name


def dict_of(folder: Path) -> dict[str, Tensor]:
    return dict(Policy(folder).named_weights())


def test_no_second_model_is_in_memory(folder: Path) -> None:
    policy = made(folder)
    kept = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    merging = [w for _, w in policy.named_weights(torch.float32) if w.untyped_storage().data_ptr() not in kept]
    assert len(merging) == 2 * len(MATRICES)  # made as they are asked for; the others are the model's own
    shapes = [w for _, w in policy.named_weights()]
    assert all(w.untyped_storage().data_ptr() in kept for w in shapes)


# ---- what is saved ----


def logprobs_of(model: Any, policy: Policy) -> None:
    """transformers' `model` gives the logprobs of `policy`."""
    (mb,) = batches(policy, 500)
    ours_N, expected = policy.logprobs(mb, 0.7)[0], plain(model.eval(), 0.7)
    for place, row in enumerate(mb.rows):
        torch.testing.assert_close(ours_N[mb.sequence_N == place], expected[row][0], rtol=0, atol=2e-4)


def test_a_checkpoint_is_the_merged_model(folder: Path, tmp_path: Path) -> None:
    policy = made(folder)
    policy.save(tmp_path)
    logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa"), policy)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(dict_of(folder))
    saved = Policy(tmp_path)
    assert all(torch.equal(w, v) for (_, w), (_, v) in same_names(policy, saved))  # what is served is what is saved


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_peft_loads_the_adapter(folder: Path, tmp_path: Path, targets: Any) -> None:
    peft = pytest.importorskip("peft")
    policy = made(folder, targets=targets)
    policy.save(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"), policy)


def test_the_adapter_has_the_names_of_peft(folder: Path, tmp_path: Path) -> None:
    """As peft 0.21 writes them; `test_peft_loads_the_adapter` asks peft itself, where it is installed."""
    policy = made(folder, targets=["q_proj", "down_proj"])
    policy.save(tmp_path)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "r": 3, "lora_alpha": 6.0, "target_modules": ["down_proj", "q_proj"]}
    assert expected.items() <= settings.items()
    assert settings["base_model_name_or_path"] == str(folder)
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    weights = dict(policy.model.named_parameters())
    for layer in range(2):
        for module in ("self_attn.q_proj", "mlp.down_proj"):
            stem = f"model.layers.{layer}.{module}"
            out, into = weights[f"{stem}.weight"].shape
            assert shapes.pop(f"base_model.model.{stem}.lora_A.weight") == (3, into)
            assert shapes.pop(f"base_model.model.{stem}.lora_B.weight") == (out, 3)
    assert not shapes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    unbroken = made(folder, moved=False, dtype=dtype)
    optimizer = trained(unbroken, 2)
    Checkpoints(tmp_path, keep=0, config={}).save(unbroken, optimizer, Progress(2, 2, 2, 2, {}))
    saved = tmp_path / "step_000002"
    resumed = made(folder, moved=False, dtype=dtype, checkpoint=saved)
    again = Optimizer(resumed.parameters(), lr=1e-2)
    again.load_state_dict(load(saved)["optimizer"])
    for policy, own in ((unbroken, optimizer), (resumed, again)):
        trained(policy, 2, own)
    for (name, p), (_, q) in zip(unbroken.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_checkpoint_with_half_an_adapter_is_damaged(folder: Path, tmp_path: Path) -> None:
    policy = made(folder)
    Checkpoints(tmp_path, keep=0, config={}).save(policy, trained(policy), Progress(1, 1, 1, 1, {}))
    inspect(tmp_path / "step_000001")
    file = tmp_path / "step_000001" / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(Damaged, match=r"adapter_model\.safetensors cannot be read"):
        inspect(tmp_path / "step_000001")


@pytest.mark.parametrize(
    "shape", [{"num_hidden_layers": 1, "layer_types": ["full_attention"]}, {"intermediate_size": 96}]
)
def test_a_base_of_another_shape_is_refused(folder: Path, tmp_path: Path, shape: dict[str, Any]) -> None:
    made(folder).save(tmp_path / "checkpoint")
    config = AutoConfig.from_pretrained(folder, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^model\.path=.*other: not the model whose adapter .*checkpoint holds"):
        LoRAPolicy(tmp_path / "other", rank=3, alpha=6.0, targets="all-linear", checkpoint=tmp_path / "checkpoint")


@pytest.mark.parametrize("change", ["scale", "norm"])
def test_another_base_is_refused(folder: Path, tmp_path: Path, change: str) -> None:
    made(folder).save(tmp_path / "saved")
    other = Policy(folder)
    for name, parameter in other.model.named_parameters():
        if ("q_proj" in name) if change == "scale" else name.endswith("model.norm.weight"):
            parameter.data *= 1 + (1e-3 if change == "scale" else 1e-6)
    other.save(tmp_path / "other")
    with pytest.raises(ValueError, match=rf"^model.path={tmp_path}/other: not the model whose adapter"):
        made(tmp_path / "other", checkpoint=tmp_path / "saved")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, r"model.lora_rank=4: the adapter in .* has 3"),
        ({"alpha": 8.0}, r"model.lora_alpha=8.0: the adapter in .* has 6.0"),
        ({"targets": ["q_proj"]}, r"model.lora_targets=\['q_proj'\]: the adapter in .* has \['down_proj', .*"),
    ],
)
def test_another_adapter_is_refused(folder: Path, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    made(folder).save(tmp_path)
    with pytest.raises(ValueError, match=f"^{message}$"):
        made(folder, checkpoint=tmp_path, **settings)


def test_a_checkpoint_without_an_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    Policy(folder).save(tmp_path)
    with pytest.raises(ValueError, match=r"^model.lora_rank=3: .* holds no adapter, .*set model.lora_rank=0$"):
        made(folder, checkpoint=tmp_path)
