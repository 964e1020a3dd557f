"""Means over seeds with Student's t intervals, and paired differences. No scipy: the package does not depend on it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(slots=True, frozen=True)
class Interval:
    """Mean of n values and its two-sided 95 % interval; `low` and `high` are None for n < 2."""

    mean: float
    low: float | None
    high: float | None
    n: int


def mean_interval(values: Sequence[float]) -> Interval | None:
    """mean +- t(0.975, n - 1) * s / sqrt(n), s with n - 1. None for no values."""
    n = len(values)
    if not n:
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, 1)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))
    half = t_quantile(0.975, n - 1) * std / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


@dataclass(slots=True, frozen=True)
class Difference:
    """b - a over the seeds that both arms have. `separated`: the 95 % interval has a width and leaves out zero."""

    interval: Interval | None
    separated: bool


def paired_difference(a: Mapping[str, float], b: Mapping[str, float]) -> Difference:
    """a, b: value by seed. Pairing removes what a seed does to both arms (data order, initial sampling)."""
    interval = mean_interval([b[seed] - a[seed] for seed in a if seed in b])
    if interval is None or interval.low is None or interval.high is None:
        return Difference(interval, separated=False)
    if interval.high - interval.low < 1e-9:
        # Seeds that differ by the same count of a finite test set say nothing about how much a new one may differ.
        return Difference(interval, separated=False)
    return Difference(interval, separated=interval.low > 0 or interval.high < 0)


@cache
def t_quantile(p: float, df: int) -> float:
    """The p-quantile (0.5 < p < 1) of Student's t with df degrees of freedom, by bisection of its distribution."""
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: int) -> float:
    """P(T <= t) for t >= 0 and whole df, as a finite sum (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(t / math.sqrt(df))
    sin, cos = math.sin(theta), math.cos(theta)
    if df % 2:
        term = total = cos if df > 1 else 0.0
        for k in range(3, df - 1, 2):
            term *= cos * cos * (k - 1) / k
            total += term
        inside = 2 / math.pi * (theta + sin * total)
    else:
        term = total = 1.0
        for k in range(2, df - 1, 2):
            term *= cos * cos * (k - 1) / k
            total += term
        inside = sin * total
    return (1 + inside) / 2


def pareto_front(points: Sequence[tuple[float, float] | None]) -> list[bool]:
    """Which (cost, value) points are not beaten: no other costs no more, is worth no less, and is not equal."""

    def beaten(p: tuple[float, float]) -> bool:
        return any(q and q[0] <= p[0] and q[1] >= p[1] and q != p for q in points)

    return [p is not None and not beaten(p) for p in points]
