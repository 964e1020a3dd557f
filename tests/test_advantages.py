"""Advantages by hand-computed numbers, and what an unscored, equal or lonely reward does (CASES 6 and 7)."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.advantages import EPS, KINDS, advantages, is_equal, overlong_penalty

SCALAR = [kind for kind in KINDS if kind != "gdpo"]
Components = list[list[dict[str, float | None]]]


def named(**columns: list[list[float | None]]) -> Components:
    """Components of each completion, from one table of rewards per name."""
    first = next(iter(columns.values()))
    return [
        [{name: rows[g][i] for name, rows in columns.items()} for i in range(len(first[g]))] for g in range(len(first))
    ]


def test_mean_std_by_hand() -> None:
    """1, 0, 0, 0: mean 0.25, std (ddof 1) 0.5."""
    (got,) = advantages("mean_std", [[1.0, 0.0, 0.0, 0.0]])
    assert got == pytest.approx([0.75 / 0.500001, *[-0.25 / 0.500001] * 3], rel=1e-12)


def test_the_epsilon_is_1e_6() -> None:
    """Rewards 2e-6 apart: std 1.414e-6, so the epsilon is 41 % of the scale."""
    (got,) = advantages("mean_std", [[2e-6, 0.0]])
    assert got == pytest.approx([1e-6 / (math.sqrt(2) * 1e-6 + 1e-6), -1e-6 / (math.sqrt(2) * 1e-6 + 1e-6)], rel=1e-9)


def test_mean_by_hand() -> None:
    assert advantages("mean", [[1.0, 0.0, 0.0, 0.0], [3.0, 1.0]]) == [[0.75, -0.25, -0.25, -0.25], [1.0, -1.0]]


def test_rloo_is_the_reward_minus_the_mean_of_the_others() -> None:
    (got,) = advantages("rloo", [[3.0, 1.0, 2.0]])
    assert got == pytest.approx([3.0 - 1.5, 1.0 - 2.5, 2.0 - 2.0])


def test_batch_std_divides_by_the_std_of_the_raw_rewards_of_the_batch() -> None:
    """Rewards 1, 0, 5, 3: mean 2.25, squares 1.5625 + 5.0625 + 7.5625 + 0.5625 = 14.75, ddof 1."""
    got = advantages("batch_std", [[1.0, 0.0], [5.0, 3.0]])
    scale = math.sqrt(14.75 / 3) + EPS
    assert got == [pytest.approx([0.5 / scale, -0.5 / scale]), pytest.approx([1 / scale, -1 / scale])]


def test_maxrl_divides_by_the_mean() -> None:
    (got,) = advantages("maxrl", [[1.0, 0.0, 0.0, 0.0]])
    assert got == pytest.approx([3.0, -1.0, -1.0, -1.0])
    with pytest.raises(ValueError, match=r"maxrl .* must be 0 or above; got -1.0"):
        advantages("maxrl", [[1.0, -1.0]])


def test_gdpo_normalizes_each_reward_before_the_sum() -> None:
    """Right: 1, 0. Format: 0, 10. In the sum of raw rewards the second would win; here the weights decide."""
    components = named(right=[[1.0, 0.0], [1.0, 0.0]], form=[[0.0, 10.0], [10.0, 0.0]])
    totals = [[1.0, 10.0], [11.0, 0.0]]
    got = advantages("gdpo", totals, components, {"right": 1.0, "form": 0.5})
    a, b = 0.5 / (math.sqrt(0.5) + EPS), 5 / (math.sqrt(50) + EPS)
    sums = [a - 0.5 * b, -a + 0.5 * b, a + 0.5 * b, -a - 0.5 * b]
    scale = np.std(sums, ddof=1) + EPS
    assert got[0] == pytest.approx([sums[0] / scale, sums[1] / scale], rel=1e-9)
    assert got[1] == pytest.approx([sums[2] / scale, sums[3] / scale], rel=1e-9)
    assert got[0][0] > 0  # right and badly formed beats wrong and well formed, by its weight
    assert advantages("gdpo", totals, components) != got


def test_gdpo_is_white_over_the_batch_also_where_a_component_is_unscored() -> None:
    components = named(right=[[1.0, 0.0, 0.0]], form=[[1.0, 0.0, None]])
    (got,) = advantages("gdpo", [[2.0, 0.0, 0.0]], components)
    assert sum(a for a in got if a is not None) == pytest.approx(0.0, abs=1e-12)
    assert np.std([a for a in got if a is not None], ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_gdpo_leaves_an_unscored_completion_out() -> None:
    components = named(right=[[1.0, 0.0, 0.0]], form=[[1.0, 0.0, 1.0]])
    (got,) = advantages("gdpo", [[2.0, 0.0, None]], components)
    (without,) = advantages("gdpo", [[2.0, 0.0]], [components[0][:2]])
    assert got == [*without, None]


def test_gdpo_refuses_what_it_cannot_use() -> None:
    components = named(right=[[1.0, 0.0]])
    with pytest.raises(ValueError, match="several rewards"):
        advantages("gdpo", [[1.0, 0.0]])
    with pytest.raises(ValueError, match=r"rewards named \['right'\], but weights only for \['form'\]"):
        advantages("gdpo", [[1.0, 0.0]], components, {"form": 1.0})


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"rollout.group_size=1: loss.advantage={kind}"):
        advantages(kind, [[1.0, 0.0], [1.0]], named(a=[[1.0, 0.0], [1.0]]))


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"loss.advantage='gae': choose one of mean_std, mean"):
        advantages("gae", [[1.0, 0.0]])


@pytest.mark.parametrize("missing", [None, math.nan])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unscored_reward_leaves_seven_finite_ones(kind: str, missing: float | None) -> None:
    rewards: list[float | None] = [1.0, 0.0, missing, 1.0, 0.0, 0.0, 0.0, 1.0]
    (got,) = advantages(kind, [rewards], named(only=[rewards]))
    scored = [r for i, r in enumerate(rewards) if i != 2]
    (expected,) = advantages(kind, [scored], named(only=[scored]))
    assert got[2] is None
    assert [a for i, a in enumerate(got) if i != 2] == expected
    assert all(a is not None and math.isfinite(a) for a in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_an_advantage_of_exactly_zero(kind: str) -> None:
    """Eight times 0.95 in float32 have a std of 6e-8; with an epsilon of 1e-9 that was an advantage of 0.92."""
    rewards = [float(r) for r in np.full(8, 0.95, dtype=np.float32)]
    assert advantages(kind, [rewards, [1.0, 0.0]], named(only=[rewards, [1.0, 0.0]]))[0] == [0.0] * 8


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_one_scored_reward_has_no_baseline(kind: str) -> None:
    rewards: list[list[float | None]] = [[1.0, None, None], [1.0, 0.0, 0.0]]
    assert advantages(kind, rewards, named(only=rewards))[0] == [None, None, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_a_group_has_no_advantages(kind: str) -> None:
    assert advantages(kind, [], []) == []


def test_an_infinite_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="a reward is infinite"):
        advantages("mean_std", [[math.inf, 0.0]])


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([1.0] * 8, "all_right"),
        ([0.0] * 8, "all_wrong"),
        ([float(r) for r in np.full(8, 0.95, dtype=np.float32)], "other"),
        ([0.95] * 7 + [0.0], None),
        ([0.95] * 7 + [0.95 + 1e-12], None),
        ([1.0, None, math.nan, 1.0], "all_right"),
        ([1.0, None, math.nan], "unscored"),
        ([None, None], "unscored"),
    ],
)
def test_is_equal(rewards: list[float | None], why: str | None) -> None:
    assert is_equal(rewards) == why


def test_equal_totals_of_different_components_carry_signal_for_gdpo() -> None:
    (rows,) = named(right=[[1.0, 0.0]], form=[[0.0, 1.0]])
    assert is_equal([1.0, 1.0]) == "all_right"
    assert is_equal([1.0, 1.0], rows) is None
    assert is_equal([1.0, 1.0], named(right=[[1.0, 1.0]], form=[[0.0, 0.0]])[0]) == "all_right"


groups = st.lists(st.lists(st.integers(0, 20).map(float), min_size=2, max_size=8), min_size=1, max_size=5)


@settings(max_examples=100, deadline=None)
@given(groups, st.sampled_from(SCALAR), st.randoms())
def test_shuffling_a_group_shuffles_its_advantages(batch: list[list[float]], kind: str, random: Any) -> None:
    order = list(range(len(batch[0])))
    random.shuffle(order)
    moved = [[batch[0][i] for i in order], *batch[1:]]
    expected = advantages(kind, batch)
    assert advantages(kind, moved)[0] == pytest.approx([expected[0][i] for i in order], rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(groups, st.sampled_from(["mean_std", "batch_std", "maxrl"]), st.floats(0.1, 50))
def test_positive_scaling_leaves_normalized_advantages(batch: list[list[float]], kind: str, scale: float) -> None:
    expected = advantages(kind, batch)
    scaled = advantages(kind, [[r * scale for r in group] for group in batch])
    for got, want in zip(scaled, expected, strict=True):
        assert got == pytest.approx(want, rel=1e-3, abs=1e-9)  # not exact: epsilon does not scale


@settings(max_examples=100, deadline=None)
@given(groups, st.sampled_from(["mean_std", "mean", "rloo", "batch_std"]), st.floats(-50, 50))
def test_a_constant_on_every_reward_changes_nothing(batch: list[list[float]], kind: str, shift: float) -> None:
    expected = advantages(kind, batch)
    for got, want in zip(advantages(kind, [[r + shift for r in g] for g in batch]), expected, strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-6)
        assert sum(a for a in got if a is not None) == pytest.approx(0.0, abs=1e-9)


def test_overlong_penalty_by_hand() -> None:
    """max_tokens 20, share 0.25: a ramp of 5 tokens from 15 to 20, and not below -1 beyond."""
    got = [overlong_penalty(tokens, 20, 0.25, 1.0) for tokens in (1, 15, 16, 19, 20, 25)]
    assert got == pytest.approx([0.0, 0.0, -0.2, -0.8, -1.0, -1.0])
    assert overlong_penalty(20, 20, 0.25, 0.5) == -0.5
