"""The losses of a comparison on one recorded batch: value, gradient and diagnostics of each under the same weights.

Everything is `grpo.step`'s own: the same advantages, weights, micro-batches, forward and backward passes as in
training; only the optimizer does not step. With several minibatches the run's own path is followed: the run's own loss
and its restored optimizer make the batch's updates, and each loss is taken, minibatch by minibatch, at the weights and
with the proximal policy that the run had there. Figures are then means over the minibatches, as in metrics.jsonl.

Shapes: N trained tokens of the batch.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from grpo.ledger import Ledger
from grpo.losses.base import Loss, LossInputs, LossOutput
from grpo.model import Policy
from grpo.optimizer import Optimizer, total_norm
from grpo.step import NonFiniteStep, Reference, StepMetrics, TrainStep
from grpo.token_record import TokenRecord
from grpo.types import Completion, Group

PIECE = 2**24  # elements of a product in float64


@dataclass(slots=True, frozen=True)
class Contender:
    """A loss of the comparison; `keys` are its resolved configuration."""

    name: str
    keys: dict[str, Any]
    loss: Loss


@dataclass(slots=True, frozen=True)
class Comparison:
    """`metrics[i]` of loss i, by the names of metrics.jsonl; `cosines[i][j]` of the gradients of i and j.

    None where one of the two is 0. With several minibatches it is the cosine of their gradients, end to end.
    """

    metrics: list[dict[str, float]]
    cosines: list[list[float | None]]


def compare(
    record: TokenRecord,
    losses: Sequence[Contender],
    *,
    version: int,
    policy: Policy,
    reference: Reference | None,
    optimizer: Optimizer,
    tokens_per_microbatch: int,
    share_prompts: bool,
) -> Comparison:
    """The first loss is the run's own. `version`: of the policy's weights; a token's lag counts from it.

    With several minibatches (`record.facts`) the policy and the optimizer are stepped, except after the last. Raises
    ValueError where the recorded advantages are not those of the recorded rewards.
    """
    facts, own = record.facts, losses[0].loss
    watched = [_Watched(each.loss) for each in losses]
    steps = [
        TrainStep(
            policy=policy,
            reference=reference,
            optimizer=optimizer,
            loss=cast(Loss, loss),
            ledger=Ledger(),
            temperature=facts["temperature"],
            minibatches=facts["minibatches"],
            tokens_per_microbatch=tokens_per_microbatch,
            share_prompts=share_prompts,
            reward_weights=facts["reward_weights"],
            pad_to=policy.pad_to,
        )
        for loss in watched
    ]
    batches = []
    for step, each in zip(steps, losses, strict=True):
        groups = _groups(record, own, each.loss)
        batches.append(step.prepare(groups, version))
        if each is losses[0]:
            _check_advantages(record, [c for g in groups for c in g.completions])
    metrics = [StepMetrics() for _ in losses]
    products = torch.zeros(len(losses), len(losses), dtype=torch.float64)
    numbers = range(len(batches[0].parts))
    for number in numbers:
        gradients: list[list[Tensor] | None] = [None] * len(losses)
        for i in reversed(range(len(losses))):  # the run's own comes last: its gradient may be stepped with
            if not batches[i].parts[number]:
                continue
            try:
                value = steps[i].backward(batches[i], number, metrics[i])
            except NonFiniteStep as error:
                raise ValueError(f"{losses[i].name}: {error}") from error
            found = optimizer.gradients()
            metrics[i].optimizer_step(value, total_norm(found), 0.0)
            gradients[i] = [g.detach().to("cpu", copy=True) for g in found]
            if i or number == numbers[-1]:
                optimizer.zero_grad()
        products += _products(gradients)
        if number != numbers[-1] and batches[0].parts[number]:
            optimizer.step()
    results = []
    for step_metrics, loss in zip(metrics, watched, strict=True):
        result = step_metrics.result() | loss.figures(step_metrics)
        del result["update_size"]
        results.append(result)
    return Comparison(results, _cosines(products))


class _Watched:
    """A loss that keeps what its objective and correction make of each token: w of the gradient -w A grad log p.

    1 for REINFORCE, the ratio for an unclipped objective, 0 for a clipped token. It is read off the gradient, so it
    holds for any loss; KL penalty and entropy bonus are left out of it.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.objective = copy.copy(loss)
        self.objective.kl_coefficient = self.objective.entropy_coefficient = 0.0
        self.factors: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loss, name)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        logprobs_N = inputs.logprobs_N.detach().double().requires_grad_()
        self.objective(replace(inputs, logprobs_N=logprobs_N)).loss.backward()
        assert logprobs_N.grad is not None
        self.factors.append((-logprobs_N.grad / (inputs.weights_N.double() * inputs.advantages_N.double())).cpu())
        return self.loss(inputs)

    def figures(self, metrics: StepMetrics) -> dict[str, float]:
        """`weight/mean`, `weight/ess` (effective sample size over n) of the tokens with an advantage, also by lag."""
        if not self.factors:
            return {}
        factor_N = torch.cat(self.factors)
        lag_N, advantage_N = (torch.cat(metrics.arrays[name]).cpu() for name in ("lag_N", "advantages_N"))
        signal_N = advantage_N != 0
        figures = _weights(factor_N[signal_N], "weight/")
        for lag in lag_N.unique().tolist():
            figures |= _weights(factor_N[signal_N & (lag_N == lag)], f"lag_{lag}/weight_")
        return figures


def _weights(factor_N: Tensor, prefix: str) -> dict[str, float]:
    if not len(factor_N):
        return {}
    squares = float(factor_N.square().sum())
    ess = float(factor_N.sum()) ** 2 / (len(factor_N) * squares) if squares else 0.0
    return {f"{prefix}mean": float(factor_N.mean()), f"{prefix}ess": ess}


def _groups(record: TokenRecord, own: Loss, loss: Loss) -> list[Group]:
    """Groups for one loss to settle, with its penalty on length in place of the run's own.

    Which groups were discarded stays as it was. Raises ValueError where the length would be punished twice.
    """
    same = all(getattr(loss, key) == getattr(own, key) for key in ("overlong_share", "overlong_factor", "max_tokens"))
    change = (own.overlong_share > 0 or loss.overlong_share > 0) and not same
    groups = []
    for group in record.groups:
        completions = [replace(c, rewards=dict(c.rewards)) for c in group.completions]
        for completion in completions if change else ():
            if completion.reward is None:
                continue
            if own.overlong_share > 0:
                completion.reward -= completion.rewards.pop("overlong", None) or 0.0
            if "overlong" in completion.rewards and loss.overlong_share > 0:
                raise ValueError(
                    f"loss.overlong_share={loss.overlong_share:g}: the run's rewards punish length already (overlong)"
                )
            completion.reward += loss.length_penalty(completion.tokens)
        groups.append(replace(group, completions=completions))
    return groups


def _check_advantages(record: TokenRecord, completions: list[Completion]) -> None:
    for then, now in zip(record.advantages, completions, strict=True):
        if then != now.advantage and not (then and now.advantage and abs(then - now.advantage) <= 1e-9 * abs(then)):
            raise ValueError(
                f"step {record.step}: completion {now.group}/{now.index} was trained with advantage {then}, its "
                f"recorded rewards give {now.advantage}; the record was written by another version"
            )


def _products(gradients: Sequence[list[Tensor] | None]) -> Tensor:
    """Inner products of all pairs; 0 where one is missing."""
    result = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for i, a in enumerate(gradients):
        for j, b in enumerate(gradients[: i + 1]):
            if a is not None and b is not None:
                result[i, j] = result[j, i] = sum(_product(x, y) for x, y in zip(a, b, strict=True))
    return result


def _product(x: Tensor, y: Tensor) -> float:
    pieces = zip(x.reshape(-1).split(PIECE), y.reshape(-1).split(PIECE), strict=True)
    return sum(float(a.double().dot(b.double())) for a, b in pieces)


def _cosines(products: Tensor) -> list[list[float | None]]:
    lengths = products.diagonal().sqrt()
    scale = lengths[:, None] * lengths[None, :]
    return [
        [float(p / s) if s > 0 else None for p, s in zip(row, scales, strict=True)]
        for row, scales in zip(products, scale, strict=True)
    ]
