"""Which tensors a server has not: named after a proof that failed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_faults import Fault
from fake_server import FakeServer
from loop import loop
from torch import Tensor, nn

from grpo.losses import GRPO
from grpo.sync.base import WeightSync
from grpo.sync.compare import SHOWN, Comparison, compare_weights
from grpo.sync.verify import SyncNotProven

HIDDEN = 8


class Packed(nn.Module):
    """A linear layer as vLLM has it on a CPU: what it computes with cannot be read."""

    def __init__(self, *parts: Tensor) -> None:
        super().__init__()
        self.held = [torch.cat(parts).clone()]
        self.weight = nn.Parameter(torch.empty(0))
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ layer.held[0].T)


class Model(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}  # noqa: RUF012

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.layer = nn.Module()
        self.layer.qkv_proj = Packed(tensors["layer.q_proj.weight"], tensors["layer.k_proj.weight"])
        self.layer.o_proj = Packed(tensors["layer.o_proj.weight"])
        self.layer.norm = nn.Module()
        self.layer.norm.weight = nn.Parameter(tensors["layer.norm.weight"].clone())
        self.embed_tokens = nn.Module()  # padded
        rows = torch.zeros(3, HIDDEN)
        self.embed_tokens.weight = nn.Parameter(torch.cat([tensors["embed_tokens.weight"], rows]))
        self.lm_head = Packed(tensors["embed_tokens.weight"], rows)  # tied, and packed


def weights() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {
        "layer.q_proj.weight": (12, HIDDEN),
        "layer.k_proj.weight": (4, HIDDEN),
        "layer.o_proj.weight": (HIDDEN, HIDDEN),
        "layer.norm.weight": (HIDDEN,),
        "embed_tokens.weight": (20, HIDDEN),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_equal_weights_are_all_compared_and_none_is_off() -> None:
    found = compare_weights(Model(weights()), weights())
    assert str(found) == "compared with those of the trainer: 5 of 5 tensors, none is off"


@pytest.mark.parametrize("name", list(weights()))
def test_one_entry_of_one_tensor_is_named_and_no_other(name: str) -> None:
    ours = weights()
    ours[name].view(-1)[-1] += 0.1
    assert list(compare_weights(Model(weights()), ours).off) == [name]


def test_a_stale_tied_head_is_named_by_the_tensor_it_is_tied_to() -> None:
    model = Model(weights())
    model.lm_head.held[0] += 0.1
    assert list(compare_weights(model, weights()).off) == ["embed_tokens.weight"]


def test_not_a_number_is_off() -> None:
    model = Model(weights())
    model.layer.o_proj.held[0][0, 0] = torch.nan
    assert list(compare_weights(model, weights()).off) == ["layer.o_proj.weight"]


def test_a_shard_and_an_unknown_layer_are_not_compared() -> None:
    model, ours = Model(weights()), weights()
    model.layer.o_proj.held[0] = model.layer.o_proj.held[0][:, :4]  # of two GPUs
    model.layer.qkv_proj.held[0] = model.layer.qkv_proj.held[0][:8]
    ours["elsewhere.weight"] = torch.ones(2)
    assert str(compare_weights(model, ours)) == "compared with those of the trainer: 2 of 6 tensors, none is off"


def test_the_message_shows_the_worst_first_and_not_all() -> None:
    found = Comparison(9)
    for number in range(SHOWN + 2):
        found.note(f"t{number}", torch.ones(1), torch.ones(1) + number)
    assert str(found).endswith(f"7 of 9 tensors, {SHOWN + 1} off: t6, t5, t4, t3, t2, ...")


@pytest.mark.parametrize(("apply", "named"), [("all_but_head", "1 off: lm_head.weight"), ("nothing", r"\d\d off: ")])
def test_a_proof_that_fails_names_the_tensors(tiny_dir: Path, tmp_path: Path, apply: Any, named: str) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, lr=0.05, loss=GRPO(), zero_variance="keep") as trainer,
    ):
        server.add_fault(Fault("update_weights", apply=apply, after=1))
        with pytest.raises(SyncNotProven, match=rf"logprobs are not.* compared with those of the trainer: .*{named}"):
            trainer.run()
        assert not server.engine.session_open
        assert server.engine.version == str(trainer.version)
        left = [path.name for path in tmp_path.glob("grpo-weights-*/*.safetensors")]
        assert left == [], "the file that was compared is still there"


def test_a_server_that_cannot_be_asked_leaves_the_proof_its_reason(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        FakeServer(tiny_dir) as server,
        loop([server.url], tiny_dir, tmp_path, lr=0.05, loss=GRPO(), zero_variance="keep") as trainer,
    ):
        server.add_fault(
            Fault("update_weights", status=500, when=lambda call: "compare" in call.body.get("update_info", {}))
        )
        server.add_fault(Fault("update_weights", apply="nothing", after=1))
        with pytest.raises(SyncNotProven, match=r"logprobs are not.*could not be compared: .*status 500"):
            trainer.run()


def test_the_other_backends_say_that_they_cannot_tell() -> None:
    sync: Any = SimpleNamespace(backend="ipc")
    assert "sync=ipc" in WeightSync.suspects(sync, "http://there:1")
