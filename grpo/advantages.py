"""From the rewards of groups to advantages: pure functions, in float64, over the groups of one optimizer batch.

A reward that is None or NaN is "not scored": it takes part in no mean and no std, and its advantage is None, so one
failed verifier does not poison its seven siblings (in nine of eleven systems compared, it does). Conventions, chosen
knowingly:

- std: ddof 1, and 1e-6 added to it, as verl, SkyRL, slime and ROLL; TRL has 1e-4, open-instruct ddof 0. With n = 8 the
  choice of ddof scales every advantage by 0.935.
- equal rewards by exact comparison (max == min): in float32, the std of eight times 0.95 is 6e-8 and not 0, and 6e-8
  over an epsilon of 1e-9 is an advantage of 60. Equal groups get exactly 0.
- a group with fewer than two scored rewards has no baseline: its advantages are None. A group *size* of one is refused.

Left out: anything per token (REINFORCE++ whitens over tokens, so that long completions decide the scale) and a critic.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

EPS = 1e-6

Rewards = Sequence[float | None]


def advantages(
    kind: str,
    rewards: Sequence[Rewards],
    components: Sequence[Sequence[dict[str, float | None]]] | None = None,
    weights: dict[str, float] | None = None,
) -> list[list[float | None]]:
    """The advantage of every completion of an optimizer batch; `rewards[g][i]` belongs to completion i of group g.

    With m, s the mean and std of the group's scored rewards and n their number:

    - mean_std: (r - m) / (s + 1e-6) (GRPO, arXiv:2402.03300)
    - mean: r - m (Dr. GRPO, arXiv:2503.20783)
    - rloo: r - mean of the others = n / (n - 1) * (r - m) (arXiv:2402.14740)
    - batch_std: (r - m) / (std of all scored rewards of the batch, not centred by group, + 1e-6) (TRL `batch`;
      arXiv:2508.08221)
    - maxrl: (r - m) / m (arXiv:2602.02710), for rewards of 0 or above
    - gdpo: mean_std of each named reward in its group, weighted sum, then divided by (std + 1e-6) over the sequences
      of the batch (arXiv:2601.05242). Needs `components[g][i]`, the rewards by name, with `weights` by name (default
      1). A component that is not scored adds nothing to its completion, as in TRL.

    ValueError: an unknown kind, a group of one, an infinite reward, a negative one with maxrl, gdpo without components.
    """
    if kind not in KINDS:
        raise ValueError(f"loss.advantage={kind!r}: choose one of {', '.join(KINDS)}")
    for group in rewards:
        if len(group) < 2:
            raise ValueError(
                f"rollout.group_size={len(group)}: loss.advantage={kind} compares completions of a group; use 2 or more"
            )
    if kind == "gdpo" and rewards:
        return _gdpo(rewards, components, weights)
    batch = [r for group in rewards for r in _scored(group)]
    batch_std = _std(batch) if len(batch) > 1 else 0.0
    return [_per_group(group, lambda scored: _scalar(kind, scored, batch_std)) for group in rewards]


def is_equal(rewards: Rewards, components: Sequence[dict[str, float | None]] | None = None) -> str | None:
    """Why a group carries no signal, or None where it does.

    "unscored": fewer than two rewards were scored. Else, where all scored rewards are equal: "all_right" at 1.0,
    "all_wrong" at 0.0, "other" at another value. With `components` (for gdpo, which normalizes each reward by itself)
    a group is equal only where each component is.
    """
    scored = _scored(rewards)
    if len(scored) < 2:
        return "unscored"
    if max(scored) != min(scored):
        return None
    for name in sorted({name for row in components or [] for name in row}):
        values = _scored([row.get(name) for row in components or []])
        if values and max(values) != min(values):
            return None
    return {1.0: "all_right", 0.0: "all_wrong"}.get(scored[0], "other")


def overlong_penalty(tokens: int, max_tokens: int, share: float, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13), added to the reward before advantages.

    0 up to (1 - share) * max_tokens, then linear down to -factor at max_tokens. Never below (TRL, OpenRLHF; verl,
    AReaL and NeMo keep falling). The paper: 4,096 of 20,480 tokens (share 0.2), factor 1.
    """
    return -factor * min(max(1 - (max_tokens - tokens) / (share * max_tokens), 0.0), 1.0)


def _scalar(kind: str, scored: list[float], batch_std: float) -> list[float]:
    """Advantages of two or more scored rewards that are not all equal."""
    n, mean = len(scored), float(np.mean(scored))
    if kind == "maxrl" and min(scored) < 0:
        raise ValueError(
            f"loss.advantage=maxrl divides by a group's mean reward, so rewards must be 0 or above; got {min(scored)}"
        )
    scale = {
        "mean_std": lambda: 1 / (_std(scored) + EPS),
        "mean": lambda: 1.0,
        "rloo": lambda: n / (n - 1),
        "batch_std": lambda: 1 / (batch_std + EPS),
        "maxrl": lambda: 1 / mean,
    }[kind]()
    return [(r - mean) * scale for r in scored]


# The last is not a function of one group's scalar rewards; see `_gdpo`.
KINDS = ("mean_std", "mean", "rloo", "batch_std", "maxrl", "gdpo")


def _gdpo(
    rewards: Sequence[Rewards],
    components: Sequence[Sequence[dict[str, float | None]]] | None,
    weights: dict[str, float] | None,
) -> list[list[float | None]]:
    names = sorted({name for group in components or [] for row in group for name in row})
    if components is None or not names:
        raise ValueError("loss.advantage=gdpo normalizes each named reward by itself; give data.reward several rewards")
    if weights is not None and not set(names) <= set(weights):
        raise ValueError(f"loss.advantage=gdpo: rewards named {names}, but weights only for {sorted(weights)}")
    sums: list[list[float | None]] = []
    for group, rows in zip(rewards, components, strict=True):
        assert len(group) == len(rows), f"{len(group)} rewards, {len(rows)} components"
        usable = [None if _missing(r) else 0.0 for r in group]
        if len(_scored(group)) < 2:
            usable = [None] * len(group)
        for name in names:
            # A completion without a total is out, whatever its components say.
            values = [row.get(name) if u is not None else None for row, u in zip(rows, usable, strict=True)]
            weight = 1.0 if weights is None else weights[name]
            normalized = _per_group(values, lambda scored: _scalar("mean_std", scored, 0.0))
            usable = [u if u is None or a is None else u + weight * a for u, a in zip(usable, normalized, strict=True)]
        sums.append(usable)
    flat = [a for group in sums for a in _scored(group)]
    if len(flat) < 2 or max(flat) == min(flat):
        return [[None if a is None else 0.0 for a in group] for group in sums]
    # Nothing to centre: every component has mean 0 in every group.
    scale = 1 / (_std(flat) + EPS)
    return [[None if a is None else a * scale for a in group] for group in sums]


def _per_group(rewards: Rewards, rule: Callable[[list[float]], list[float]]) -> list[float | None]:
    """Apply `rule` to the scored rewards and put the results back in their places."""
    scored = _scored(rewards)
    if len(scored) < 2:
        return [None] * len(rewards)
    results = iter([0.0] * len(scored) if max(scored) == min(scored) else rule(scored))
    return [None if _missing(r) else next(results) for r in rewards]


def _scored(rewards: Rewards) -> list[float]:
    scored = [float(r) for r in rewards if r is not None and not math.isnan(r)]
    if any(math.isinf(r) for r in scored):
        raise ValueError(f"a reward is infinite: {list(rewards)}; return a finite number, or None for not scored")
    return scored


def _missing(reward: float | None) -> bool:
    return reward is None or math.isnan(reward)


def _std(values: list[float]) -> float:
    return float(np.std(values, ddof=1))
