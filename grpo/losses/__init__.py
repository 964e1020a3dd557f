"""Losses: tensors of a micro-batch in, a scalar to differentiate. Start at `base.py`; equations in docs/losses.md."""

from grpo.losses.base import Loss, LossInputs, LossOutput, Tokens
from grpo.losses.objectives import CISPO, GRPO, GSPO, SAPO, PPOClip, Reinforce

__all__ = ["CISPO", "GRPO", "GSPO", "SAPO", "Loss", "LossInputs", "LossOutput", "PPOClip", "Reinforce", "Tokens"]
