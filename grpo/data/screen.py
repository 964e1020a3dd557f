"""Which rows of a table can be used, and a count of the reasons why the others cannot. Before any model is loaded.

Reasons: null_prompt, empty_prompt, lone_surrogate (half of a character: no tokenizer takes it), null_answer,
answer_not_text, answer_not_found (the pattern), unreadable_answer (the reward cannot read the gold, so every completion
would be wrong), too_long, duplicate (same prompt, same answer: the first stays), contradiction (same prompt, different
answers: none stays), in_held_out (also in a held-out set).
"""

import logging
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from typing import Any

from grpo.data.render import Renderer
from grpo.data.rows import Reader, Table, Unusable
from grpo.rewards.combined import Rewards

log = logging.getLogger(__name__)

CHUNK = 512  # rows tokenized at once
EXAMPLES = 3  # rows named for each reason


@dataclass(slots=True)
class Screened:
    """The usable rows, their prompts' keys (same key = same prompt), and what was left out."""

    table: Table
    kept: Sequence[int]
    keys: list[bytes]
    report: dict[str, Any]


@dataclass(slots=True)
class _LeftOut:
    table: Table
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, i: int) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.examples.setdefault(reason, [])
        if len(named) < EXAMPLES:
            named.append(self.table.row_name(i))


def prompt_key(text: str) -> bytes:
    """Equal for prompts that differ in case and space only."""
    return blake2b(" ".join(text.split()).casefold().encode("utf-8", "surrogatepass"), digest_size=16).digest()


def screen(
    table: Table,
    reader: Reader,
    renderer: Renderer,
    rewards: Rewards,
    *,
    max_prompt_tokens: int,
    drop_duplicates: bool,
    held_out: Collection[bytes] = (),
) -> Screened:
    """Goes through every row once. Raises ValueError when none can be used.

    rewards: started, so that they can say which golds they read. held_out: keys of prompts that must not be trained on.
    """
    left_out = _LeftOut(table)
    rows, lengths, unknown = _render_all(table, reader, renderer, max_prompt_tokens, left_out)
    unreadable = rewards.unreadable([gold for _, _, gold in rows if gold is not None])
    golds: dict[bytes, set[str | None]] = {}
    for _, key, gold in rows:
        golds.setdefault(key, set()).add(gold)
    kept, keys, seen = array("q"), list[bytes](), set[bytes]()
    for i, key, gold in rows:
        if gold in unreadable:
            left_out.add("unreadable_answer", i)
        elif key in held_out:
            left_out.add("in_held_out", i)
        elif drop_duplicates and len(golds[key]) > 1:
            left_out.add("contradiction", i)
        elif drop_duplicates and gold is not None and key in seen:
            left_out.add("duplicate", i)
        else:
            seen.add(key)
            kept.append(i)
            keys.append(key)
    report: dict[str, Any] = {
        "rows": len(table.rows),
        "kept": len(kept),
        "left_out": left_out.counts,
        "examples": left_out.examples,
        "prompt_tokens_max": max(lengths, default=0),
        "prompt_tokens_mean": round(sum(lengths) / len(lengths), 1) if lengths else 0.0,
        "with_unknown_tokens": unknown,
    }
    if not kept:
        raise ValueError(f"data: no row of {table.name} can be used: {_reasons(left_out, len(table.rows))}")
    if left_out.counts:
        log.warning("%s: %d of %d rows left out: %s", table.name, len(table.rows) - len(kept), len(table.rows),
                    _reasons(left_out, len(table.rows)))  # fmt: skip
    if unknown:
        log.warning("%s: %d of %d prompts have a character that the model's tokenizer does not know",
                    table.name, unknown, len(rows))  # fmt: skip
    return Screened(table, kept, keys, report)


def _render_all(
    table: Table, reader: Reader, renderer: Renderer, max_prompt_tokens: int, left_out: _LeftOut
) -> tuple[list[tuple[int, bytes, str | None]], list[int], int]:
    """(row, key, gold) of every row that can be rendered and is short enough; prompt lengths; rows with unknown ids."""
    rows: list[tuple[int, bytes, str | None]] = []
    lengths: list[int] = []
    unknown_id, unknown = renderer.tokenizer.unk_token_id, 0
    scanned = enumerate(table.scanned(reader.needed(table.columns)))
    while chunk := list(islice(scanned, CHUNK)):
        usable: list[tuple[int, bytes, str, str | None]] = []
        for i, row in chunk:
            try:
                text = renderer.text(reader.content(row))
                if not _is_unicode(text):
                    raise Unusable("lone_surrogate")
                usable.append((i, prompt_key(reader.essence(row)), text, reader.gold(row)))
            except Unusable as verdict:
                left_out.add(verdict.reason, i)
        for (i, key, _, gold), ids in zip(usable, renderer.ids([text for _, _, text, _ in usable]), strict=True):
            if not ids:
                left_out.add("empty_prompt", i)
            elif len(ids) > max_prompt_tokens:
                left_out.add("too_long", i)
            else:
                rows.append((i, key, gold))
                lengths.append(len(ids))
                unknown += unknown_id is not None and unknown_id in ids
    return rows, lengths, unknown


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def hold_out(screened: Screened, count: int) -> set[bytes]:
    """Keys of the prompts that are kept for evaluation: those with the smallest hashes, at most a fifth of all.

    A hash, so that the choice depends on the prompts alone, not on the run's seed or the order of the rows.
    """
    distinct = set(screened.keys)
    return set(sorted(distinct)[: min(count, len(distinct) // 5)])


def choose(screened: Screened, count: int | None) -> list[int]:
    """At most `count` of the kept rows, those with the smallest hashes, in the order of the table."""
    if count is None or count >= len(screened.kept):
        return list(screened.kept)
    ranked = sorted(zip(screened.keys, screened.kept, strict=True))
    return sorted(row for _, row in ranked[:count])


def split(screened: Screened, held_out: Collection[bytes]) -> tuple[Screened, list[int]]:
    """The rows to train on, and those that are held out."""
    pairs = list(zip(screened.keys, screened.kept, strict=True))
    rows = array("q", (row for key, row in pairs if key not in held_out))
    keys = [key for key in screened.keys if key not in held_out]
    return replace(screened, kept=rows, keys=keys), [row for key, row in pairs if key in held_out]


def _reasons(left_out: _LeftOut, rows: int) -> str:
    if not left_out.counts:
        return f"it has {rows} rows"
    return ", ".join(f"{n} {reason} (e.g. {left_out.examples[reason][0]})" for reason, n in left_out.counts.items())
