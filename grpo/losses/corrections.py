"""Off-policy corrections: a stop-gradient weight on each token's loss for the gap between sampler and proximal policy.

rho = proximal / sampler, per token. The proximal policy is the trainer's own, before the first optimizer step on the
batch, so rho holds the policy lag and the engine's numerics while the objective's ratio (new / proximal) holds only
what the batch's own updates changed. With one optimizer step per batch, proximal = current policy and the ratio is 1.

Left out: weights that carry a gradient (the correction is a weight, not an objective); corrections that change the
denominator (law 5).

Shapes: N trained tokens of a micro-batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.losses.tensors import clamp_log_ratio, sequence_mean, sequence_sum

CORRECTIONS = ("none", "truncate", "mask")
LEVELS = ("token", "sequence", "geometric")


@dataclass(slots=True, frozen=True)
class Correction:
    """kind "none": 1. "truncate": min(rho, cap) (TIS). "mask": rho inside [mask_low, mask_high], else 0 (IcePop).

    level: rho of the token; or of its sequence, as the product over its tokens ("sequence": the unbiased weight, of
    high variance) or as their geometric mean ("geometric"). verl, TRL and SkyRL mean the product by "sequence", AReaL
    and open-instruct the geometric mean.

    `reject_low`, `reject_high`: on top of any kind, a sequence whose geometric-mean rho is outside gets weight 0.
    Bounds are on rho itself, not on its inverse (as verl's k1 bounds are); both ends belong to the range.
    """

    kind: str = "none"
    cap: float | None = None
    level: str = "token"
    mask_low: float | None = None
    mask_high: float | None = None
    reject_low: float | None = None
    reject_high: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in CORRECTIONS:
            raise ValueError(f"loss.correction={self.kind!r}: choose one of {', '.join(CORRECTIONS)}")
        if self.level not in LEVELS:
            raise ValueError(f"loss.level={self.level!r}: choose one of {', '.join(LEVELS)}")
        if self.kind == "none" and self.level != "token":
            raise ValueError(
                f"loss.level={self.level} has no effect with loss.correction=none; set loss.correction too"
            )
        if (self.kind == "truncate") != (self.cap is not None):
            raise ValueError(
                f"loss.cap={self.cap} with loss.correction={self.kind}: a cap goes with truncate, and only with it"
            )
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"loss.cap={self.cap}: the largest weight must be above 0")
        masked = self.mask_low is not None or self.mask_high is not None
        if masked != (self.kind == "mask"):
            raise ValueError(
                f"loss.mask_low={self.mask_low}, loss.mask_high={self.mask_high} with loss.correction={self.kind}: "
                "give bounds with mask, and only with it"
            )
        for name, low, high in (("mask", self.mask_low, self.mask_high), ("reject", self.reject_low, self.reject_high)):
            if not 0 <= _or(low, 0.0) <= 1 <= _or(high, torch.inf):
                raise ValueError(
                    f"loss.{name}_low={low}, loss.{name}_high={high}: bounds on the ratio must hold 1 between them"
                )

    @property
    def active(self) -> bool:
        """Whether any token's weight can differ from 1, which is when the proximal policy is needed."""
        return self.kind != "none" or self.reject_low is not None or self.reject_high is not None

    def __call__(self, raw_log_rho_N: Tensor, sequence_N: Tensor, num_sequences: int) -> tuple[Tensor, Tensor]:
        """Weights [N], and which tokens were capped, masked or rejected [N]. `raw_log_rho_N`: proximal - sampler."""
        log_rho_N = clamp_log_ratio(raw_log_rho_N)
        geometric_N = sequence_mean(log_rho_N, sequence_N, num_sequences)
        if self.level == "sequence":
            # A sum of bounded terms is not bounded: 4,000 tokens at 0.05 make exp(200).
            log_weight_N = clamp_log_ratio(sequence_sum(log_rho_N, sequence_N, num_sequences))
        elif self.level == "geometric":
            log_weight_N = geometric_N
        else:
            log_weight_N = log_rho_N
        weight_N = log_weight_N.exp()
        if self.kind == "truncate":
            touched_N = weight_N > _or(self.cap, torch.inf)
            weight_N = weight_N.clamp(max=self.cap)
        elif self.kind == "mask":
            touched_N = _outside(weight_N, self.mask_low, self.mask_high)
            weight_N = torch.where(touched_N, 0.0, weight_N)
        else:
            weight_N, touched_N = torch.ones_like(weight_N), torch.zeros_like(weight_N, dtype=torch.bool)
        rejected_N = _outside(geometric_N.exp(), self.reject_low, self.reject_high)
        return torch.where(rejected_N, 0.0, weight_N), touched_N | rejected_N


def _outside(ratio_N: Tensor, low: float | None, high: float | None) -> Tensor:
    return (ratio_N < _or(low, 0.0)) | (ratio_N > _or(high, torch.inf))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
