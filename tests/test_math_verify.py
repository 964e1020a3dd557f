r"""Verdicts of math_verify on answers decided by hand, the same wherever it is asked, and what cannot hang it."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.rewards import Rewards, build_rewards
from grpo.types import Completion, Prompt

# (gold, completion, right). Decided by hand: a completion is right when a mathematician would accept its last box.
RIGHT = [
    # numbers
    ("42", r"\boxed{42}"),
    ("42", r"\boxed{42.0}"),
    ("42", r"\boxed{ 42 }."),
    ("-5", r"\boxed{-5}"),
    ("-5", "\\boxed{\u22125}"),
    ("1234", r"\boxed{1,234}"),
    ("1234", r"\boxed{1{,}234}"),
    ("1000", r"\boxed{1\,000}"),
    ("1000", r"\boxed{1 000}"),
    ("18", r"\boxed{\$18}"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("50", r"\boxed{50^\circ}"),
    ("2500", r"\boxed{2.5\times 10^3}"),
    ("1024", r"\boxed{2^{10}}"),
    ("6", r"\boxed{3!}"),
    ("6", r"\boxed{2\cdot 3}"),
    ("3", r"\boxed{\log_2 8}"),
    # fractions, decimals, percent
    ("1/2", r"\boxed{0.5}"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    (r"-\frac{1}{3}", r"\boxed{-1/3}"),
    ("2.5", r"\boxed{2\frac{1}{2}}"),
    ("0.5", r"\boxed{.5}"),
    (r"10\%", r"\boxed{10\%}"),
    (r"10\%", r"\boxed{0.1}"),
    (r"10\%", r"\boxed{10}"),
    ("75", r"\boxed{75\%}"),
    # roots, constants, complex numbers
    (r"\sqrt{2}", r"\boxed{\sqrt2}"),
    (r"3\sqrt{2}", r"\boxed{\sqrt{18}}"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}"),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}"),
    ("1+2i", r"\boxed{2i+1}"),
    (r"\infty", r"\boxed{\infty}"),
    # expressions and equations
    ("a+b", r"\boxed{b+a}"),
    ("2x", r"\boxed{x\cdot 2}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("(x+1)^2", r"\boxed{x^2+2x+1}"),
    ("5", r"\boxed{x=5}"),
    ("x=5", r"\boxed{5}"),
    ("x<3", r"\boxed{3>x}"),
    # sets, tuples, intervals, matrices
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("2,3", r"\boxed{3,2}"),
    ("(2,3)", r"\boxed{(2,3)}"),
    ("[0,1)", r"\boxed{[0,1)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    # choices and words
    ("C", r"\boxed{\text{C}}"),
    ("(A)", r"\boxed{A}"),
    (r"\text{(C)}", r"\boxed{C}"),
    ("Monday", r"\boxed{\text{Monday}}"),
    ("yes", r"\boxed{Yes}"),
    (r"\text{no solution}", r"\boxed{No solution}"),
    # where the answer stands
    ("7", r"\boxed{3} was wrong, so \boxed{7}"),
    ("7", r"The answer is $\boxed{7}$."),
    ("7", "\\boxed{\n7\n}"),
    ("4", r"\boxed{\boxed{4}}"),
    (r"\boxed{4}", r"\boxed{4}"),
    ("$4$", r"\boxed{\(4\)}"),
    (r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}, as \frac{1}{2} = 0.5 {"),
    ("7:00", r"\boxed{7:00}"),
]
WRONG = [
    ("5", r"\boxed{6}"),
    ("5", r"\boxed{-5}"),
    ("5", r"\boxed{5.0001}"),
    ("10", r"\boxed{01.0}"),
    ("0", r"\boxed{1 000}"),
    ("1/3", r"\boxed{0.333}"),
    (r"\sqrt{2}", r"\boxed{1.414}"),
    (r"10\%", r"\boxed{0.01}"),
    ("3x+2", r"\boxed{3x+3}"),
    ("x", r"\boxed{y}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("[0,1)", r"\boxed{[0,1]}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\text{none}}"),
    # not one answer
    ("3", r"\boxed{3,7}"),
    ("3,7", r"\boxed{3}"),
    ("6", r"\boxed{6 or 7}"),
    # words
    ("Monday", r"\boxed{\text{Tuesday}}"),
    ("yes", r"\boxed{sye}"),
    ("yes", r"\boxed{no}"),
    # no answer, or an unfinished or earlier one
    ("7", "7"),
    ("7", r"The answer is $7$."),
    ("7", ""),
    ("7", r"\boxed{}"),
    ("7", r"\boxed{ }"),
    ("7", r"\boxed{7"),
    ("7", r"\boxed{7} but then \boxed{"),
    ("7", r"\boxed{7} but then \boxed{8"),
    ("7", r"\boxed{7} and \boxed{8}"),
    ("7", r"\boxed{\frac{7}{1}"),
    (r"\frac{1}{2}", r"\boxed{\frac{}{}}"),
    ("7", r"\boxed{@@@}"),
    ("7", "\\boxed{七}"),
]
# What the library decides otherwise than a person would: known, and on the strict side.
TOO_STRICT = [
    ("18", r"\boxed{18 dollars}"),  # read as a product of letters
    ("5", "\\boxed{\u0665}"),  # digits of other scripts
    ("[0,1)", r"\boxed{0\le x<1}"),
]
TABLE = [*((g, c, 1.0) for g, c in RIGHT), *((g, c, 0.0) for g, c in WRONG), *((g, c, 0.0) for g, c in TOO_STRICT)]


def rewards(**options: Any) -> Rewards:
    return Rewards(build_rewards([{"kind": "math_verify", **options}], max_tokens=8))


def row(gold: str) -> Prompt:
    return Prompt(0, "train/0", "question", [1], {"answer": gold})


def completion(text: str) -> Completion:
    return Completion(0, 0, [1], [0.0], [0], "stop", text=text)


def verdicts(scorer: Rewards, pairs: list[tuple[str, str]]) -> list[float | None]:
    completions = [completion(text) for _, text in pairs]

    async def everything() -> None:
        await asyncio.gather(*(scorer.score(row(g), c) for (g, _), c in zip(pairs, completions, strict=True)))

    asyncio.run(everything())
    return [c.reward for c in completions]


def in_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(120)
    return results[0]


def test_the_table_on_and_off_the_main_thread() -> None:
    assert len(TABLE) >= 60
    pairs = [(gold, text) for gold, text, _ in TABLE]
    expected = [(*pair, right) for pair, (_, _, right) in zip(pairs, TABLE, strict=True)]
    with rewards() as scorer:
        here = verdicts(scorer, pairs)
        there = in_thread(lambda: verdicts(scorer, pairs))
    assert [(*pair, value) for pair, value in zip(pairs, here, strict=True)] == expected
    assert there == here


def test_every_right_gold_of_the_table_can_be_read_and_nonsense_cannot() -> None:
    with rewards() as scorer:
        unreadable = scorer.unreadable([*(g for g, _, _ in TABLE), "@@@", "???", r"\frac{}{}", r"\{1,2\\"])
    assert unreadable == {"@@@", "???", r"\frac{}{}", r"\{1,2\\"}


def test_a_gold_over_which_the_parser_hangs_is_unreadable_and_costs_no_other_gold() -> None:
    with rewards(timeout=0.5) as scorer:
        assert scorer.unreadable(["x+1", "9!!!!", "y+2"]) == {"9!!!!"}


def test_a_completion_that_hangs_the_parser_is_not_scored_and_delays_nobody() -> None:
    """Two workers: one hangs for its whole deadline, the other does everything else meanwhile."""
    order: list[str] = []

    async def one(scorer: Rewards, name: str, text: str) -> Completion:
        made = completion(text)
        await scorer.score(row("7"), made)
        order.append(name)
        return made

    async def everything(scorer: Rewards) -> list[Completion]:
        hanging = asyncio.create_task(one(scorer, "hanging", r"\boxed{9!!!!}"))
        others = await asyncio.gather(*(one(scorer, "other", r"\boxed{7.0}") for _ in range(8)))
        return [await hanging, *others]

    with rewards(timeout=3.0, workers=2) as scorer:
        scorer.wait_ready()
        hanging, *others = asyncio.run(everything(scorer))
        stats = scorer.stats([])
        assert verdicts(scorer, [("7", r"\boxed{7.0}"), ("7", r"\boxed{8.0}")]) == [1.0, 0.0]  # the worker is replaced
    assert hanging.reward is None
    assert hanging.rewards == {"math_verify": None}
    assert [c.reward for c in others] == [1.0] * 8
    assert order == ["other"] * 8 + ["hanging"]
    assert stats["reward/math_verify/timeouts"] == 1
    assert stats["reward/math_verify/errors"] == 0
    assert stats["reward/math_verify/unscored"] == 1


def test_golds_that_cannot_be_read_are_left_out_at_load(tmp_path: Path) -> None:
    from data_tools import byte_tokenizer, write_jsonl

    from grpo.data import Jsonl

    golds = ["7", r"\frac{1}{2}", "@@@", r"\text{even}"]
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"p{g}", "answer": g} for g in golds])
    data = Jsonl(path=str(file), reward="math_verify", max_prompt_tokens=64, max_tokens=8, eval_rows=0)
    report = data.load(byte_tokenizer(), 0).report["train"]
    assert report["left_out"] == {"unreadable_answer": 1}
    assert report["examples"] == {"unreadable_answer": ["train/2"]}


def test_boxed_false_takes_the_whole_completion_as_the_answer() -> None:
    pairs = [("7", text) for text in ("7", " \\frac{14}{2}\n", "so it is 7", "8", "")]
    with rewards(boxed=False) as scorer:
        assert verdicts(scorer, pairs) == [1.0, 1.0, 0.0, 0.0, 0.0]
