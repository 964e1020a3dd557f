"""A loss = an objective (a subclass) x an off-policy correction x an aggregation, plus KL penalty and entropy bonus.

    loss = sum_n weight_n * (correction_n * token_loss_n + kl_coefficient * kl_n - entropy_coefficient * entropy_n)

`weight_n` is the aggregation: fixed for the whole optimizer batch before its first micro-batch (law 5). `token_loss_n`
is the objective: the one method that a new loss writes. Everything inside is float64: the inputs are N numbers beside
a model, so it costs nothing, and what is left of rounding is the model's.

The old policy of the objective's ratio new / old is the sampler, or, with a correction, the proximal policy: the
correction then carries proximal / sampler. See docs/losses.md for each loss's equation and conventions.

Left out: advantages and masking (`Loss.advantage` and `Loss.mask_truncated` only tell the trainer which); metrics
(`grpo.diagnostics`).

Shapes: N trained tokens of a micro-batch, B sequences. Logprobs are natural logarithms, at the sampling temperature.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from grpo.advantages import KINDS, overlong_penalty
from grpo.drift import DriftAlarm
from grpo.losses.aggregation import AGGREGATIONS, sequence_weights
from grpo.losses.corrections import Correction
from grpo.losses.regularizers import KL_ESTIMATORS, kl_penalty
from grpo.losses.tensors import MAX_LOG_RATIO, clamp_log_ratio, sequence_mean


@dataclass(slots=True)
class LossInputs:
    """One micro-batch of whole sequences. Only `logprobs_N` (and `entropy_N` for a bonus) carry a gradient."""

    logprobs_N: Tensor  # float32, of the current policy
    sampler_logprobs_N: Tensor  # float32, of the distribution that was sampled
    advantages_N: Tensor
    weights_N: Tensor  # from `Loss.sequence_weights`
    sequence_N: Tensor  # int64, 0..B-1
    num_sequences: int  # B
    proximal_logprobs_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None  # nats

    def numbers(self) -> dict[str, Tensor]:
        """Every floating-point tensor that is there, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x.detach() for name, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()}

    def nonfinite(self) -> dict[int, str]:
        """Sequences that hold a NaN or an infinity: index in the micro-batch -> which tensors and how many tokens.

        The trainer refuses the step and names the samples. The loss of such a micro-batch is NaN, so `loss.isfinite()`
        is the cheap test and this the explanation.
        """
        found: dict[int, list[str]] = {}
        for name, values_N in self.numbers().items():
            bad_N = ~values_N.isfinite()
            for row in self.sequence_N[bad_N].unique().tolist():
                in_row_N = self.sequence_N == row
                counts = f"{int((bad_N & in_row_N).sum())} of {int(in_row_N.sum())} tokens"
                found.setdefault(row, []).append(f"{name.removesuffix('_N')} ({counts})")
        return {row: ", ".join(found[row]) for row in sorted(found)}


@dataclass(slots=True)
class LossOutput:
    loss: Tensor  # float64 scalar, to call backward on
    clipped_N: Tensor  # bool: the token's gradient is cut or capped (by a clip, a mask, a cap or a rejection)
    clamped_N: Tensor  # bool: one of its log-ratios was outside +-20 and clamped before exp
    terms: dict[str, Tensor]  # detached float64 scalars whose sum is the loss; they add up over micro-batches


@dataclass(slots=True)
class Tokens:
    """What an objective sees, in float64. `log_ratio_N` is new - old, clamped to +-20, and carries the gradient."""

    logprobs_N: Tensor
    log_ratio_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor
    num_sequences: int

    def ratio(self) -> Tensor:
        """new / old, [N]."""
        return self.log_ratio_N.exp()

    def sequence_ratio(self) -> Tensor:
        """[N]: exp of the sequence's mean log-ratio (GSPO): the product would leave every clip range with length."""
        return sequence_mean(self.log_ratio_N, self.sequence_N, self.num_sequences).exp()


class Loss(ABC):
    """What losses share. A subclass gives `token_loss`, and an `__init__` where it has parameters of its own.

    The arguments are the keys of conf/loss/_base.yaml, which explains each. The trainer reads `advantage`,
    `mask_truncated`, `needs_*`, `length_penalty` and `drift`.
    """

    def __init__(
        self,
        *,
        advantage: str = "mean_std",
        aggregation: str = "token_mean",
        max_tokens: int | None = None,
        mask_truncated: bool = False,
        correction: str = "none",
        cap: float | None = None,
        level: str = "token",
        mask_low: float | None = None,
        mask_high: float | None = None,
        reject_low: float | None = None,
        reject_high: float | None = None,
        kl_coefficient: float = 0.0,
        kl_estimator: str = "k3",
        entropy_coefficient: float = 0.0,
        overlong_share: float = 0.0,
        overlong_factor: float = 1.0,
        drift_kl: float = 0.005,
        drift_ess: float = 0.5,
        on_drift: str = "warn",
    ) -> None:
        for key, value, choices in (
            ("advantage", advantage, KINDS),
            ("aggregation", aggregation, AGGREGATIONS),
            ("kl_estimator", kl_estimator, KL_ESTIMATORS),
        ):
            if value not in choices:
                raise ValueError(f"loss.{key}={value!r}: choose one of {', '.join(choices)}")
        for key, coefficient in (("kl_coefficient", kl_coefficient), ("entropy_coefficient", entropy_coefficient)):
            if not 0 <= coefficient < torch.inf:
                raise ValueError(f"loss.{key}={coefficient}: must be 0 (off) or above")
        if not 0 <= overlong_share <= 1 or not overlong_factor > 0:
            raise ValueError(
                f"loss.overlong_share={overlong_share}, loss.overlong_factor={overlong_factor}: "
                "the share of max_tokens is in 0 (off) to 1, the factor above 0"
            )
        if (aggregation == "fixed" or overlong_share > 0) and (max_tokens is None or max_tokens < 1):
            raise ValueError(
                f"loss.max_tokens={max_tokens}: loss.aggregation=fixed and loss.overlong_share need the token budget "
                "of a completion (usually data.max_tokens)"
            )
        if overlong_share > 0 and advantage in ("gdpo", "maxrl"):
            raise ValueError(
                f"loss.overlong_share={overlong_share} with loss.advantage={advantage}: the penalty is a negative "
                "part of one scalar reward; use mean_std, mean, rloo or batch_std"
            )
        self.advantage = advantage
        self.aggregation = aggregation
        self.max_tokens = max_tokens
        self.mask_truncated = mask_truncated
        self.correction = Correction(correction, cap, level, mask_low, mask_high, reject_low, reject_high)
        self.kl_coefficient = kl_coefficient
        self.kl_estimator = kl_estimator
        self.entropy_coefficient = entropy_coefficient
        self.overlong_share = overlong_share
        self.overlong_factor = overlong_factor
        self.drift = DriftAlarm(max_kl=drift_kl, min_ess=drift_ess, action=on_drift)

    @property
    def needs_proximal(self) -> bool:
        """Wants the policy before the batch's first optimizer step (with one step per batch: `logprobs_N.detach()`)."""
        return self.correction.active

    @property
    def needs_reference(self) -> bool:
        return self.kl_coefficient > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the entropy takes part in the gradient."""
        return self.entropy_coefficient > 0

    @abstractmethod
    def token_loss(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The objective: each token's loss [N], to be minimised, and whether its gradient was cut or capped [N]."""

    def sequence_weights(self, lengths: list[int], total_sequences: int) -> list[float]:
        """The weight of every trained token of each sequence of the optimizer batch (law 5): see `aggregation.py`."""
        return sequence_weights(self.aggregation, lengths, total_sequences, self.max_tokens)

    def length_penalty(self, tokens: int) -> float:
        """What is added to the reward of a completion of `tokens` tokens, before advantages; 0.0 when it is off."""
        if self.overlong_share == 0:
            return 0.0
        assert self.max_tokens is not None
        return overlong_penalty(tokens, self.max_tokens, self.overlong_share, self.overlong_factor)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's part of the batch's loss; NaN if any input is not finite (`LossInputs.nonfinite`)."""
        logprobs_N = inputs.logprobs_N.double()
        sampler_N = inputs.sampler_logprobs_N.detach().double()
        weights_N = inputs.weights_N.detach().double()
        old_N = sampler_N
        if self.needs_proximal:
            assert inputs.proximal_logprobs_N is not None, "this loss needs proximal_logprobs_N"
            old_N = inputs.proximal_logprobs_N.detach().double()
        raw_N = logprobs_N - old_N
        clamped_N = raw_N.detach().abs() > MAX_LOG_RATIO
        tokens = Tokens(
            logprobs_N=logprobs_N,
            log_ratio_N=clamp_log_ratio(raw_N),
            advantages_N=inputs.advantages_N.detach().double(),
            sequence_N=inputs.sequence_N,
            num_sequences=inputs.num_sequences,
        )
        loss_N, clipped_N = self.token_loss(tokens)
        assert loss_N.shape == clipped_N.shape == logprobs_N.shape, (loss_N.shape, clipped_N.shape, logprobs_N.shape)
        if self.correction.active:
            raw_rho_N = old_N - sampler_N
            correction_N, touched_N = self.correction(raw_rho_N, inputs.sequence_N, inputs.num_sequences)
            loss_N = correction_N * loss_N
            clipped_N = clipped_N | touched_N
            clamped_N = clamped_N | (raw_rho_N.abs() > MAX_LOG_RATIO)
        loss = (weights_N * loss_N).sum()
        terms = {"policy": loss.detach()}
        if self.needs_reference:
            assert inputs.reference_logprobs_N is not None, "this loss needs reference_logprobs_N"
            reference_N = inputs.reference_logprobs_N.detach().double()
            penalty = self.kl_coefficient * (weights_N * kl_penalty(self.kl_estimator, logprobs_N, reference_N)).sum()
            clamped_N = clamped_N | ((reference_N - logprobs_N.detach()).abs() > MAX_LOG_RATIO)
            loss = loss + penalty
            terms["kl_reference"] = penalty.detach()
        if self.needs_entropy:
            assert inputs.entropy_N is not None, "this loss needs entropy_N, with its gradient"
            bonus = -self.entropy_coefficient * (weights_N * inputs.entropy_N.double()).sum()
            loss = loss + bonus
            terms["entropy_bonus"] = bonus.detach()
        # The clamp makes -inf look like an unlikely token, and an objective without a ratio never sees the sampler's
        # NaN: neither may stay hidden.
        finite = torch.stack([x.isfinite().all() for x in inputs.numbers().values()]).all()
        loss = torch.where(finite, loss, torch.nan)
        return LossOutput(loss=loss, clipped_N=clipped_N, clamped_N=clamped_N, terms=terms)
