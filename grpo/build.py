"""Policy and optimizer as a run's settings describe them: for training, and to compute a step again (`grpo.replay`)."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.settings import Model, Train


def make_policy(
    path: str | Path,
    model: Model,
    device: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trainable: bool = True,
) -> Policy:
    """The model at `path`: the initial weights or a checkpoint."""
    return Policy(
        path,
        dtype=model.dtype,
        device=device,
        checkpointing=model.checkpointing,  # type: ignore[arg-type]
        compile=device != "cpu" if model.compile == "auto" else bool(model.compile),
        tokenizer=tokenizer,
        trainable=trainable,
    )


def make_optimizer(policy: Policy, model: Model, train: Train) -> Optimizer:
    """Before its first step; a resumed run loads its state."""
    return Optimizer(
        policy.parameters(),
        lr=model.lr,
        kind=model.optimizer,  # type: ignore[arg-type]
        weight_decay=model.weight_decay,
        betas=(model.betas[0], model.betas[1]),
        max_grad_norm=train.max_grad_norm,
        warmup_steps=model.warmup_steps,
        schedule=model.schedule,  # type: ignore[arg-type]
        total_steps=train.steps * train.minibatches,
    )
