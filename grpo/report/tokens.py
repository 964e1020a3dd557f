"""Tokens for the page, out of the records of `train.record_tokens=true`: what each was, and what both sides made of it.

The page has room for some completions only: first those that are there for being best, worst, longest or strangest,
then their groups, then further groups at random (fixed seed), until the budget is spent. Long ones keep head and tail.
Nothing here raises for what the files hold: what is damaged, or does not belong to rollouts.jsonl, becomes a note.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from grpo import token_record
from grpo.report.page import to_json
from grpo.report.read import Note
from grpo.types import Completion

HEAD, TAIL = 450, 150  # tokens kept of a long completion
# Full colour is at one of these log-ratios: the first that 99 of 100 shown tokens are within.
SCALES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

Group = dict[str, Any]
Row = dict[str, Any]


@dataclass(slots=True)
class Traces:
    """What the page says of them. `special`: ids of special tokens that occur. `scale`: log-ratio of full colour."""

    completions: int = 0
    special: set[int] = field(default_factory=set)
    sizes: list[float] = field(default_factory=list)  # of the log-ratios

    @property
    def scale(self) -> float:
        typical = sorted(self.sizes)[int(0.99 * (len(self.sizes) - 1))] if self.sizes else 0.0
        return next((scale for scale in SCALES if scale >= typical), SCALES[-1])


def add_traces(folder: Path, groups: list[Group], notes: list[Note], budget: int) -> Traces | None:
    """Give rows of the page's groups their `trace`. budget: bytes of JSON. None where no token is recorded."""
    try:
        steps = set(token_record.recorded_steps(folder))
    except ValueError as error:
        notes.append(Note("error", f"tokens/: {error}"))
        return None
    if not steps:
        return None
    tokenizer = _tokenizer(folder, notes)
    special = (
        {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special} if tokenizer else set()
    )
    traces = Traces()
    damaged: set[str] = set()
    foreign = 0
    full = False
    read: dict[tuple[Any, Any], dict[int, Completion]] = {}  # a notable group comes twice
    for group, rows in _in_order([g for g in groups if g["rows"][0]["step"] in steps]):
        if full:
            break
        key = (group["rows"][0]["step"], group["group"])
        if key not in read:
            read[key] = _read(folder, group, damaged)
        recorded = read[key]
        for row in rows:
            completion = recorded.get(row["index"])
            if completion is None:
                continue
            if completion.tokens != row["tokens"] or completion.advantage != row["advantage"]:
                foreign += 1
                continue
            trace = _trace(completion, tokenizer)
            size = len(to_json(trace)) + 20
            full = size > budget
            if full:
                break
            budget -= size
            row["trace"] = trace
            traces.completions += 1
            traces.special |= special.intersection(trace["ids"])
            traces.sizes += [abs(x) for x in trace["log_ratios"] if x is not None]
    notes += [Note("error", f"tokens/: {text}") for text in sorted(damaged)[:3]]
    if foreign:
        notes.append(Note("error", f"tokens/: {foreign} completions are not those of rollouts.jsonl; left plain"))
    return traces


def _in_order(groups: list[Group]) -> Iterator[tuple[Group, list[Row]]]:
    """Notable rows, then all of their groups, then the other groups."""
    notable: list[Group] = []
    others: list[Group] = []
    for group in groups:
        (notable if any("why" in row for row in group["rows"]) else others).append(group)
    for group in notable:
        yield group, [row for row in group["rows"] if "why" in row]
    for group in notable:
        yield group, [row for row in group["rows"] if "why" not in row]
    random.Random(0).shuffle(others)
    for group in others:
        yield group, group["rows"]


def _read(folder: Path, group: Group, damaged: set[str]) -> dict[int, Completion]:
    """A group's recorded completions by index, with their advantages."""
    step, place = group["rows"][0]["step"], group["group"]
    try:
        record = token_record.read(folder, int(step), {place})
        if not isinstance(record.version, int):
            raise ValueError(f"step {step}: its version is {record.version!r}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        damaged.add(str(error).rpartition("/")[2])
        return {}
    completions = [c for g in record.groups for c in g.completions]
    for completion, advantage in zip(completions, record.advantages, strict=True):
        completion.advantage = advantage
    return {c.index: c for c in completions}


def _trace(c: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """One entry a token in each list; None where there is no number. observed: (start, stop) of observations."""
    n = len(c.token_ids)
    shown = [*range(n)] if n <= HEAD + TAIL else [*range(HEAD), *range(n - TAIL, n)]
    mask = c.mask
    place = {i: k for k, i in enumerate(i for i, sampled in enumerate(mask) if sampled)}  # among the sampled
    sampled = [place.get(i) for i in shown]
    ratios = [p - s for p, s in zip(c.policy_logprobs, c.logprobs, strict=True)] if c.policy_logprobs else None
    newest = max(c.versions, default=0)
    texts = _texts(c.token_ids, tokenizer)
    trace: dict[str, Any] = {
        "ids": [c.token_ids[i] for i in shown],
        "texts": [texts[i][:200] for i in shown],
        "logprobs": [None if k is None else _short(c.logprobs[k]) for k in sampled],
        "log_ratios": [None if k is None or ratios is None else _short(ratios[k]) for k in sampled],
    }
    if any(version != newest for version in c.versions):
        trace["versions"] = [None if k is None else c.versions[k] for k in sampled]
    else:
        trace["version"] = newest
    if not all(mask):
        trace["observed"] = [k is None for k in sampled]
    if n > len(shown):
        trace["cut"] = [HEAD, n - len(shown)]
    return trace


def _texts(ids: list[int], tokenizer: Tokenizer | None) -> list[str]:
    """What each token adds to the text. Of a character in several tokens the last one has it, the others nothing."""
    if tokenizer is None:
        return [f"[{id_}]" for id_ in ids]
    stream = DecodeStream(skip_special_tokens=False)
    texts = []
    for id_ in ids:
        try:
            texts.append(stream.step(tokenizer, id_) or "")
        except Exception:  # the package has no class of its own for what it does not like
            stream = DecodeStream(skip_special_tokens=False)
            texts.append("")
    return texts


def _tokenizer(folder: Path, notes: list[Note]) -> Tokenizer | None:
    path = folder / token_record.FOLDER / token_record.TOKENIZER
    try:
        return Tokenizer.from_str(path.read_text("utf-8"))
    except FileNotFoundError:
        notes.append(Note("note", f"tokens/{path.name} is not there: tokens are shown by their ids"))
    except Exception as error:  # as above
        notes.append(Note("error", f"tokens/{path.name} cannot be read ({type(error).__name__}): ids are shown"))
    return None


def _short(x: float) -> float | None:
    return float(f"{x:.4g}") if abs(x) < float("inf") else None
