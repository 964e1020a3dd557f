"""One training step: from the groups of a batch to updated parameters and the metrics that say what happened.

One denominator (law 5): before the first micro-batch every trained token of an optimizer step has its weight, and the
loss is the plain sum of weight * token loss. How the batch is split into micro-batches cannot change anything.

With `minibatches` > 1 the batch is cut into that many optimizer steps. The policy before the first of them is then
computed once more for the whole batch: it is the proximal policy of decoupled losses, and without it the diagnostics
would mix the batch's own updates into the lag (at lag 0 they must show the engine's numerics and nothing else).

Left out: where groups come from, weight sync, the run folder. Shapes: N trained tokens of a micro-batch.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from grpo.batch import MicroBatch, Sequence
from grpo.diagnostics import diagnostics
from grpo.groups import settle_outcomes
from grpo.ledger import Ledger
from grpo.losses.base import Loss, LossInputs
from grpo.model import Policy
from grpo.optimizer import Optimizer
from grpo.types import TRAINED, Completion, Group


class NonFiniteStep(RuntimeError):  # noqa: N818
    """A NaN or an infinity in the loss or the gradient. The step was refused: the parameters are as before it."""


class Reference(Protocol):
    """What a KL penalty pulls to."""

    def logprobs(self, mb: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """As `Policy.logprobs`."""
        ...


class TrainStep:
    """Trains one batch at a time.

    temperature: of the sampler; logprobs are of the tempered distribution (law 4). reward_weights: by name, for gdpo.
    pad_to: micro-batches are filled up to a multiple of this many tokens (compiled layers want few lengths).
    check: called between micro-batches; raises what has failed elsewhere, so that a long step does not hide it.
    share_prompts: compute a prompt once per micro-batch (`grpo.batch`); ValueError for a model where that is wrong.
    keep_logprobs: leave the policy's logprobs with the completions, for the record of tokens.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        reference: Reference | None,
        optimizer: Optimizer,
        loss: Loss,
        ledger: Ledger,
        temperature: float,
        minibatches: int,
        tokens_per_microbatch: int,
        reward_weights: dict[str, float],
        pad_to: int | None = None,
        share_prompts: bool = False,
        check: Callable[[], None] = lambda: None,
        keep_logprobs: bool = False,
    ) -> None:
        assert not loss.needs_reference or reference is not None, "the loss needs a reference policy"
        if share_prompts:
            policy.check_shared_prompts()
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.loss = loss
        self.ledger = ledger
        self.temperature = temperature
        self.minibatches = minibatches
        self.tokens_per_microbatch = tokens_per_microbatch
        self.reward_weights = reward_weights
        self.pad_to = pad_to
        self.share_prompts = share_prompts
        self.check = check
        self.keep_logprobs = keep_logprobs

    def __call__(self, groups: list[Group], version: int) -> dict[str, float]:
        """Train on the kept groups; book every completion's tokens; the step's metrics.

        `version` is the trainer's: the lag of a token is counted from it. A batch without a single trained token
        makes no step and changes nothing. Raises NonFiniteStep, with the parameters untouched.
        """
        rate = self.optimizer.next_lr
        batch = self.prepare(groups, version)
        metrics = StepMetrics()
        for number, part in enumerate(batch.parts):
            if part:
                self._optimizer_step(batch, number, metrics)
        kept = _policy_logprobs(batch, metrics) if self.keep_logprobs else {}
        for group in groups:
            for completion in group.completions:
                completion.policy_logprobs = kept.get(_name(completion), [])
                self.ledger.settle_completion(completion, batch.outcomes[id(completion)])
        return metrics.result() | {"lr": rate, "optimizer_steps": sum(map(bool, batch.parts))}

    def prepare(self, groups: list[Group], version: int) -> "Prepared":
        """Everything that is fixed before the first optimizer step: advantages, weights, micro-batches, proximal."""
        outcomes = settle_outcomes(groups, self.loss, self.reward_weights)
        completions = [(g, c) for g in groups if g.discarded is None for c in g.completions]
        parts = [self._minibatch(part, outcomes, version) for part in _cut(completions, self.minibatches)]
        proximal = [self._logprobs(part) for part in parts] if sum(map(bool, parts)) > 1 else None
        return Prepared(outcomes, parts, proximal)

    def _minibatch(self, part: list[tuple[Group, Completion]], outcomes: dict[int, str], version: int) -> "Part":
        chosen = [(g, c) for g, c in part if outcomes[id(c)] == TRAINED]
        lengths = [c.tokens if outcomes[id(c)] == TRAINED else 0 for _, c in part]
        weights = [w for w, n in zip(self.loss.sequence_weights(lengths, len(part)), lengths, strict=True) if n]
        sequences = []
        for (group, completion), weight in zip(chosen, weights, strict=True):
            assert completion.advantage is not None
            sequences.append(
                Sequence(
                    prompt_ids=group.prompt.token_ids,
                    completion_ids=completion.token_ids,
                    sampler_logprobs=completion.logprobs,
                    lags=[version - v for v in completion.versions],
                    advantage=completion.advantage,
                    weight=weight,
                    mask=completion.mask if completion.turns else None,
                )
            )
        if not sequences:
            return []
        micro_batches = self.policy.pack(
            sequences,
            tokens_per_microbatch=self.tokens_per_microbatch,
            pad_to=self.pad_to,
            share_prompts=self.share_prompts,
        )
        names = [_name(c) for _, c in chosen]
        return [(mb.to(self.policy.device), [names[row] for row in mb.rows]) for mb in micro_batches]

    def _logprobs(self, part: "Part") -> list[Tensor]:
        with torch.no_grad():
            return [self.policy.logprobs(mb, self.temperature)[0] for mb, _ in part]

    def backward(self, batch: "Prepared", number: int, metrics: "StepMetrics") -> float:
        """The loss of one part under the policy as it is; its gradient is added to the parameters'.

        Raises NonFiniteStep, with the gradients forgotten, if the loss is not finite.
        """
        part, proximal = batch.parts[number], batch.proximal and batch.proximal[number]
        inputs_of: list[tuple[LossInputs, list[str]]] = []
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.policy.device)
        for number, (mb, names) in enumerate(part):
            self.check()
            logprobs_N, entropy_N = self.policy.logprobs(mb, self.temperature, entropy_grad=self.loss.needs_entropy)
            before_N = proximal[number] if proximal else logprobs_N.detach()
            reference_N = None
            if self.loss.needs_reference:
                assert self.reference is not None
                with torch.no_grad():
                    reference_N = self.reference.logprobs(mb, self.temperature)[0]
            inputs = LossInputs(
                logprobs_N=logprobs_N,
                sampler_logprobs_N=mb.sampler_logprobs_N,
                advantages_N=mb.advantages_N,
                weights_N=mb.weights_N,
                sequence_N=mb.sequence_N,
                num_sequences=mb.num_sequences,
                proximal_logprobs_N=before_N,
                reference_logprobs_N=reference_N,
                entropy_N=entropy_N,
            )
            output = self.loss(inputs)
            output.loss.backward()
            loss_sum += output.loss.detach()
            inputs.logprobs_N = logprobs_N.detach()
            inputs.entropy_N = entropy_N.detach()
            inputs_of.append((inputs, names))
            metrics.micro_batch(mb, before_N, inputs.entropy_N, output.clipped_N, output.clamped_N, output.terms)
        if not math.isfinite(float(loss_sum)):
            self.optimizer.zero_grad()
            raise NonFiniteStep(f"the step is refused, its loss is {float(loss_sum)}: {_bad_samples(inputs_of)}")
        return float(loss_sum)

    def _optimizer_step(self, batch: "Prepared", number: int, metrics: "StepMetrics") -> None:
        loss = self.backward(batch, number, metrics)
        norm = self.optimizer.step()
        if not math.isfinite(norm):
            samples = ", ".join(name for _, names in batch.parts[number] for name in names)
            raise NonFiniteStep(
                f"the step is refused: the loss is finite, its gradient's norm is {norm}; samples: {samples}"
            )
        metrics.optimizer_step(loss, norm, self.optimizer.update_size)


# The micro-batches of one optimizer step, each with the names of its samples; empty if nothing of it is trained.
Part = list[tuple[MicroBatch, list[str]]]


@dataclass(slots=True, frozen=True)
class Prepared:
    """A batch before its first optimizer step. `proximal`: logprobs of each part's micro-batches, by the policy then;
    None with one optimizer step, whose policy is the proximal one. `outcomes` are by id() of a completion."""

    outcomes: dict[int, str]
    parts: list[Part]
    proximal: list[list[Tensor]] | None


def _cut(items: list[tuple[Group, Completion]], parts: int) -> list[list[tuple[Group, Completion]]]:
    """Contiguous parts whose sizes differ by at most one; fewer where there are fewer items."""
    parts = max(1, min(parts, len(items)))
    borders = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(borders)]


def _name(completion: Completion) -> str:
    return f"{completion.group}/{completion.index}"


def _policy_logprobs(batch: Prepared, metrics: "StepMetrics") -> dict[str, list[float]]:
    """By sample: logprobs of its trained tokens under the policy before the first update."""
    found: dict[str, list[float]] = {}
    micro_batches = [pair for part in batch.parts for pair in part]
    for (mb, names), logprobs_N in zip(micro_batches, metrics.arrays.get("logprobs_N", []), strict=True):
        found |= {name: part.tolist() for name, part in zip(names, logprobs_N.cpu().split(mb.lengths), strict=True)}
    return found


def _bad_samples(inputs_of: list[tuple[LossInputs, list[str]]]) -> str:
    found = [f"sample {names[row]}: {what}" for inputs, names in inputs_of for row, what in inputs.nonfinite().items()]
    return "; ".join(found) or "all inputs are finite, the loss itself overflows"


class StepMetrics:
    """Collects what the micro-batches of one batch say, on their device; one copy to the CPU at the end."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[Tensor]] = {}
        self.terms: dict[str, list[Tensor]] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.moves: list[float] = []

    def micro_batch(
        self,
        mb: MicroBatch,
        before_N: Tensor,
        entropy_N: Tensor,
        clipped_N: Tensor,
        clamped_N: Tensor,
        terms: dict[str, Tensor],
    ) -> None:
        arrays = {
            "logprobs_N": before_N,
            "sampler_logprobs_N": mb.sampler_logprobs_N,
            "lag_N": mb.lag_N,
            "advantages_N": mb.advantages_N,
            "clipped_N": clipped_N,
            "clamped_N": clamped_N,
            "entropy_N": entropy_N,
        }
        for name, values in arrays.items():
            self.arrays.setdefault(name, []).append(values)
        for name, value in terms.items():
            self.terms.setdefault(name, []).append(value)

    def optimizer_step(self, loss: float, norm: float, moved: float) -> None:
        self.losses.append(loss)
        self.norms.append(norm)
        self.moves.append(moved)

    def result(self) -> dict[str, float]:
        """Loss, norm and update size are means over the batch's optimizer steps; zeros for a batch without one."""
        steps = len(self.losses)
        if not steps:
            return {"loss": 0.0, "grad_norm": 0.0, "update_size": 0.0}
        sums = {"loss": sum(self.losses), "grad_norm": sum(self.norms), "update_size": sum(self.moves)}
        metrics = {name: total / steps for name, total in sums.items()}
        metrics |= {f"loss/{name}": float(torch.stack(values).sum()) / steps for name, values in self.terms.items()}
        return metrics | diagnostics(**{name: torch.cat(values) for name, values in self.arrays.items()})
