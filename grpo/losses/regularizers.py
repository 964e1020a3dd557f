"""The KL penalty to a reference policy, per token. (The entropy bonus is the model's entropy itself: no code.)

With d = reference - new (log-probabilities of the sampled token), the estimators of KL(new || reference) per token are
k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman, "Approximating KL divergence", 2020).

What is differentiated, chosen knowingly:

- k3: the estimator itself, as GRPO's paper (arXiv:2402.03300, eq. 4) and most systems. Unbiased in value; its gradient
  is that of the *forward* KL(reference || new) when the tokens come from the current policy.
- k2: the estimator itself. Biased in value (small for small KL); its gradient, -d * grad log new, is that of the
  reverse KL(new || reference).
- k1: the value is k1, the gradient is k2's. The gradient of k1 itself has expectation zero (it is the score function),
  so as a penalty it would be noise: this is the estimator where differentiating the value cannot be meant. verl's "+"
  estimators take the k2 gradient in the same way.

On stale tokens each is an estimate under the sampler, not corrected by the ratio. Left out: the output clamp to +-10
that six peers apply (a token that is far off would lose its pull); the input clamp is +-20 as everywhere.

Shapes: N trained tokens of a micro-batch.
"""

import torch
from torch import Tensor

from grpo.losses.tensors import clamp_log_ratio

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(estimator: str, logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Per-token estimate [N] of KL(new || reference) in nats, with the gradient described above."""
    d_N = clamp_log_ratio(reference_logprobs_N - logprobs_N)
    if estimator == "k1":
        k2_N = d_N.square() / 2
        return k2_N + (-d_N - k2_N).detach()
    if estimator == "k2":
        return d_N.square() / 2
    if estimator == "k3":
        # expm1(d) - d and not exp(d) - 1 - d: at d = 1e-3 the latter is off by 7 % in float32.
        return torch.expm1(d_N) - d_N
    raise ValueError(f"loss.kl_estimator={estimator!r}: choose one of {', '.join(KL_ESTIMATORS)}")
