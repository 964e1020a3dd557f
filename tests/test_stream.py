"""The order of prompts: every row once an epoch, decided by seed and epoch alone, the same for ever."""

from collections import Counter
from pathlib import Path

import pytest
from data_tools import byte_tokenizer, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.data import Arithmetic, Jsonl, Mixture
from grpo.data.base import LoadedData
from grpo.data.mixture import BLOCK, shares
from grpo.data.order import row_at

TOKENIZER = byte_tokenizer()


def load(tmp_path: Path, count: int, *, seed: int = 0, epochs: int | None = None, eval_rows: int = 0) -> LoadedData:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {i}", "answer": i} for i in range(count)])
    data = Jsonl(
        path=str(file),
        reward="number_match",
        max_prompt_tokens=64,
        max_tokens=8,
        epochs=epochs,
        eval_rows=eval_rows,
    )
    return data.load(TOKENIZER, seed)


@given(rows=st.integers(1, 400), seed=st.integers(0, 9), epoch=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_epoch_has_every_row_once(rows: int, seed: int, epoch: int) -> None:
    assert sorted(row_at(place, rows, seed, epoch) for place in range(rows)) == list(range(rows))


def test_orders_are_those_of_earlier_releases() -> None:
    """A resume counts on it. These numbers must never change."""
    assert [row_at(place, 10, 0, 0) for place in range(10)] == ORDER_0_0
    assert [row_at(place, 10, 0, 1) for place in range(10)] == ORDER_0_1
    assert [row_at(place, 10, 1, 0) for place in range(10)] == ORDER_1_0
    assert row_at(123_456, 10**12, 7, 3) == LARGE


ORDER_0_0 = [0, 8, 6, 3, 9, 2, 5, 4, 7, 1]
ORDER_0_1 = [9, 3, 6, 7, 1, 4, 0, 5, 2, 8]
ORDER_1_0 = [2, 4, 9, 7, 0, 8, 3, 5, 6, 1]
LARGE = 660_224_662_378


@pytest.mark.parametrize(("rows", "orders", "limit"), [(2, 2, 10.8), (3, 6, 20.5), (4, 24, 49.7)])
def test_all_orders_of_a_small_set_are_equally_frequent(rows: int, orders: int, limit: float) -> None:
    """Chi-square over 6,000 epochs against its 99.9 % quantile for orders - 1 degrees of freedom."""
    counts = Counter(tuple(row_at(place, rows, 0, epoch) for place in range(rows)) for epoch in range(6000))
    expected = 6000 / orders
    assert len(counts) == orders
    assert sum((n - expected) ** 2 / expected for n in counts.values()) < limit


def test_ten_prompts_for_three_epochs_end_after_thirty_places(tmp_path: Path) -> None:
    train = load(tmp_path, 10, epochs=3).train
    prompts = [train.prompt(i) for i in range(33)]
    rows = [p.row for p in prompts if p is not None]
    assert [p is None for p in prompts] == [False] * 30 + [True] * 3
    assert all(sorted(rows[e * 10 : e * 10 + 10]) == [f"train/{i}" for i in range(10)] for e in range(3))
    assert rows[:10] != rows[10:20] != rows[20:]
    assert [p.index for p in prompts if p is not None] == list(range(30))


def test_without_epochs_a_set_of_one_row_is_endless(tmp_path: Path) -> None:
    train = load(tmp_path, 1).train
    assert {p.row for i in (0, 1, 2, 10**9) if (p := train.prompt(i)) is not None} == {"train/0"}


def test_a_place_gives_the_same_prompt_whenever_it_is_asked_for(tmp_path: Path) -> None:
    once = load(tmp_path, 10).train
    again = load(tmp_path, 10).train
    assert [once.prompt(i) for i in range(25)] == [again.prompt(i) for i in reversed(range(25))][::-1]


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    orders = {
        tuple(p.row for i in range(10) if (p := load(tmp_path, 10, seed=seed).train.prompt(i)) is not None)
        for seed in range(3)
    }
    assert len(orders) == 3


def test_the_held_out_rows_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    held_out = [load(tmp_path, 50, seed=seed, eval_rows=8).evals["held_out"] for seed in (0, 1)]
    assert held_out[0] == held_out[1]
    assert len(held_out[0]) == 8


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [([1, 1], 10, [5, 5]), ([3, 1], 10, [8, 2]), ([2, 1, 1], 10, [5, 3, 2]), ([1000, 1], 10, [9, 1]), ([1], 7, [7])],
)
def test_shares_add_up_and_leave_nobody_out(weights: list[float], total: int, expected: list[int]) -> None:
    assert shares(weights, total) == expected


def mixture(seed: int) -> LoadedData:
    def part(digits: int) -> Arithmetic:
        return Arithmetic(
            reward=[{"kind": "exact_match", "after": ":"}],
            max_prompt_tokens=16,
            max_tokens=16,
            template="plain",
            digits=digits,
            eval_rows=4,
        )

    parts = {"short": part(2), "long": part(6)}
    return Mixture(parts=parts, weights={"long": 3.0}, max_prompt_tokens=16, max_tokens=16).load(TOKENIZER, seed)


def test_a_mixture_has_each_part_by_weight_in_every_block_and_in_the_parts_own_order() -> None:
    loaded = mixture(seed=5)
    rows = [p.row for i in range(2 * BLOCK) if (p := loaded.train.prompt(i)) is not None]
    for block in (rows[:BLOCK], rows[BLOCK:]):
        assert Counter(row.partition("/")[0] for row in block) == {"long": 750, "short": 250}
    short = [row for row in rows if row.startswith("short/")]
    assert [Counter(short[e * 50 : e * 50 + 50]).most_common(1)[0][1] for e in range(10)] == [1] * 10  # 10 epochs of 50
    other = mixture(seed=6).train
    other_rows = [p.row for i in range(20) if (p := other.prompt(i)) is not None]
    assert other_rows != rows[:20]
    assert sorted(loaded.evals) == ["long_held_out", "short_held_out"]
    indices = [p.index for prompts in loaded.evals.values() for p in prompts]
    assert indices == list(range(-1, -9, -1))
