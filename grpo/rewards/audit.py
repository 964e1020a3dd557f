"""Is the verifier right? Its verdicts beside those of a strict text or number comparison, each disagreement shown.

A strict comparison never calls a wrong answer right. So where the verifier says right and it says wrong, a person
looks: a better reading (1/2 = 0.5), or a hole that the policy will find. Where the verifier says wrong and it right,
the verifier loses right answers. Three sources of answers: the golds of the data set, each as an answer to its own row
(right by definition) and to another (should be wrong, unless they are equal); the texts of a column (worked solutions,
or answers judged by hand); the completions of a run.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from grpo.data.base import Data
from grpo.data.rows import Table, Unusable, as_text, lookup
from grpo.rewards.base import Reward
from grpo.rewards.combined import Rewards
from grpo.rewards.extract import find_answer, whole_number
from grpo.types import Completion, Prompt

AT_ONCE = 64  # completions scored at a time
OWN_GOLD = "own gold"
# What the two may say, and what it means for the reader.
AGREE = ("both right", "both wrong")
DISAGREE = {
    "verifier right, strict wrong": "a better reading (0.5 for 1/2), or a hole that the policy will find",
    "verifier wrong, strict right": "a right answer gets no reward",
    "not scored": "left out of training (the reasons stand above)",
}


@dataclass(slots=True)
class Case:
    """An answer to judge. `verdict`: the verifier's reward (None: not scored). `strict`: is text or number equal?"""

    source: str
    prompt: Prompt
    gold: str
    completion: Completion
    strict: bool = False
    verdict: float | None = None

    @property
    def kind(self) -> str:
        if self.verdict is None:
            return "not scored"
        right = self.verdict >= 1.0
        if right == self.strict:
            return "both right" if right else "both wrong"
        return "verifier right, strict wrong" if right else "verifier wrong, strict right"


def verifier(rewards: Rewards, name: str | None) -> Reward:
    """The reward to audit: the named one, else the first that compares with an answer. Raises ValueError."""
    for reward in rewards.rewards:
        if reward.name == name or (name is None and (reward.NEEDS_ANSWER or reward.OWN_ANSWER)):
            return reward
    names = ", ".join(r.name for r in rewards.rewards)
    if name is None:
        raise ValueError(f"none of the rewards compares with an answer by itself; name one with --reward: {names}")
    raise ValueError(f"--reward {name}: the data has no such reward; it has {names}")


def place(reward: Reward) -> dict[str, Any]:
    """Where the reward looks for the answer."""
    return {key: getattr(reward, key, default) for key, default in (("after", None), ("tag", None), ("boxed", False))}


def as_completion(reward: Reward, answer: str) -> str:
    """A completion that gives this answer where the reward looks for it."""
    where = place(reward)
    if where["boxed"]:
        return rf"So the answer is \boxed{{{answer}}}."
    if where["tag"]:
        return f"So the answer is <{where['tag']}>{answer}</{where['tag']}>."
    return f"{where['after'] or ''}{answer}"


def strictly_equal(gold: str, given: str | None) -> bool:
    """The same text apart from space and $ around it, or the same number."""
    if given is None:
        return False
    if gold.strip(" \n$") == given.strip(" \n$"):
        return True
    number = whole_number(gold)
    return number is not None and number == whole_number(given)


def gold_of(data: Data, reward: Reward, row: Mapping[str, Any]) -> str | None:
    """The right answer of a row as text; None where there is none, or none that can be used."""
    try:
        return as_text(row.get(reward.OWN_ANSWER)) if reward.OWN_ANSWER else data.reader.gold(row)
    except Unusable:
        return None


def usable(data: Data, table: Table, reward: Reward) -> Iterator[tuple[Prompt, str]]:
    """(prompt, gold) of the rows that have one. The prompt has no ids: nothing is tokenized here."""
    for i in range(len(table.rows)):
        row = table.rows[i]
        gold = gold_of(data, reward, row)
        if gold is not None:
            text = data.reader.essence(row)
            yield Prompt(i, table.row_name(i), text, [], data.reader.for_reward(row, gold)), gold


def chosen(data: Data, reward: Reward, rows: int) -> list[tuple[Prompt, str]]:
    """`rows` training rows with a right answer, chosen by a hash and in order. Raises ValueError when there is none."""
    train, _ = data.tables()
    if len(train.rows) > 50 * rows:  # enough to choose from
        step = len(train.rows) // (10 * rows)
        train = Table(train.name, [train.rows[i] for i in range(0, len(train.rows), step)], train.columns)
    found = sorted(usable(data, train, reward), key=lambda pair: blake2b(pair[0].text.encode()).digest())[:rows]
    if not found:
        raise ValueError(f"data.answer={data.answer or 'null'}: no row has a right answer to compare with")
    return sorted(found, key=lambda pair: pair[0].index)


def cases_from_golds(data: Data, reward: Reward, rows: int) -> list[Case]:
    """Each of `rows` golds as the answer to its own row and to the next one."""
    found = chosen(data, reward, rows)
    cases = []
    for (prompt, gold), (_, other) in zip(found, found[1:] + found[:1], strict=True):
        for source, answer in ((OWN_GOLD, gold), ("another row's gold", other)):
            cases.append(Case(source, prompt, gold, _completion(as_completion(reward, answer))))
    return cases


def cases_from_column(data: Data, reward: Reward, rows: int, column: str) -> list[Case]:
    """The texts of a column as completions: worked solutions, or answers that somebody has judged by hand."""
    cases = []
    for prompt, gold in chosen(data, reward, rows):
        text = lookup(prompt.columns, column)
        if isinstance(text, str):
            cases.append(Case(f"column {column}", prompt, gold, _completion(text)))
    if not cases:
        raise ValueError(
            f"--column {column}: no row has a text there; the rows have {', '.join(sorted(prompt.columns))}"
        )
    return cases


def cases_from_rollouts(data: Data, reward: Reward, files: Iterable[Path], rows: int) -> list[Case]:
    """The last `rows` completions of a run whose rows are still in the data set. Raises ValueError for none."""
    train, held_out = data.tables()
    tables = {train.name: (data, train), **held_out}
    cases = []
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines()[-rows:]:
            record = json.loads(line)
            if record.get("finish_reason", "stop") is None:
                continue  # dropped: no reward was asked
            name, _, number = str(record.get("row", "")).rpartition("/")
            if name not in tables or not number.isdigit() or int(number) >= len(tables[name][1].rows):
                continue
            owner, table = tables[name]
            row = table.rows[int(number)]
            gold = gold_of(owner, reward, row)
            if gold is not None:
                prompt = Prompt(0, record["row"], record["prompt"], [], owner.reader.for_reward(row, gold))
                answers = [turn["text"] for turn in record.get("turns", []) if turn["by_policy"]]
                text = answers[-1] if answers else record["completion"]  # what the reward was given
                completion = _completion(text, record.get("finish_reason", "stop"))
                cases.append(Case(f"step {record.get('step')}", prompt, gold, completion))
    if not cases:
        raise ValueError(
            "--run: none of its completions belongs to a row of this data set that has a right answer; "
            "give the data.* overrides of the run"
        )
    return cases


def judge(rewards: Rewards, reward: Reward, cases: list[Case]) -> None:
    """Fill in both verdicts. The rewards are started."""

    async def everything() -> None:
        for start in range(0, len(cases), AT_ONCE):
            chunk = cases[start : start + AT_ONCE]
            await asyncio.gather(*(rewards.score(c.prompt, c.completion) for c in chunk))

    asyncio.run(everything())
    for case in cases:
        case.verdict = case.completion.rewards[reward.name]
        given = find_answer(case.completion.text, **place(reward))
        case.strict = case.source == OWN_GOLD or strictly_equal(case.gold, given)


def report(reward: Reward, cases: list[Case], unreadable: Collection[str] = (), width: int = 60) -> Iterator[str]:
    """Lines of text: counts, then every disagreement. unreadable: golds that the reward cannot read; not judged."""
    counts = Counter(case.kind for case in cases)
    yield f"{len(cases)} answers judged by {reward.name} and by strict comparison (same text or same number)"
    yield from (f"{counts[kind]:7d}  {kind}" for kind in AGREE)
    yield from (f"{counts[kind]:7d}  {kind:30s}{meaning if counts[kind] else ''}".rstrip()
                for kind, meaning in DISAGREE.items())  # fmt: skip
    if unreadable:
        few = ", ".join(_short(gold, width) for gold in sorted(unreadable)[:3])
        yield f"{len(unreadable):7d}  right answers that {reward.name} cannot read (their rows are left out): {few}"
    for kind in DISAGREE:
        found = [
            (case.prompt.row, case.source, _short(case.gold, width // 2), _short(case.completion.text, width))
            for case in cases
            if case.kind == kind
        ]
        if found:
            yield f"\n{kind}:"
            yield from _table([("row", "from", "right answer", "completion"), *found])


def _table(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def _completion(text: str, finish_reason: str = "stop") -> Completion:
    return Completion(-1, 0, [], [], [], finish_reason, text=text)


def _short(text: str, width: int) -> str:
    """The end of a long text, where answers stand; in Python's quotes where it would not show as it is."""
    shown = text if text.strip() == text != "" and text.isprintable() else repr(text)
    return shown if len(shown) <= width else "..." + shown[3 - width :]
