"""Rows, policy and optimizer as a run's settings describe them: for training, and to compute a step again
(`grpo.replay`).

With a team they are sharded over its ranks.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo import checkpoint as checkpoints
from grpo import flash4
from grpo.claim import check_rows, fingerprints
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.settings import Model, Train
from grpo.step import Reference

if TYPE_CHECKING:
    from grpo.data.base import LoadedData
    from grpo.team import Team

log = logging.getLogger(__name__)


def load_data(
    data: Any, model: str, seed: int, resume: Path | None = None, *, forced: bool = False
) -> "tuple[PreTrainedTokenizerBase, LoadedData]":
    """The tokenizer of `model`, and the rows as it reads them.

    Raises ValueError when they are not those that the run of the checkpoint `resume` began with, unless `forced`.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded: LoadedData = data.load(tokenizer, seed)
    if resume is not None:
        check_rows(checkpoints.rows(resume), fingerprints(loaded.report), forced=forced)
    return tokenizer, loaded


def make_policy(
    path: str | Path,
    model: Model,
    device: str,
    *,
    checkpoint: Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trainable: bool = True,
    team: "Team | None" = None,
) -> Policy:
    """The model at `path`, where the run begins, or as far as it had come in `checkpoint`."""
    compile = device != "cpu" if model.compile == "auto" else bool(model.compile)
    settings: dict[str, Any] = {
        "dtype": model.dtype,
        "checkpointing": model.checkpointing,
        "compile": compile,
        "attention": _attention(model, device),
        "trainable": trainable,
    }
    if model.lora_rank and trainable:
        assert team is None, "the settings were checked"
        from grpo.lora import LoRAPolicy

        del settings["trainable"]
        policy: Policy = LoRAPolicy(
            path,
            rank=model.lora_rank,
            alpha=model.lora_alpha,
            targets=model.lora_targets,
            checkpoint=checkpoint,
            device=device,
            **settings,
        )
    else:
        policy = _policy("policy", team, checkpoint or path, device, settings)
    policy.tokenizer = tokenizer
    return policy


def make_reference(
    path: str | Path, model: Model, device: str, policy: Policy, team: "Team | None" = None
) -> Reference:
    """What a KL penalty pulls to: the model at `path`, where `policy` begins and whose base it is with LoRA."""
    if model.lora_rank:
        from grpo.lora import LoRAPolicy

        assert isinstance(policy, LoRAPolicy)
        return policy.base()
    settings = {"dtype": model.dtype, "attention": _attention(model, device), "trainable": False}
    return _policy("reference", team, path, device, settings)


def _attention(model: Model, device: str) -> str:
    if model.attention != "auto":
        return model.attention
    reason = flash4.missing(torch.device(device), getattr(torch, model.dtype))
    if reason and device != "cpu":
        log.info("attention: torch's kernel, not flash4: %s", reason)
    return "torch" if reason else "flash4"


def _policy(name: str, team: "Team | None", path: str | Path, device: str, settings: dict[str, Any]) -> Policy:
    if team is None:
        return Policy(path, device=device, **settings)
    from grpo.sharded import ShardedPolicy

    policy: Policy = team.make(name, ShardedPolicy, path, **settings)
    return policy


def make_optimizer(policy: Policy, model: Model, train: Train, team: "Team | None" = None) -> Optimizer:
    """Before its first step; a resumed run loads its state."""
    settings: dict[str, Any] = {
        "lr": model.lr,
        "kind": model.optimizer,
        "weight_decay": model.weight_decay,
        "betas": (model.betas[0], model.betas[1]),
        "max_grad_norm": train.max_grad_norm,
        "warmup_steps": model.warmup_steps,
        "schedule": model.schedule,
        "total_steps": train.steps * train.minibatches,
    }
    if team is None:
        return Optimizer(policy.parameters(), **settings)
    from grpo.sharded import ShardedOptimizer

    optimizer: Optimizer = team.make("optimizer", ShardedOptimizer, **settings)
    return optimizer
