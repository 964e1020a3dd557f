"""What the tests of the losses share: the shipped losses, ragged batches of chosen log-ratios, the call on them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from grpo.losses import Loss, LossInputs, LossOutput

CONF = Path(__file__).parent.parent / "conf"
NAMES = sorted(path.stem for path in (CONF / "loss").glob("[!_]*.yaml"))
MAX_TOKENS = 16


@cache
def _composed(name: str) -> Any:
    with initialize_config_dir(str(CONF), version_base=None):
        return compose(f"loss/{name}", overrides=[f"+data.max_tokens={MAX_TOKENS}"])


def shipped(name: str, **changes: Any) -> Loss:
    """The loss of conf/loss/<name>.yaml, with some keys changed."""
    config = _composed(name).copy()
    OmegaConf.set_struct(config, True)  # a key that the file does not have is an error
    for key, value in changes.items():
        config.loss[key] = value
    loss = instantiate(config.loss)
    assert isinstance(loss, Loss)
    return loss


@dataclass
class Sequence:
    """One completion in float64: log-probabilities of its L tokens under each policy, and its advantage."""

    new: Tensor
    sampler: Tensor
    proximal: Tensor
    reference: Tensor
    entropy: Tensor
    advantage: float


def ragged(seed: int, extreme: bool = False, lengths: tuple[int, ...] = (5, 1, 12, 3, 7, 2, 9, 4)) -> list[Sequence]:
    """Sequences of float32 numbers with log-ratios of a few tenths; `extreme` adds jumps of 3 to 200 to tokens."""
    g = torch.Generator().manual_seed(seed)

    def normal(length: int, scale: float) -> Tensor:
        return (torch.randn(length, generator=g) * scale).double()

    sequences = []
    for i, length in enumerate(lengths):
        sampler = -normal(length, 1.5).abs() - 0.1
        proximal = sampler + normal(length, 0.3)
        new = proximal + normal(length, 0.3)
        if extreme and length > 3:
            for j, jump in enumerate((3.0, -3.0, 19.9, -200.0, 200.0, -25.0)):
                if (i + j) % 3 == 0:
                    new[j % length] += jump
                if (i + j) % 4 == 0:
                    proximal[(j + 1) % length] += jump
        advantage = float(normal(1, 1.0))
        if i == 3:
            advantage = 0.0
        values = (new, sampler, proximal, sampler + normal(length, 0.5), normal(length, 1.0).abs())
        sequences.append(Sequence(*(v.float().double() for v in values), advantage=advantage))
    return sequences


def inputs(loss: Loss, sequences: list[Sequence], chosen: list[int] | None = None, dtype: Any = None) -> LossInputs:
    """Chosen sequences as a micro-batch of the batch `sequences`, in float32 unless another dtype is given."""
    dtype = dtype or torch.float32
    chosen = list(range(len(sequences))) if chosen is None else chosen
    weights = loss.sequence_weights([len(s.new) for s in sequences], len(sequences))
    rows = [sequences[i] for i in chosen]

    def per_token(values: list[float]) -> Tensor:
        return torch.cat([torch.full((len(s.new),), v, dtype=dtype) for s, v in zip(rows, values, strict=True)])

    def flat(name: str) -> Tensor:
        return torch.cat([getattr(s, name).detach() for s in rows]).to(dtype)

    return LossInputs(
        logprobs_N=flat("new").requires_grad_(),
        sampler_logprobs_N=flat("sampler"),
        advantages_N=per_token([s.advantage for s in rows]),
        weights_N=per_token([weights[i] for i in chosen]),
        sequence_N=per_token([float(i) for i in range(len(rows))]).long(),
        num_sequences=len(rows),
        proximal_logprobs_N=flat("proximal") if loss.needs_proximal else None,
        reference_logprobs_N=flat("reference") if loss.needs_reference else None,
        entropy_N=flat("entropy").requires_grad_() if loss.needs_entropy else None,
    )


def call(loss: Loss, sequences: list[Sequence], dtype: Any = None) -> tuple[LossOutput, Tensor]:
    """The output for the whole batch, and the gradient with respect to every token's logprob."""
    batch = inputs(loss, sequences, dtype=dtype)
    out = loss(batch)
    out.loss.backward()
    assert batch.logprobs_N.grad is not None
    return out, batch.logprobs_N.grad
