"""Rewards of text, how rewards are combined, and the mistakes in their configuration that are named."""

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from reward_tools import MINE, completion, make, row, score, score_all

from grpo.rewards import Rewards, build_rewards
from grpo.rewards.base import to_number
from grpo.rewards.extract import last_boxed, last_number, last_tag, whole_number
from grpo.rewards.options import check_types
from grpo.types import Completion, Group

# ---- text ----


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("the answer is 42.", "42"),
        ("3 apples and 4 pears", "4"),
        ("1,234,567.8 people", "1234567.8"),
        ("1{,}234", "1234"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("-5", "-5"),
        ("x = \u22125", "-5"),
        ("+5", "5"),
        ("3-5", "5"),
        ("3 -5", "-5"),
        ("f(x)-5", "5"),
        ("$18", "18"),
        (r"\boxed{18}", "18"),
        ("18%", "18"),
        (".5", "0.5"),
        ("No.5", "5"),
        ("1.50", "1.5"),
        ("1e3", "1000"),
        ("2.5E-1", "0.25"),
        ("5eggs", "5"),
        ("version 1.2.3", "1.2"),
        ("x2", None),
        ("route66", None),
        ("", None),
        ("none", None),
        ("الجواب ٥", "5"),
        ("\u202b٤٢\u202c", "42"),
        ("0.1 + 0.2", "0.2"),
        ("9" * 400, "9" * 400),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [("1,000", "1000"), (" $18 ", "18"), ("-3.5", "-3.5"), (r"10\%", "10"), ("18 dollars", None), ("1/2", None)],
)
def test_whole_number(text: str, number: str | None) -> None:
    assert whole_number(text) == (None if number is None else Decimal(number))


def test_last_boxed_and_last_tag() -> None:
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}} {") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1\}}") == r"\{1\}"
    assert last_boxed(r"\boxed{\text{a\}}}") == r"\text{a\}}"
    assert last_boxed(r"\boxed{1} \boxed{\{2}") == r"\{2"
    assert last_boxed(r"\boxed{1} \boxed{2\}") is None
    assert last_boxed(r"\boxed{1} \boxed{") is None
    assert last_boxed("") is None
    assert last_tag("<answer>1</answer> <answer>2</answer>", "answer") == "2"
    assert last_tag("<answer>1</answer> <answer>2", "answer") is None


def test_text_is_scanned_in_linear_time() -> None:
    """A pattern that backtracks would take minutes for these; the suite's time limit is the assertion."""
    for text in (
        "1," * 200_000,
        "1" * 200_000 + "x",
        r"\boxed{" * 50_000,
        "1,234" * 50_000,
        "-" * 200_000,
        "." * 200_000,
    ):
        last_number(text)
        last_boxed(text)
        last_tag(text, "answer")


@pytest.mark.parametrize(
    ("options", "text", "reward"),
    [
        ({}, "4", 1.0),
        ({}, " 4\n", 1.0),
        ({}, "4.0", 0.0),
        ({}, "the answer is 4", 0.0),
        ({"after": ":"}, "1234:4", 1.0),
        ({"after": ":"}, "12:9:4", 1.0),
        ({"after": ":"}, "4", 0.0),
        ({"after": ":"}, "12:44", 0.0),
        ({"after": ":"}, "4:", 0.0),
        ({"tag": "answer"}, "<answer>4</answer>.", 1.0),
        ({"tag": "answer"}, "4", 0.0),
        ({"boxed": True}, r"\boxed{4}", 1.0),
        ({"boxed": True}, r"\boxed{4} \boxed{", 0.0),
    ],
)
def test_exact_match(options: dict[str, Any], text: str, reward: float) -> None:
    assert score(make("exact_match", **options), text) == [reward]


def test_exact_match_ignores_case_when_asked_to() -> None:
    assert score(make("exact_match"), "straße", prompt=row(answer="STRASSE")) == [0.0]
    assert score(make("exact_match", ignore_case=True), "straße", prompt=row(answer="STRASSE")) == [1.0]


@pytest.mark.parametrize(
    ("gold", "text", "reward"),
    [
        ("4", "So it is 4.", 1.0),
        ("4", "4.0", 1.0),
        ("4", "not 4 but 5", 0.0),
        ("4", "-4", 0.0),
        ("1,000", "it costs $1000.00", 1.0),
        ("4", "", 0.0),
        ("0.3", "0.30000000000000004", 0.0),
        ("5", "الجواب هو ٥", 1.0),
    ],
)
def test_number_match(gold: str, text: str, reward: float) -> None:
    assert score(make("number_match"), text, prompt=row(answer=gold)) == [reward]


def test_length_is_highest_at_its_target() -> None:
    tokens = [completion("abc", tokens=n) for n in (10, 15, 25)]
    asyncio.run(score_all(make("length", target=20, scale=5.0), tokens))
    assert [c.reward for c in tokens] == [-2.0, -1.0, -1.0]
    assert score(make("length", target=2, unit="characters"), "abc") == [-1.0]


def test_overlong_is_that_of_the_paper() -> None:
    """L_max 20, L_cache 5: 0 up to 15, then -1/5 a token; a completion that was cut counts as 20 long."""
    completions = [completion(tokens=n) for n in (1, 15, 16, 19, 20, 30)] + [
        completion(tokens=3, finish_reason="length")
    ]
    asyncio.run(score_all(make("overlong", max_tokens=20, cache=5), completions))
    assert [c.reward for c in completions] == [0.0, 0.0, -0.2, -0.8, -1.0, -1.0, -1.0]


def test_format_searches_the_whole_text_and_a_pattern_that_backtracks_is_not_scored() -> None:
    pattern = r"^<think>.*</think>\s*<answer>.*</answer>\s*\Z"
    texts = ("<think>a\nb</think>\n<answer>4</answer>\n", "<answer>4</answer>", "x<think></think><answer></answer>")
    assert score(make("format", pattern=pattern), *texts) == [1.0, 0.0, 0.0]
    assert score(make("format", pattern=r"^(a+)+$", timeout=0.5), "a" * 40 + "b", "aaa") == [None, 1.0]


def test_reasoning_gym_asks_the_tasks_own_scorer() -> None:
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}, "task": "chain_sum"}
    texts = ("<answer>3</answer>", "<answer>4</answer>", "3", "<answer>it is 3</answer>")
    assert score(make("reasoning_gym", tag="answer", threshold=1.0), *texts, prompt=row(**entry)) == [
        1.0,
        0.0,
        0.0,
        0.0,
    ]
    partial = score(make("reasoning_gym", tag="answer"), *texts, prompt=row(**entry))
    assert partial[:3] == [1.0, 0.0, 0.0]
    assert partial[3] is not None
    assert 0 < partial[3] < 1
    with pytest.raises(ValueError, match="scores rows of data=reasoning_gym only"):
        make("reasoning_gym").check_columns(["answer", "question"])


# ---- several at once ----


def test_rewards_are_weighted_and_named() -> None:
    rewards = make(["exact_match", {"kind": "length", "target": 1, "weight": 0.5, "name": "short"}])
    made = completion("4", tokens=3)
    asyncio.run(rewards.score(row(), made))
    assert made.rewards == {"exact_match": 1.0, "short": -2.0}
    assert made.reward == 1.0 - 1.0
    assert rewards.weights == {"exact_match": 1.0, "short": 0.5}


def test_a_reward_that_is_not_scored_leaves_no_sum_and_hides_no_other() -> None:
    rewards = make(["exact_match", f"{MINE}:nothing"])
    made = completion("4")
    with rewards:
        asyncio.run(rewards.score(row(), made))
    assert made.rewards == {"exact_match": 1.0, "nothing": None}
    assert made.reward is None


def test_values_are_of_the_groups_asked_for_and_calls_of_all_since_the_last_look() -> None:
    """The next step's completions and an evaluation's are scored meanwhile: they have no part in this step's mean."""
    rewards = make("exact_match")
    own, next_step = [completion(t) for t in ("4", "4", "4", "5")], [completion("5") for _ in range(4)]
    asyncio.run(score_all(rewards, own + next_step + [completion("5", group=-1)]))
    groups = [Group(0, row(), own[:2]), Group(1, row(), [*own[2:], Completion(1, 2, [5], [0.0], [0], "stop")])]
    stats = rewards.stats(groups)  # the last one was never scored
    assert stats["reward/exact_match/mean"] == 0.75
    assert stats["reward/exact_match/std"] == pytest.approx(0.4330127, abs=1e-6)  # sqrt(3/16)
    assert stats["reward/exact_match/timeouts"] == stats["reward/exact_match/errors"] == 0
    assert 0 < stats["reward/exact_match/seconds_mean"] <= stats["reward/exact_match/seconds_max"]
    assert rewards.stats([]) == {}
    assert rewards.stats([Group(2, row(), next_step)]) == {
        "reward/exact_match/mean": 0.0,
        "reward/exact_match/std": 0.0,
    }


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("exact", r"data.reward=exact: choose one of environment, exact_match, .*, or file.py:function"),
        ([{"kind": "exact_match", "name": "std"}], "data.reward: a reward is called 'std', as a metric of all"),
        ([], r"data.reward=\[\]: expected a reward's name"),
        ({"kind": "length"}, r"write a list: data.reward=\[\{kind"),
        ([{"name": "x"}], r"is no reward; expected a name or \{kind"),
        ([{"kind": "length", "tagret": 3}], r"data.reward\[length\].tagret: no such option; it has .*target"),
        ([{"kind": "length", "target": "x"}], r"data.reward\[length\].target='x': expected a whole number"),
        ([{"kind": "length", "target": True}], r"data.reward\[length\].target=True: expected a whole number"),
        ([{"kind": "length", "weight": "x"}], r"data.reward\[length\].weight='x': expected a number"),
        ([{"kind": "length", "unit": "words"}], r"unit='words': choose one of tokens, characters"),
        (["length", "length"], r"2 rewards are called 'length'; give them a `name`"),
        ([{"kind": "format"}], r"data.reward\[format\].pattern: has no default; give it"),
        ([{"kind": "format", "pattern": "("}], r"data.reward\[format\].pattern='\('"),
        ([{"kind": "exact_match", "on_error": "zero"}], r"on_error='zero': choose one of raise, unscored"),
        ([{"kind": "exact_match", "after": ":", "boxed": True}], r"give one of after, tag and boxed"),
        ([{"kind": "exact_match", "after": ""}], r"must not be empty"),
        ([{"kind": "http", "url": "judge:80"}], r"url='judge:80': expected http://host:port/path"),
        ([{"kind": "overlong", "cache": 200}], r"cache=200: must be below max_tokens=100"),
        (["nowhere.py:score"], r"data.reward\[score\]: there is no file nowhere.py"),
        ([f"{MINE}:nonesuch"], r"my_rewards.py defines no 'nonesuch'; its functions: matches, "),
        (["no.such.module:score"], r"there is no module 'no.such.module' \(no 'no' in sys.path\)"),
        (["a b:c d"], r"is neither file.py:function nor module:function"),
        ([{"kind": f"{MINE}:matches", "timeout": 0}], r"data.reward\[matches\].timeout=0: must be above 0"),
        ([{"kind": f"{MINE}:matches", "workers": 0}], r"data.reward\[matches\].workers=0: must be at least 1"),
    ],
)
def test_mistakes_are_named_before_anything_runs(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards(build_rewards(spec, max_tokens=100)).check()


def test_sources_are_looked_at_without_being_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    file = tmp_path / "rewards.py"
    file.write_text(
        f"open({str(marker)!r}, 'w')\ndef good(prompt, completion, level): ...\ndef bad(text): ...\n"
        "def by_name(*, prompt, completion): ...\n"
    )
    with pytest.raises(ValueError, match=r"bad\(text\) must begin with \(prompt, completion\)"):
        make(f"{file}:bad").check()
    with pytest.raises(ValueError, match=r"by_name\(\) must begin with \(prompt, completion\)"):
        make(f"{file}:by_name").check()
    rewards = make(f"{file}:good")
    rewards.check()
    with pytest.raises(ValueError, match=r"rewards.py:good asks for column 'level'; the data has answer, prompt"):
        rewards.check_columns(["answer", "prompt"])
    assert not marker.exists()
    file.write_text("def broken(:\n")
    with pytest.raises(ValueError, match=r"rewards.py, line 1: invalid syntax"):
        make(f"{file}:broken").check()


def test_numbers_of_other_libraries_are_numbers_and_nothing_else_is() -> None:
    assert to_number(True) == 1.0
    assert to_number(2) == 2.0
    assert to_number(None) is None
    for value in ("1", [1.0], {"reward": 1}, float("nan"), float("inf"), object(), 1j, 10**400):
        with pytest.raises(ValueError, match="returned"):
            to_number(value)


def test_types_are_checked_for_every_hint() -> None:
    from grpo.rewards.http import Http

    with pytest.raises(ValueError, match=r"x.headers=\{'a': 1\}: expected a mapping"):
        check_types(_with(Http(name="h", url="http://x"), headers={"a": 1}), "x")
    with pytest.raises(ValueError, match=r"x.timeout=None: expected a number"):
        check_types(_with(Http(name="h", url="http://x"), timeout=None), "x")


def _with(options: Any, **values: Any) -> Any:
    for key, value in values.items():
        setattr(options, key, value)
    return options
