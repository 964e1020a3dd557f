"""A sample of rollouts.jsonl that fits on a page, and exact counts over all of it: one pass, constant memory.

Whole groups are sampled (reservoir, fixed seed), so that completions can be read beside their siblings; the groups of
the best, worst, longest and strangest completions are always in. Long texts keep their head and tail. Every cut is
counted, and the page says what it does not show.

The tokens of some of them are added by `grpo.report.tokens`, where a run has recorded them.
"""

import heapq
import itertools
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo.report.page import to_json
from grpo.report.read import Note, number, read_lines, text

RESERVOIR_GROUPS = 1500
EXTREMES = 8  # of each kind, from different groups
HEAD, TAIL = 2400, 800  # characters kept of a long text
MAX_ROWS = 256  # of one group
# Control characters (but tab and newline), zero-width and direction marks, private use, what was not UTF-8.
ODD = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ue000-\uf8ff\ufffd\ud800-\udfff]"
)

Row = dict[str, Any]


@dataclass(slots=True)
class Counts:
    """Over every line, sampled or not."""

    completions: int = 0
    groups: int = 0
    zero_variance: int = 0  # groups of two or more scored completions with equal rewards
    trained_twice: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # completions
    outcome_tokens: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    trained_lags: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class Sample:
    counts: Counts
    groups: list[dict[str, Any]]
    rows: int  # completions in `groups`


def collect_rollouts(folder: Path, notes: list[Note], budget: int) -> Sample:
    """budget: bytes of JSON that the sample may take."""
    counts = Counts()
    extremes: dict[str, list[tuple[Any, int, list[Row], Any]]] = {"best": [], "worst": [], "longest": [], "strange": []}
    reservoir: list[list[Row]] = []
    seen_trained: dict[Any, int] = {}
    rng = random.Random(0)  # the same page for the same folder
    order = itertools.count()
    for rows in _groups(read_lines(folder / "rollouts.jsonl", notes)):
        _count(rows, counts, seen_trained)
        compact: list[Row] | None = None  # one object a group, wherever it is kept
        for kind, value, row, why in _candidates(rows):
            heap = extremes[kind]
            score = (value, rng.random())  # ties are broken at random, or all would come from the first steps
            if len(heap) < EXTREMES or score > heap[0][0]:
                push = heapq.heappush if len(heap) < EXTREMES else heapq.heappushpop
                compact = compact or _compact(rows)
                place = next(i for i, other in enumerate(rows) if other is row)
                push(heap, (score, -next(order), compact, (place, why)))
        slot = len(reservoir) if len(reservoir) < RESERVOIR_GROUPS else rng.randrange(counts.groups)
        if slot < RESERVOIR_GROUPS:
            reservoir[slot : slot + 1] = [compact or _compact(rows)]
    if counts.trained_twice:
        notes.append(Note("error", f"rollouts.jsonl: {counts.trained_twice:,} completions are trained a second time"))
    rng.shuffle(reservoir)
    return _fit(extremes, reservoir, counts, budget)


def _groups(lines: Iterator[Row]) -> Iterator[list[Row]]:
    """Runs of lines with the same step, group and prompt: a group is written whole."""
    for _, rows in itertools.groupby(lines, key=lambda row: (row.get("step"), row.get("group"), row.get("prompt"))):
        while chunk := list(itertools.islice(rows, MAX_ROWS)):
            yield chunk


def _count(rows: list[Row], counts: Counts, seen_trained: dict[Any, int]) -> None:
    counts.groups += 1
    counts.completions += len(rows)
    rewards = [reward for row in rows if (reward := number(row.get("reward"))) is not None]
    counts.zero_variance += len(rewards) > 1 and max(rewards) == min(rewards)
    group = text(rows[0].get("group")) or "null" if not isinstance(rows[0].get("group"), int) else rows[0]["group"]
    for row in rows:
        outcome = text(row.get("outcome"))[:100] or "unknown"
        counts.outcomes[outcome] += 1
        counts.outcome_tokens[outcome] += int(number(row.get("tokens")) or 0)
        counts.finish_reasons[text(row.get("finish_reason"))[:40] or "unknown"] += 1
        if outcome == "trained":
            lag, index = row.get("lag"), row.get("index")
            if isinstance(lag, int):
                counts.trained_lags[lag] += 1
            if isinstance(index, int) and 0 <= index < 4096:
                mask = seen_trained.get(group, 0)
                counts.trained_twice += mask >> index & 1
                seen_trained[group] = mask | 1 << index


def _candidates(rows: list[Row]) -> Iterator[tuple[str, Any, Row, str]]:
    """At most one completion a group for each kind of extreme, as (kind, sortable score, row, why)."""
    scored = [
        ((reward, number(row.get("advantage")) or 0.0), row)
        for row in rows
        if (reward := number(row.get("reward"))) is not None
    ]
    if scored:
        # Among equal rewards the one that stands out most from its group.
        best = max(scored, key=lambda pair: pair[0])
        worst = min(scored, key=lambda pair: pair[0])
        yield "best", best[0], best[1], "best"
        yield "worst", (-worst[0][0], -worst[0][1]), worst[1], "worst"
    longest = max(rows, key=lambda row: number(row.get("tokens")) or 0)
    if tokens := number(longest.get("tokens")):
        yield "longest", tokens, longest, "longest"
    strange = [(*strangeness(row), row) for row in rows]
    score, why, row = max(strange, key=lambda triple: triple[0])
    if score > 0:
        yield "strange", score, row, f"strange: {why}"


def strangeness(row: Row) -> tuple[float, str]:
    """How far a completion is from ordinary text (0: ordinary), and in what way. A guide for the eye, no metric."""
    completion = text(row.get("completion"))[:4000]
    found = [(0.0, "")]
    if completion == "" and "finish_reason" in row and row["finish_reason"] is None:
        return 0.5, "no answer that can be used"  # a prompt that is too long, say: others are worth more of the page
    if row.get("completion") == "" or row.get("tokens") == 0:
        found.append((1.0, "empty"))
    if "reward" in row and number(row["reward"]) is None:
        found.append((2.0, "not scored"))
    if odd := len(ODD.findall(completion)):
        found.append((1.5 + odd / len(completion), f"{odd} control or invisible characters"))
    if len(completion) >= 160:
        packed = len(zlib.compress(completion.encode("utf-8", "replace"), 1)) / len(completion)
        if packed < 0.25:  # ordinary prose packs to 0.5
            found.append((1.25 - packed, f"repeats itself (packs to {packed:.0%})"))
    ratio = number(row.get("log_ratio"))
    if ratio is not None and abs(ratio) > 1:
        found.append((0.5 + abs(ratio), f"log-ratio {ratio:.1f} at one token"))
    return max(found)


def _compact(rows: list[Row]) -> list[Row]:
    """Only what the page shows, so that no megabyte line stays in memory."""
    return [
        {
            **{key: number(row.get(key)) for key in ("step", "index", "reward", "advantage", "lag", "tokens")},
            "group": row["group"] if isinstance(row.get("group"), int) else text(row.get("group"))[:40],
            "versions": [number(row.get("version_first")), number(row.get("version_last"))],
            "finish": text(row.get("finish_reason"))[:40],
            "outcome": text(row.get("outcome"))[:100],
            "prompt": clip(text(row.get("prompt"))),
            "completion": clip(text(row.get("completion"))),
            **_turns(row),
            **_rewards(row),
        }
        for row in rows
    ]


def clip(value: str) -> str | list[Any]:
    """The text, or [head, number of characters left out, tail]."""
    cut = len(value) - HEAD - TAIL
    return value if cut <= 0 else [value[:HEAD], cut, value[-TAIL:]]


def _rewards(row: Row) -> Row:
    rewards = row.get("rewards")
    if not isinstance(rewards, dict) or len(rewards) < 2:  # a single part is the reward itself
        return {}
    return {"rewards": {str(name)[:40]: number(value) for name, value in list(rewards.items())[:12]}}


def _turns(row: Row) -> Row:
    """The completion as [by the policy, text] a turn, clipped as a whole; nothing without observations."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return {}
    parts = [(turn.get("by_policy") is True, text(turn.get("text"))) for turn in turns]
    whole = "".join(part for _, part in parts)
    if all(by_policy for by_policy, _ in parts) or whole != text(row.get("completion")):
        return {}
    length, at = len(whole), 0
    shown: list[list[Any]] = []
    for by_policy, part in (pair for pair in parts if pair[1]):
        head = min(len(part), max(0, HEAD - at))
        at += len(part)
        tail = min(len(part) - head, max(0, at - (length - TAIL)))
        cut = len(part) - head - tail
        if not cut:
            shown.append([by_policy, part])
        elif not head and not tail and shown and isinstance(shown[-1][1], list) and not shown[-1][1][2]:
            shown[-1][1][1] += cut  # nothing of this turn is shown
        else:
            shown.append([by_policy, [part[:head], cut, part[len(part) - tail :]]])
    return {"turns": shown}


def _fit(extremes: dict[str, Any], reservoir: list[list[Row]], counts: Counts, budget: int) -> Sample:
    """Extremes first, then random groups until the budget is spent; in the order of training."""
    groups: dict[int, list[Row]] = {}
    notable = [
        (rows, index, why) for heap in extremes.values() for _, _, rows, (index, why) in sorted(heap, reverse=True)
    ]
    for rows, index, why in [*notable, *((rows, None, None) for rows in reservoir)]:
        if id(rows) not in groups:
            size = sum(len(to_json(row)) for row in rows) - (len(rows) - 1) * len(to_json(rows[0]["prompt"]))
            if size > budget:
                if index is None:
                    break
                continue
            budget -= size
            groups[id(rows)] = rows
        if index is not None:
            row = rows[index]
            row["why"] = [*row.get("why", []), why]
    ordered = sorted(groups.values(), key=lambda rows: (rows[0]["step"] or 0, str(rows[0]["group"]).zfill(20)))
    return Sample(counts, [_pack(rows) for rows in ordered], sum(len(rows) for rows in ordered))


def _pack(rows: list[Row]) -> dict[str, Any]:
    """The prompt once a group."""
    shared = {"group": rows[0]["group"], "prompt": rows[0]["prompt"]}
    return {**shared, "rows": [{key: value for key, value in row.items() if key not in shared} for row in rows]}
