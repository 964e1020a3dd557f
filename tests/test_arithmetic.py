"""The arithmetic task: hand-computed texts, and a split that is fixed, complete and without overlap."""

import hashlib
import random
from bisect import bisect_left

import pytest

from grpo.data import arithmetic


def test_texts_of_a_problem_worked_by_hand() -> None:
    # 7, 7+8 = 15, 15+5 = 20, 20+3 = 23, 23+9 = 32, 32+2 = 34
    assert arithmetic.prompt("785392") == "785392="
    assert arithmetic.answer("785392") == "4"
    assert arithmetic.direct_completion("785392") == ":4"
    assert arithmetic.thinking_completion("785392") == "750324:4"
    assert arithmetic.thinking_completion("09") == "09:9"


@pytest.mark.parametrize(
    ("completion", "given"),
    [(":4", "4"), ("750324:4", "4"), ("750324:", ""), ("750324", None), ("", None), (":1:2", "2"), (":44", "44")],
)
def test_given_answer_is_what_follows_the_last_colon(completion: str, given: str | None) -> None:
    assert arithmetic.given_answer(completion) == given


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_every_problem_is_either_trained_or_held_out(digits: int) -> None:
    most = min(1024, 10**digits // 2)
    train = [row["problem"] for row in arithmetic.train_rows(digits)]
    held_out = [row["problem"] for row in arithmetic.held_out_rows(most, digits)]
    assert sorted(train + held_out) == [f"{number:0{digits}d}" for number in range(10**digits)]
    assert train == sorted(train)


def test_no_held_out_problem_of_six_digits_is_trained() -> None:
    train, held_out = arithmetic.train_rows(), arithmetic.held_out_rows(1024)
    assert len(train) == 10**6 - 1024
    assert len({row["problem"] for row in held_out}) == 1024
    for row in held_out:
        place = bisect_left(train, row["problem"], key=lambda trained: trained["problem"])
        assert train[place]["problem"] != row["problem"]


def test_held_out_problems_are_the_same_everywhere() -> None:
    random.seed(1)
    rows = arithmetic.held_out_rows()
    assert len(rows) == 256
    assert [row["problem"] for row in rows[:3]] == ["882914", "345106", "576948"]
    assert (
        hashlib.sha256(",".join(row["problem"] for row in rows).encode()).hexdigest()
        == "98c5dcfd8e9c01df4e6dc7bfc3257d1517632657118e6b431ddc3bf5bd7fe646"
    )
    # A smaller evaluation asks the first of the same problems.
    assert list(arithmetic.held_out_rows(10)) == rows[:10]


def test_answers_of_the_held_out_problems_are_balanced() -> None:
    counts = [sum(row["answer"] == str(digit) for row in arithmetic.held_out_rows()) for digit in range(10)]
    # A policy that always says the same digit must look as bad as chance; 25.6 each, standard deviation 4.8.
    assert sum(counts) == 256
    assert max(counts) <= 40


def test_rows_index_like_a_list() -> None:
    rows = arithmetic.train_rows(2)
    every = list(rows)
    assert len(every) == len(rows) == 50
    assert rows[-1] == every[-1] == rows[49]
    assert rows[10:20:3] == every[10:20:3]
    with pytest.raises(IndexError):
        rows[50]
    row = arithmetic.train_rows(18)[-1]
    assert row["prompt"] == row["problem"] + "="
    assert len(row["problem"]) == 18
    assert row["answer"] == str(sum(map(int, row["problem"])) % 10)


@pytest.mark.parametrize("digits", [0, -1, 19])
def test_digits_out_of_range_are_refused(digits: int) -> None:
    with pytest.raises(ValueError, match=f"digits={digits}: must be 1 to 18"):
        arithmetic.train_rows(digits)
    with pytest.raises(ValueError, match=f"digits={digits}: must be 1 to 18"):
        arithmetic.held_out_rows(1, digits)


@pytest.mark.parametrize(("count", "digits", "most"), [(0, 6, 1024), (1025, 6, 1024), (51, 2, 50), (256, 2, 50)])
def test_count_out_of_range_is_refused(count: int, digits: int, most: int) -> None:
    with pytest.raises(ValueError, match=f"data.eval_rows={count}: with data.digits={digits}, 1 to {most} problems"):
        arithmetic.held_out_rows(count, digits)
