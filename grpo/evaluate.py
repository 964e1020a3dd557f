"""Evaluation on held-out prompts: by the servers that sample for training, between two steps, at one weight version.

Its completions never enter the stream or the ledger. Every token's version label is checked: an evaluation that
straddled a sync would be of no policy at all, and is an error.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo.ledger import Ledger
from grpo.progress import Display
from grpo.record import Recorder, turns
from grpo.rollout.loader import Loader
from grpo.types import Completion, Prompt, Sampling

Z = 1.959963984540054  # of a 95 % interval
BOOTSTRAPS = 2000


@dataclass(slots=True)
class Evaluator:
    """Evaluates every set of `sets` with `samples` completions a prompt; `sampling.temperature` 0 is greedy."""

    loader: Loader
    recorder: Recorder
    sets: dict[str, list[Prompt]]
    sampling: Sampling
    samples: int
    timeout: float

    def __call__(self, step: int, version: int) -> dict[str, dict[str, Any]]:
        """One line of evals.jsonl per set, by its name."""
        return {name: self._evaluate(name, prompts, step, version) for name, prompts in self.sets.items()}

    def _evaluate(self, name: str, prompts: list[Prompt], step: int, version: int) -> dict[str, Any]:
        groups = self.loader.sample(prompts, self.sampling, self.samples, self.timeout)
        answers = [group.completions for group in groups]
        for completion in (c for row in answers for c in row):
            assert set(completion.versions) == {version}, (
                f"evaluation at version {version} got tokens of versions {sorted(set(completion.versions))}"
            )
        # a completion that is missing (`Aside.sample`) has no score
        rewards = [[*(c.reward for c in row), *[None] * (self.samples - len(row))] for row in answers]
        line = {
            "step": step,
            "version": version,
            "name": name,
            **summarize(rewards),
            "samples": self.samples,
            "temperature": self.sampling.temperature,
            "length_mean": _mean([c.tokens for row in answers for c in row]),
            "truncated_fraction": _mean([float(c.truncated) for row in answers for c in row]),
            "time/elapsed_s": self.recorder.elapsed_s,
        }
        rollouts = [_line(step, name, group.prompt, c) for group in groups for c in group.completions]
        self.recorder.evaluation(line, rollouts)
        return line


@dataclass(slots=True)
class Evaluation:
    """mode=eval: no training. The model is synced to the servers as version 0 and proven, as a training run begins, so
    that what is evaluated is `model.path` whatever the servers held before; then every set, once."""

    loader: Loader
    weights: Any  # a `WeightSync`
    prove: Callable[[int], dict[str, float]]
    evaluator: Evaluator
    recorder: Recorder
    ledger: Ledger
    display: Display
    evals: dict[str, dict[str, Any]] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    phase: str = "evaluation"  # for the watchdog

    def run(self) -> str:
        """Says what was done. Raises what fails."""
        started = time.monotonic()
        self.weights.sync(0)
        self.recorder.update_status(proof=self.prove(0))
        synced = time.monotonic()
        for name, line in self.evaluator(0, 0).items():
            self.evals[name] = {"before": line, "after": line}
            self.display.evaluation(name, line)
        self.totals = {"time/sync_s": synced - started, "time/evaluation_s": time.monotonic() - synced}
        return "every held-out set evaluated"

    def try_save(self) -> None:
        """Nothing was trained."""


def summarize(rewards: list[list[float | None]]) -> dict[str, Any]:
    """Mean reward over prompts with a 95 % interval; "accuracy" and pass@k where every reward is 0 or 1.

    rewards[p][i] is completion i of prompt p; None is "not scored", counted and left out. The interval: Wilson's for
    one binary completion a prompt, else a bootstrap over prompts (completions of one prompt are not independent). Where
    all are right or all wrong a bootstrap has no width, which would claim certainty: there it is Wilson's over prompts.
    pass@k is the unbiased estimate 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374) with each prompt's
    own n of scored completions; so pass@1 is the accuracy. A k that not every scored prompt has is left out: other
    prompts would be compared.
    """
    scored = [[r for r in row if r is not None] for row in rewards]
    rows = [row for row in scored if row]
    unscored = sum(len(row) for row in rewards) - sum(len(row) for row in rows)
    if not rows:
        return {"accuracy": None, "reward": None, "n": 0, "low": None, "high": None, "unscored": unscored}
    means = [sum(row) / len(row) for row in rows]
    mean = sum(means) / len(means)
    binary = all(r in (0.0, 1.0) for row in rows for r in row)
    if binary and (all(len(row) == 1 for row in rows) or mean in (0.0, 1.0)):
        low, high = wilson(sum(means), len(means))
    else:
        low, high = bootstrap(means)
    result: dict[str, Any] = {
        "accuracy": mean if binary else None,
        "reward": mean,
        "n": len(rows),
        "low": low,
        "high": high,
        "unscored": unscored,
    }
    samples = min(len(row) for row in rows)
    if binary and max(len(row) for row in rewards) > 1:
        result["pass"] = {
            str(k): _mean([pass_at_k(len(row), int(sum(row)), k) for row in rows])
            for k in (2**i for i in range(samples.bit_length()))
        }
    return result


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (Wilson 1927): right also near 0 and 1, where the normal one is not."""
    p = successes / n
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(means: list[float]) -> tuple[float, float]:
    """95 % percentile interval of the mean over prompts; the same numbers give the same interval."""
    draw = random.Random(0)
    n = len(means)
    samples = sorted(sum(draw.choices(means, k=n)) / n for _ in range(BOOTSTRAPS))
    return samples[int(0.025 * BOOTSTRAPS)], samples[int(0.975 * BOOTSTRAPS) - 1]


def pass_at_k(n: int, correct: int, k: int) -> float:
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else math.nan


def _line(step: int, name: str, prompt: Prompt, completion: Completion) -> dict[str, Any]:
    return {
        "step": step,
        "name": name,
        "row": prompt.row,
        "index": completion.index,
        "prompt": prompt.text,
        "completion": completion.transcript,
        "reward": completion.reward,
        "rewards": completion.rewards,
        "tokens": completion.tokens,
        "finish_reason": completion.finish_reason,
        **turns(completion),
    }
