"""The objectives, each beside its paper's equation: r = new / old per token, A the advantage, sg = stop gradient.

`old` is the sampler, or the proximal policy where a correction is on (`base.py`). Papers maximise; these are losses,
so each carries one minus sign. A token counts as clipped where its gradient is cut or capped. dapo, dr_grpo, tis,
icepop and decoupled_ppo are `PPOClip` with other settings of the three parts: see conf/loss/ and docs/losses.md.

Shapes: N trained tokens of a micro-batch.
"""

from typing import Any

import torch
from torch import Tensor

from grpo.losses.base import Loss, Tokens


class Reinforce(Loss):
    """-A log new: the on-policy policy gradient (Williams 1992), which takes no notice of how old the tokens are."""

    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return -tokens.advantages_N * tokens.logprobs_N, _never(tokens)


class GRPO(Loss):
    """-r A: the importance-weighted policy gradient, GRPO's surrogate without its clip (arXiv:2402.03300 eq. 3)."""

    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        return -tokens.ratio() * tokens.advantages_N, _never(tokens)


class PPOClip(Loss):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7).

    Two distances instead of one: DAPO (arXiv:2503.14476). `dual_clip` = c > 1 also bounds the loss of a negative
    advantage at -c A (arXiv:1912.09729); None is off, as in all peers but verl (c = 3).
    """

    def __init__(
        self, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None, **common: Any
    ) -> None:
        super().__init__(**common)
        _check_range(clip_low, clip_high)
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"loss.dual_clip={dual_clip}: the bound on the ratio must be above 1, or null (off)")
        self.low, self.high = 1 - clip_low, 1 + clip_high
        self.dual_clip = torch.inf if dual_clip is None else dual_clip

    def ratio(self, tokens: Tokens) -> Tensor:
        return tokens.ratio()

    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio_N, advantages_N = self.ratio(tokens), tokens.advantages_N
        # min(r A, clip(r) A) is A min(r, high) for A > 0 and A max(r, low) for A < 0: only the side that would go on
        # moving the token away from the old policy is cut.
        bounded_N = torch.where(advantages_N > 0, ratio_N.clamp(max=self.high), ratio_N.clamp(self.low, self.dual_clip))
        return -bounded_N * advantages_N, (bounded_N != ratio_N) & (advantages_N != 0)


class GSPO(PPOClip):
    """PPO's clip on the sequence ratio exp(mean_t log r_t) (arXiv:2507.18071 eq. 5 and 7).

    Every token carries its sequence's loss, so with sequence_mean the sum is the paper's mean over sequences; with
    token_mean a sequence counts by its length (AReaL, PipelineRL).
    """

    def ratio(self, tokens: Tokens) -> Tensor:
        return tokens.sequence_ratio()


class CISPO(Loss):
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log new (MiniMax-M1, arXiv:2506.13585 eq. 4 and 5).

    No token loses its gradient. As in the paper there is no lower bound by default (clip_low = 1). Clipped
    tokens are those with a capped weight.
    """

    def __init__(self, *, clip_low: float = 1.0, clip_high: float = 4.0, **common: Any) -> None:
        super().__init__(**common)
        _check_range(clip_low, clip_high)
        self.low, self.high = 1 - clip_low, 1 + clip_high

    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        ratio_N = tokens.ratio().detach()
        weight_N = ratio_N.clamp(self.low, self.high)
        return -weight_N * tokens.advantages_N * tokens.logprobs_N, weight_N != ratio_N


class SAPO(Loss):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (arXiv:2511.20347).

    A smooth gate in place of a clip. Its gradient at r = 1 is that of -r A. Value at r = 1: -(2 / tau) A. Nothing is
    cut, so no token counts as clipped.
    """

    def __init__(self, *, tau_positive: float = 1.0, tau_negative: float = 1.05, **common: Any) -> None:
        super().__init__(**common)
        if not (tau_positive > 0 and tau_negative > 0):
            raise ValueError(f"loss.tau_positive={tau_positive}, loss.tau_negative={tau_negative}: must be above 0")
        self.tau_positive, self.tau_negative = tau_positive, tau_negative

    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        tau_N = torch.full_like(tokens.advantages_N, self.tau_negative)
        tau_N = tau_N.masked_fill(tokens.advantages_N > 0, self.tau_positive)
        gate_N = torch.sigmoid(tau_N * (tokens.ratio() - 1)) * 4 / tau_N
        return -gate_N * tokens.advantages_N, _never(tokens)


def _never(tokens: Tokens) -> Tensor:
    return torch.zeros_like(tokens.advantages_N, dtype=torch.bool)


def _check_range(clip_low: float, clip_high: float) -> None:
    if not (clip_low >= 0 and clip_high >= 0):
        raise ValueError(f"loss.clip_low={clip_low}, loss.clip_high={clip_high}: distances from 1, both 0 or above")
