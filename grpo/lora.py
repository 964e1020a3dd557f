"""LoRA: the base weights stay as they are, and two narrow matrices beside each chosen linear layer are trained.

The layer computes W x + (alpha / rank) B A x; B begins as zeros, so a run begins with the model itself. The rest is as
it is without: packed forward, compiled and checkpointed layers, and an optimizer that is given the adapters alone.
Whoever asks for the weights (every sync, its proof, checkpoints) gets whole merged ones under the model's own names:
added up in float32, rounded to the dtype asked for, one tensor at a time, so that no second model is ever in memory.

In float32 the merged model is the trained one to rounding. In bfloat16 it is not quite: W + (alpha / rank) B A is
rounded to 8 bits for the server, the trainer's own sum is not, so tokens of lag 0 have ratios further from 1 than
without LoRA (`lag_0/kl` shows how far).

Checkpoints hold the merged model, and in `adapter/` the adapter as peft loads it. To go on, base and adapter
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
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo.batch import MicroBatch
from grpo.model import Policy
from grpo.sync.disk import write_safetensors

ALL = "all-linear"
FOLDER, WEIGHTS, CONFIG = "adapter", "adapter_model.safetensors", "adapter_config.json"  # the files' names are peft's
PREFIX = "base_model.model."  # of names in peft's files
# How far a merged element may be off when it is added up again, relative: on another device a last bit may differ.
AGAIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}


# Shapes: I and O features in and out, R rank.


class LoRALinear(nn.Linear):
    """An `nn.Linear` whose own parameters are frozen, with an adapter beside it; made of one by `adapt`."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    scale: float
    on: bool

    @classmethod
    def adapt(cls, layer: nn.Linear, rank: int, alpha: float) -> None:
        """Give `layer` an adapter, in place: A as torch begins a linear layer, B as zeros."""
        layer.__class__ = cls
        assert isinstance(layer, cls)
        place: Any = {"bias": False, "dtype": layer.weight.dtype, "device": layer.weight.device}
        layer.lora_A = nn.Linear(layer.in_features, rank, **place)
        layer.lora_B = nn.Linear(rank, layer.out_features, **place)
        nn.init.zeros_(layer.lora_B.weight)
        layer.scale, layer.on = alpha / rank, True

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + self.scale * self.lora_B(self.lora_A(input)) if self.on else output

    @torch.no_grad()
    def merged(self) -> Tensor:
        """W + (alpha / rank) B A [O, I], in float32 (float64 for a model in float64)."""
        wide = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        weight_OI, down_RI, up_OR = (w.to(wide) for w in (self.weight, self.lora_A.weight, self.lora_B.weight))
        return torch.addmm(weight_OI, up_OR, down_RI, alpha=self.scale)


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
        self._names = targeted(self.body, self._targets)
        self.model.requires_grad_(False)
        for name, layer in list(self.body.named_modules()):
            if type(layer) is nn.Linear and name.rpartition(".")[2] in self._names:
                LoRALinear.adapt(layer, self._rank, self._alpha)
        self._layers = {name: layer for name, layer in self.model.named_modules() if isinstance(layer, LoRALinear)}
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
            layer = self._layers.get(name.removesuffix(".weight"))
            if dtype is None:
                yield name, parameter.detach()
            else:
                yield name, (parameter.detach() if layer is None else layer.merged()).to(dtype)

    def save(self, path: str | Path) -> None:
        """The merged model as `Policy.save` does, and the adapter in a folder of its own within."""
        self.save_by_tensor(path)
        # Not beside the model: where peft is installed, transformers takes such a folder for an adapter.
        folder = Path(path) / FOLDER
        folder.mkdir()
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self._source,
            "r": self._rank,
            "lora_alpha": self._alpha,
            "target_modules": sorted(self._names),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        tensors = {f"{PREFIX}{name}": tensor for name, tensor in self._adapters().items()}
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        write_safetensors(folder / WEIGHTS, shapes, str(self.dtype).removeprefix("torch."), tensors.items())

    def base(self) -> "Base":
        """The model without its adapters."""
        return Base(self)

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Meanwhile the layers compute W x alone."""
        for layer in self._layers.values():
            layer.on = False
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.on = True

    def _adapters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def _load(self, folder: Path) -> None:
        if not (folder / WEIGHTS).is_file():
            raise ValueError(
                f"model.lora_rank={self._rank}: {folder.parent} holds no adapter, it was trained without LoRA; set "
                "model.lora_rank=0"
            )
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        for key, had, now in (
            ("lora_rank", saved["r"], self._rank),
            ("lora_alpha", saved["lora_alpha"], self._alpha),
            ("lora_targets", sorted(saved["target_modules"]), sorted(self._names)),
        ):
            if had != now:
                raise ValueError(f"model.{key}={now}: the adapter in {folder} has {had}")
        saved_weights = load_file(folder / WEIGHTS)
        ours = {f"{PREFIX}{name}": tensor for name, tensor in self._adapters().items()}
        for name in sorted(ours.keys() | saved_weights.keys()):
            if name not in ours or name not in saved_weights or ours[name].shape != saved_weights[name].shape:
                raise self._another_base(folder.parent, name)
            ours[name].copy_(saved_weights[name])

    def _check_base(self, checkpoint: Path) -> None:
        """Raises ValueError when base and adapter do not add up to the checkpoint's model."""
        with safe_open(checkpoint / "model.safetensors", "pt") as file:
            there = set(file.keys())
            for name, weight in self.named_weights(self.dtype):
                same = _nearly if name.removesuffix(".weight") in self._layers else torch.equal
                if name not in there or not same(weight.cpu(), file.get_tensor(name)):
                    raise self._another_base(checkpoint, name)

    def _another_base(self, checkpoint: Path, name: str) -> ValueError:
        return ValueError(
            f"model.path={self._source}: not the model whose adapter {checkpoint} holds ({name} is another); give the "
            "one that the run began with"
        )


class Base:
    """A LoRA policy with its adapters off: the reference of a KL penalty, at no cost in memory."""

    def __init__(self, policy: LoRAPolicy) -> None:
        self.policy = policy

    def logprobs(self, mb: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As `Policy.logprobs`."""
        with self.policy.without_adapters():
            return self.policy.logprobs(mb, temperature)


def targeted(body: nn.Module, targets: str | list[str]) -> set[str]:
    """The last names of the linear layers that `targets` means. ValueError for one that there is not."""
    names = {name.rpartition(".")[2] for name, m in body.named_modules() if type(m) is nn.Linear}
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


def _nearly(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two sums of the same terms could be these: they are rounded wide first, then to their dtype."""
    wide = 1e-13 if ours.dtype == torch.float64 else 1e-6
    atol = wide * float(theirs.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=AGAIN[ours.dtype], atol=atol)
