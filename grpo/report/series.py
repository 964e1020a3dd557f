"""Per-step metrics, streamed into a bounded number of points.

While a run has at most `limit` steps every point is one line of metrics.jsonl, unchanged. Beyond that neighbouring
points merge, two by two: the mean, and the lowest and highest value, so that a spike of one step stays visible. The
page says how many steps a point stands for.
"""

from dataclasses import dataclass, field
from typing import Any

from grpo.report.read import number

# Counters: a merged point holds the last value, not the mean.
CUMULATIVE = {"step", "version", "time/elapsed_s"}
# A guard against a metrics line with thousands of keys; no run of ours has a hundred.
MAX_KEYS = 150


def is_cumulative(key: str) -> bool:
    return key in CUMULATIVE or (key.startswith("tokens/") and not key.endswith("in_flight"))


@dataclass(slots=True)
class Cell:
    """One key over the steps of one point."""

    sum: float
    count: int
    low: float
    high: float
    last: float

    def merge(self, other: "Cell") -> "Cell":
        return Cell(
            self.sum + other.sum,
            self.count + other.count,
            min(self.low, other.low),
            max(self.high, other.high),
            other.last,
        )


@dataclass(slots=True)
class Series:
    """Feed it lines with `add`; `points` holds at most `limit` merged points of `width` steps each."""

    limit: int = 1000
    width: int = 1
    lines: int = 0
    points: list[dict[str, Cell]] = field(default_factory=list)
    keys: dict[str, None] = field(default_factory=dict)  # in order of appearance
    keys_left_out: set[str] = field(default_factory=set)
    non_finite: dict[str, tuple[int, Any]] = field(default_factory=dict)  # key: (how many, first step)
    _in_last: int = 0

    def add(self, line: dict[str, Any]) -> None:
        point: dict[str, Cell] = {}
        for key, value in line.items():
            x = number(value)
            if x is None:
                if len(key) <= 200 and (
                    value is None or isinstance(value, float)
                ):  # the recorder writes NaN and infinities as null
                    count, first = self.non_finite.get(key, (0, line.get("step")))
                    self.non_finite[key] = (count + 1, first)
                continue
            if key not in self.keys:
                if len(self.keys) >= MAX_KEYS or len(key) > 200:
                    self.keys_left_out.add(key[:200])
                    continue
                self.keys[key] = None
            point[key] = Cell(x, 1, x, x, x)
        self.lines += 1
        if self._in_last == self.width or not self.points:
            if len(self.points) == self.limit:
                self.halve()
            if self._in_last == self.width or not self.points:
                self.points.append(point)
                self._in_last = 1
                return
        self.points[-1] = _merge(self.points[-1], point)
        self._in_last += 1

    def halve(self) -> None:
        """Merge neighbours: half the points, each twice as wide."""
        odd = len(self.points) % 2
        pairs = zip(self.points[::2], self.points[1::2], strict=False)
        tail = self.points[-1:] if odd else []
        self.points = [_merge(a, b) for a, b in pairs] + tail
        self._in_last += 0 if odd else self.width
        self.width *= 2

    def values(self, key: str) -> list[float | None]:
        """One value a point: the mean over its steps, or the last value of a counter."""
        cells = [point.get(key) for point in self.points]
        if is_cumulative(key):
            return [None if cell is None else cell.last for cell in cells]
        return [None if cell is None else cell.sum / cell.count for cell in cells]

    def mean(self, key: str, start: float = 0.0, stop: float = 1.0) -> float | None:
        """Mean over the steps between two shares of the run, e.g. 0.75 to 1.0 for its last quarter."""
        n = len(self.points)
        first, last = int(n * start), max(int(n * start) + 1, round(n * stop))
        cells = [cell for point in self.points[first:last] if (cell := point.get(key))]
        count = sum(cell.count for cell in cells)
        return sum(cell.sum for cell in cells) / count if count else None

    def total(self, key: str) -> float | None:
        """Sum over all steps."""
        cells = [cell for point in self.points if (cell := point.get(key))]
        return sum(cell.sum for cell in cells) if cells else None

    def last(self, key: str) -> float | None:
        return next((cell.last for point in reversed(self.points) if (cell := point.get(key))), None)

    def highest(self, key: str) -> float | None:
        return max((cell.high for point in self.points if (cell := point.get(key))), default=None)

    def columns(self) -> dict[str, Any]:
        """For the page. `lo` and `hi` only where points were merged; merged numbers are rounded, single ones not."""
        merged = self.width > 1
        columns: dict[str, Any] = {}
        lows: dict[str, Any] = {}
        highs: dict[str, Any] = {}
        for key in self.keys:
            values = self.values(key)
            columns[key] = [_short(x) for x in values] if merged and not is_cumulative(key) else values
            if merged and not is_cumulative(key):
                cells = [point.get(key) for point in self.points]
                lows[key] = [cell and _short(cell.low) for cell in cells]
                highs[key] = [cell and _short(cell.high) for cell in cells]
        return {"width": self.width, "lines": self.lines, "columns": columns, "lo": lows, "hi": highs}


def _merge(a: dict[str, Cell], b: dict[str, Cell]) -> dict[str, Cell]:
    merged = dict(a)
    for key, cell in b.items():
        merged[key] = merged[key].merge(cell) if key in merged else cell
    return merged


def _short(x: float | None) -> float | None:
    return None if x is None else float(f"{x:.6g}")
