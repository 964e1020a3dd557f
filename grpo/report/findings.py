"""What a practised eye would notice in a run: rules with the number, the plot to look at and the knob to turn.

A rule speaks only when its number is known, and trends only from `TREND_STEPS` steps on. Thresholds are rules of thumb;
each stands beside its reason. The order is that of the page: wrong data first, then learning, then speed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grpo.report.metrics import Eval, Metrics
from grpo.report.read import Level, lookup, number
from grpo.report.rollouts import Counts

TREND_STEPS = 10
EDGE = 0.1  # "at first" and "at the end" are this share of the steps


@dataclass(slots=True, frozen=True)
class Facts:
    """What the rules look at. `idle`: share of the wall-clock that "trainer" and "sampler" waited, where known."""

    metrics: Metrics
    evals: list[Eval]
    counts: Counts
    config: dict[str, Any]
    idle: dict[str, float]

    @property
    def max_staleness(self) -> float | None:
        return number(lookup(self.config, "rollout.max_staleness"))

    def start(self, key: str) -> float | None:
        return self.metrics.series.mean(key, 0.0, EDGE)

    def end(self, key: str) -> float | None:
        return self.metrics.series.mean(key, 1 - EDGE, 1.0)

    @property
    def has_trend(self) -> bool:
        return self.metrics.series.lines >= TREND_STEPS


@dataclass(slots=True, frozen=True)
class Finding:
    """`plot` is the id of a section of the page; `knobs` are config keys, most useful first."""

    level: Level
    number: str
    text: str
    plot: str
    knobs: tuple[str, ...] = ()


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def find(facts: Facts) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(facts)]


def ledger_adds_up(f: Facts) -> Iterator[Finding]:
    if f.metrics.ledger_broken:
        step = f.metrics.ledger_broken_step
        yield Finding(
            "error",
            f"{f.metrics.ledger_broken:,} of {f.metrics.ledger_lines:,} lines",
            f"The token ledger does not add up, first at step {step or 0:g}: tokens were lost or counted twice. "
            "This is a bug of the framework (law 6).",
            "ledger",
        )


def lag_within_bound(f: Facts) -> Iterator[Finding]:
    bound = f.max_staleness
    highest = max([f.metrics.series.highest("lag/max") or 0.0, *f.counts.trained_lags])
    if bound is not None and highest > bound:
        yield Finding(
            "error",
            f"lag {highest:g}",
            f"Data older than rollout.max_staleness={bound:g} was trained. This is a bug of the framework (law 1).",
            "staleness",
        )


def engine_agrees(f: Facts) -> Iterator[Finding]:
    kl = f.metrics.lags.get(0, {}).get("kl")
    dtype = str(lookup(f.config, "model.dtype") or "")
    # float32 engines differ by 1e-12 nats; the largest floor measured between bfloat16 engines is 1e-3.
    limit = 1e-6 if "32" in dtype else number(lookup(f.config, "loss.drift_kl")) or 5e-3
    if kl is not None and kl > limit:
        yield Finding(
            "error",
            f"KL {kl:.2g} at lag 0",
            f"Sampler and trainer disagree on data of the same weights (expected below {limit:g} with {dtype or 'this'}"
            " precision): the ratio corrects for the engine, not for staleness. Look for sampling parameters, a stale "
            "layer after the sync, or low precision.",
            "staleness",
            ("model.dtype", "sync.verify_every", "loss.correction"),
        )


def parameters_move(f: Facts) -> Iterator[Finding]:
    highest = f.metrics.series.highest
    gradient, rate = highest("grad_norm"), highest("lr")
    if 0 in (gradient, rate, highest("update_size")):
        what = "gradient" if gradient == 0 else "learning rate" if rate == 0 else "update of the parameters"
        yield Finding("error", "0", f"The {what} is zero in every step: no parameter moved.", "update", ("model.lr",))


def groups_have_signal(f: Facts) -> Iterator[Finding]:
    share = f.counts.zero_variance / f.counts.groups if f.counts.groups else None
    if share is None or share <= 0.5:
        return
    yield Finding(
        "error" if share > 0.95 else "warning",
        f"{percent(share)} of groups",
        "All their rewards are equal, so they teach nothing: the task is too easy or too hard, or the reward cannot "
        "tell the completions apart.",
        "completions",
        ("rollout.group_size", "rollout.temperature", "data.reward"),
    )


def evaluation_follows_reward(f: Facts) -> Iterator[Finding]:
    start, end = f.start("reward/mean"), f.end("reward/mean")
    if start is None or end is None or len(f.evals) < 2 or not f.has_trend:
        return
    before, after = f.evals[0], f.evals[-1]
    spread = f.metrics.series.mean("reward/std") or abs(start) or 1.0
    if after.high is not None and before.low is not None and after.high < before.low:
        yield Finding(
            "error",
            f"{before.value:.3f} → {after.value:.3f}",
            f"The evaluation {after.name} got worse, by more than its intervals.",
            "learning",
            ("model.lr", "rollout.max_staleness", "loss.kl_coefficient"),
        )
    elif end - start > 0.1 * spread and after.value <= before.value:
        yield Finding(
            "warning",
            f"reward +{end - start:.3g}, evaluation {after.value - before.value:+.3g}",
            "The training reward rises and the evaluation does not: memorised prompts, or a reward that can be "
            "satisfied without the task. Read the best rollouts.",
            "learning",
            ("data.reward", "loss.kl_coefficient", "model.lr"),
        )


def entropy_holds(f: Facts) -> Iterator[Finding]:
    start, end = f.start("entropy"), f.end("entropy")
    if not f.has_trend or not start or end is None or end > 0.2 * start:
        return
    solved = bool(f.evals) and 0.9 <= f.evals[-1].value <= 1
    yield Finding(
        "note" if solved else "warning",
        f"{start:.3g} → {end:.3g} nats",
        "Entropy fell below a fifth of where it began"
        + (", with the task solved." if solved else ": the policy has stopped exploring, and groups become alike."),
        "update",
        ("train.steps",) if solved else ("loss.entropy_coefficient", "loss.clip_high", "model.lr"),
    )


def few_are_truncated(f: Facts) -> Iterator[Finding]:
    share = f.end("completion/truncated_fraction")
    if share is not None and share > 0.2:
        yield Finding(
            "warning",
            f"{percent(share)} truncated",
            "Completions are cut at data.max_tokens at the end of the run: their reward is that of half an answer.",
            "completions",
            ("data.max_tokens", "loss.mask_truncated", "loss.overlong_share"),
        )


def data_is_near_the_policy(f: Facts) -> Iterator[Finding]:
    for lag, figures in f.metrics.lags.items():
        ess = figures.get("ess")
        if lag > 0 and ess is not None and ess < 0.5 and figures["tokens"] >= 100:
            yield Finding(
                "warning",
                f"ESS {ess:.2f} at lag {lag}",
                "Importance weights are so uneven that data of this lag counts for less than half its tokens.",
                "staleness",
                ("rollout.max_staleness", "model.lr", "loss.correction"),
            )
            return  # older data is worse: one is enough


def little_is_clipped(f: Facts) -> Iterator[Finding]:
    share = f.metrics.series.mean("clip/fraction")
    if share is not None and share > 0.3:
        yield Finding(
            "warning",
            f"{percent(share)} clipped",
            "So many tokens are outside the clip range that the gradient is that of a small, biased part of the batch.",
            "staleness",
            ("model.lr", "rollout.max_staleness", "loss.clip_high"),
        )


def little_is_wasted(f: Facts) -> Iterator[Finding]:
    ledger = f.metrics.ledger()
    if ledger and ledger["generated"]:
        share = (ledger["masked"] + ledger["discarded"]) / ledger["generated"]
        if share > 0.1:
            yield Finding(
                "warning",
                f"{percent(share)} of tokens",
                "These were generated, then masked or discarded. The ledger says why.",
                "ledger",
                ("rollout.group_size", "data.max_tokens", "loss.mask_truncated"),
            )


def nobody_idles(f: Facts) -> Iterator[Finding]:
    trainer, sampler = f.idle.get("trainer"), f.idle.get("sampler")
    if trainer is not None and trainer > 0.3:
        yield Finding(
            "warning",
            f"trainer idle {percent(trainer)}",
            "The trainer waits for rollouts: generation is the bottleneck.",
            "time",
            ("rollout.max_staleness", "rollout.max_inflight", "rollout.urls"),
        )
    if sampler is not None and sampler > 0.3:
        yield Finding(
            "warning",
            f"sampler idle {percent(sampler)}",
            "The server has nothing to do, held back by the staleness bound or by few open requests: training is the "
            "bottleneck.",
            "time",
            ("train.batch_size", "rollout.max_staleness", "train.tokens_per_microbatch"),
        )


def time_is_accounted_for(f: Facts) -> Iterator[Finding]:
    shares = f.metrics.time_shares()
    share = shares["other"] / sum(shares.values()) if shares else 0.0
    if share > 0.1:
        yield Finding(
            "note",
            f"{percent(share)} of the time",
            "This share of the steps is neither waiting, training nor syncing.",
            "time",
        )


def lag_below_bound(f: Facts) -> Iterator[Finding]:
    bound, mean = f.max_staleness, f.metrics.series.mean("lag/mean", 0.25, 1.0)
    if bound and mean is not None and mean > 0.9 * bound and f.has_trend:
        yield Finding(
            "note",
            f"mean lag {mean:.2f} of {bound:g}",
            "Lag is at its bound all the time: the sampler is always as far ahead as it may be."
            # One less than 1 is synchronous training, which is another matter.
            + (" A smaller bound gives fresher data; sweep it to see what it costs in speed." if bound > 1 else ""),
            "staleness",
            ("rollout.max_staleness",),
        )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    ledger_adds_up,
    lag_within_bound,
    engine_agrees,
    parameters_move,
    evaluation_follows_reward,
    groups_have_signal,
    entropy_holds,
    few_are_truncated,
    data_is_near_the_policy,
    little_is_clipped,
    little_is_wasted,
    nobody_idles,
    time_is_accounted_for,
    lag_below_bound,
)
