"""LoRA: the base weights stay as they are, and two narrow matrices beside each chosen linear layer are trained.

The layer computes W x + (alpha / rank) B A x; B begins as zeros, so a run begins with the model itself. The layers are
peft's, injected into the model, and everything around them is what it is without: packed forward, compiled and
checkpointed layers, and an optimizer that is given the adapters alone. Whoever asks for the weights (every sync, its
proof, checkpoints) gets whole merged ones under the model's own names: added up in float32, rounded to the dtype asked
for, one tensor at a time, so that no second model is ever in memory.

In float32 the merged model is the trained one to rounding. In bfloat16 it is not quite: W + (alpha / rank) B A is
rounded to 8 bits for the server, the trainer's own sum is not, so tokens of lag 0 have ratios further from 1 than
without LoRA (`lag_0/kl` shows how far).

Checkpoints hold the merged model, and in `adapter/` the adapter as peft and vLLM load it. To go on, base and adapter
are loaded apart (a merged file cannot be taken apart again), and their sum must be the merged file.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021 (arXiv:2106.09685). Left out: adapters on embedding
and head, dropout (the ratio of a token would be noise), several ranks, sending the adapter alone to the servers.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo.batch import MicroBatch
from grpo.model import Policy

ALL = "all-linear"
FOLDER, WEIGHTS = "adapter", "adapter_model.safetensors"
NAME = "default"  # peft's, of the one adapter
PREFIX = "base_model.model."  # of names in peft's files
# How far a merged element may be off when it is added up again, relative: on another device a last bit may differ.
AGAIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


class LoRAPolicy(Policy):
    """A policy whose parameters are adapters.

    rank: width of an adapter. alpha: the scale is alpha / rank. targets: last names of the linear layers that get one
    ("q_proj"), or "all-linear" for all but the head. checkpoint: a folder that `save` has written, to go on from.
    settings: those of `Policy`.

    Raises ValueError for a target that is no linear layer of this model, and for a checkpoint of another one.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int,
        alpha: float,
        targets: str | list[str],
        checkpoint: Path | None = None,
        **settings: Any,
    ) -> None:
        self._source, self._rank, self._alpha, self._targets = str(path), rank, alpha, targets
        self._checkpoint = checkpoint
        super().__init__(path, trainable=True, **settings)

    def _place(self) -> None:
        self.adapter = LoraConfig(
            r=self._rank,
            lora_alpha=self._alpha,
            target_modules=sorted(targeted(self.body, self._targets)),
            lora_dropout=0.0,
            bias="none",
            base_model_name_or_path=self._source,
            task_type="CAUSAL_LM",
        )
        inject_adapter_in_model(self.adapter, self.model)
        self._layers: dict[str, Any] = {n: m for n, m in self.model.named_modules() if isinstance(m, LoraLayer)}
        if self._checkpoint is not None:
            self._load(self._checkpoint / FOLDER)
        super()._place()
        if self._checkpoint is not None:
            self._check_base(self._checkpoint)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """As of the model without adapters, merged; without `dtype` they are the base's, for shapes alone."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                continue
            layer, inner, rest = name.partition(".base_layer.")
            if dtype is None:
                weight = parameter.detach()
            elif inner and rest == "weight":
                weight = _merged(self._layers[layer]).to(dtype)
            else:
                weight = parameter.detach().to(dtype)
            yield (f"{layer}.{rest}" if inner else name), weight

    def save(self, path: str | Path) -> None:
        """The merged model as `Policy.save` does, and the adapter in a folder of its own within."""
        self.save_by_tensor(path)
        # Not beside the model: where peft is installed, transformers takes such a folder for an adapter.
        folder = Path(path) / FOLDER
        folder.mkdir()
        self.adapter.save_pretrained(folder)
        state = get_peft_model_state_dict(self.model, adapter_name=NAME)
        tensors = {f"{PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def base(self) -> "Base":
        """The model without its adapters."""
        return Base(self)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Meanwhile the layers compute W x alone."""
        # peft's enable_adapters(False) would also freeze them.
        for layer in self._layers.values():
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer._disable_adapters = False

    def _load(self, folder: Path) -> None:
        if not (folder / WEIGHTS).is_file():
            raise ValueError(
                f"model.lora_rank={self._rank}: {folder.parent} holds no adapter, it was trained without LoRA; set "
                "model.lora_rank=0"
            )
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        for key, had, now in (
            ("lora_rank", saved["r"], self._rank),
            ("lora_alpha", saved["lora_alpha"], self._alpha),
            ("lora_targets", sorted(saved["target_modules"]), sorted(self.adapter.target_modules)),
        ):
            if had != now:
                raise ValueError(f"model.{key}={now}: the adapter in {folder} has {had}")
        state = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        found = set_peft_model_state_dict(self.model, state, adapter_name=NAME)
        assert not found.unexpected_keys, found.unexpected_keys
        assert len(state) == len(self.parameters()), "adapters that the file does not hold"

    def _check_base(self, checkpoint: Path) -> None:
        """Raises ValueError when base and adapter do not add up to the checkpoint's model."""
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            for name, weight in self.named_weights(self.dtype):
                ours, theirs = weight.cpu(), file.get_tensor(name)
                merged = name.removesuffix(".weight") in self._layers
                if not (_nearly(ours, theirs) if merged else torch.equal(ours, theirs)):
                    raise ValueError(
                        f"model.path={self._source}: not the model whose adapter {checkpoint} holds ({name} is "
                        "another); give the one that the run began with"
                    )


class Base:
    """A LoRA policy with its adapters off: the reference of a KL penalty, at no cost in memory."""

    def __init__(self, policy: LoRAPolicy) -> None:
        self.policy = policy

    def logprobs(self, mb: MicroBatch, temperature: float, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """As `Policy.logprobs`."""
        with self.policy.without_adapters():
            return self.policy.logprobs(mb, temperature, entropy_grad)


def targeted(body: nn.Module, targets: str | list[str]) -> set[str]:
    """The last names of the linear layers that `targets` means. ValueError for one that there is not."""
    names = {name.rpartition(".")[2] for name, m in body.named_modules() if isinstance(m, nn.Linear)}
    if targets == ALL:
        return names
    asked = [targets] if isinstance(targets, str) else targets
    for target in asked:
        if target not in names:
            raise ValueError(
                f"model.lora_targets={targets}: no linear layer of this model is called {target!r} (embedding and head "
                f"get no adapter); there are {', '.join(sorted(names))}, or {ALL} for all of them"
            )
    return set(asked)


def _merged(layer: Any) -> Tensor:
    """W + (alpha / rank) B A, in float32 (float64 for a model in float64)."""
    weight_OI, down_RI, up_OR = (
        w.detach() for w in (layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    )
    wide = torch.float64 if weight_OI.dtype == torch.float64 else torch.float32
    return torch.addmm(weight_OI.to(wide), up_OR.to(wide), down_RI.to(wide), alpha=layer.scaling[NAME])


def _nearly(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two sums of the same terms could be these: they are rounded wide first, then to their dtype."""
    wide = 1e-13 if ours.dtype == torch.float64 else 1e-6
    atol = wide * float(theirs.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=AGAIN[ours.dtype], atol=atol)
