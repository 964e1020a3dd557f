"""How far off-policy an optimizer batch is, and why: the engine's numerics (lag 0) or the policy's age (the rest).

A pure function of the flat arrays of a whole batch, taken before the batch's first update. Everything is accumulated in
float64 over tokens, so the figures do not depend on micro-batches. `grpo.drift` raises the alarm on them.

With d = log new - log sampler of a sampled token and w = exp(d), d bounded to +-20:

- kl, kl_k1: KL(sampler || new) per token, in nats: mean of k3 = exp(d) - 1 - d, and of k1 = -d. k3 is never negative
  and of far lower variance; where they disagree much, a few tokens decide.
- ess: (sum w)^2 / (n sum w^2), the share of tokens that the batch is worth after importance weighting. 1 on-policy.

Left out: gradient norm, update size and groups without signal, which the trainer knows; per-sequence figures.

Shapes: N trained tokens of the optimizer batch.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo.losses.tensors import MAX_LOG_RATIO

Array = NDArray[np.float64]

# Name in `lag_<k>/...` -> name over all lags.
NAMES = {
    "kl": "kl/sampler",
    "kl_k1": "kl/sampler_k1",
    "ess": "ess",
    "clip_fraction": "clip/fraction",
    "clip_fraction_positive": "clip/fraction_positive",
    "clip_fraction_negative": "clip/fraction_negative",
    "clamped_fraction": "ratio/clamped_fraction",
    "ratio_mean": "ratio/mean",
    "ratio_min": "ratio/min",
    "ratio_max": "ratio/max",
    "ratio_outside_0.9_1.1": "ratio/outside_0.9_1.1",
    "ratio_outside_0.5_2": "ratio/outside_0.5_2",
    "entropy": "entropy",
}


def diagnostics(
    *,
    logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    lag_N: Tensor,
    advantages_N: Tensor,
    clipped_N: Tensor,
    clamped_N: Tensor,
    entropy_N: Tensor,
) -> dict[str, float]:
    """Metrics of one optimizer batch, by the names of `NAMES`, plus lag/mean, lag/max, and all of them by lag.

    `logprobs_N` and `entropy_N` (nats) are the policy's before the batch's first update; `clipped_N` and `clamped_N`
    are `LossOutput`'s. `lag_N` counts versions, per token. `clip/fraction_positive` is the share of clipped tokens
    among those of positive advantage, and is left out where there are none. A batch without a token gives {}.
    """
    if logprobs_N.numel() == 0:
        return {}
    d = _numpy(logprobs_N) - _numpy(sampler_logprobs_N)
    lag, advantage, clipped, clamped, entropy = map(_numpy, (lag_N, advantages_N, clipped_N, clamped_N, entropy_N))

    def figures(chosen: NDArray[np.bool_]) -> dict[str, float]:
        return _figures(d[chosen], advantage[chosen], clipped[chosen], clamped[chosen], entropy[chosen])

    metrics = {NAMES[name]: value for name, value in figures(np.ones_like(d, dtype=bool)).items()}
    metrics["lag/mean"] = float(lag.mean())
    metrics["lag/max"] = float(lag.max())
    for k in np.unique(lag):
        chosen = lag == k
        metrics[f"lag_{int(k)}/tokens"] = float(chosen.sum())
        metrics |= {f"lag_{int(k)}/{name}": value for name, value in figures(chosen).items()}
    return metrics


def _figures(d: Array, advantage: Array, clipped: Array, clamped: Array, entropy: Array) -> dict[str, float]:
    # A non-finite d stays so: a mean that hides it would be wrong.
    d = np.where(np.isfinite(d), np.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO), np.nan)
    ratio = np.exp(d)
    result = {
        "kl": (np.expm1(d) - d).mean(),
        "kl_k1": -d.mean(),
        "ess": ratio.sum() ** 2 / (len(d) * np.square(ratio).sum()),
        "clip_fraction": clipped.mean(),
        "clamped_fraction": clamped.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "ratio_outside_0.9_1.1": ((ratio < 0.9) | (ratio > 1.1)).mean(),
        "ratio_outside_0.5_2": ((ratio < 0.5) | (ratio > 2)).mean(),
        "entropy": entropy.mean(),
    }
    for name, side in (("positive", advantage > 0), ("negative", advantage < 0)):
        if side.any():
            result[f"clip_fraction_{name}"] = clipped[side].mean()
    return {name: float(value) for name, value in result.items()}


def _numpy(values_N: Tensor) -> Array:
    return values_N.detach().to("cpu", torch.float64).numpy()
