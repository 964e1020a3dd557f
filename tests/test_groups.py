"""Which groups are trained, and on what terms."""

import math

import pytest

from grpo.groups import GroupRules, NothingToLearn, group_metrics, settle_outcomes
from grpo.losses import PPOClip
from grpo.losses.base import Loss
from grpo.types import Completion, Group, Prompt

PROMPT = Prompt(0, "r", "p", [3], {})


def group(*rewards: float | None, index: int = 0, finish: str = "stop", tokens: int = 2) -> Group:
    completions = [
        Completion(index, i, [4] * tokens, [-1.0] * tokens, [0] * tokens, finish, reward=r)
        for i, r in enumerate(rewards)
    ]
    return Group(index, PROMPT, completions)


def rules(loss: Loss | None = None, zero_variance: str = "discard", limit: int = 100) -> GroupRules:
    return GroupRules(loss or PPOClip(), zero_variance, limit)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ((1.0, 1.0, 1.0), "zero_variance:all_right"),
        ((0.0, 0.0, 0.0), "zero_variance:all_wrong"),
        ((0.95,) * 8, "zero_variance:other"),
        ((1.0, None, None), "unscored"),
        ((None, math.nan, None), "unscored"),
        ((1.0, 0.0, 1.0), None),
        ((0.95,) * 7 + (0.0,), None),
        ((1.0, 0.0, None), None),
    ],
)
def test_equal_groups_leave_the_stream_with_the_reason(rewards: tuple[float | None, ...], why: str | None) -> None:
    assert rules().judge(group(*rewards)) == why


def test_keep_trains_equal_groups_with_advantage_zero_but_not_unscored_ones() -> None:
    keep = rules(zero_variance="keep")
    equal = group(1.0, 1.0)
    assert keep.judge(equal) is None
    settle_outcomes([equal], keep.loss, {})
    assert [c.advantage for c in equal.completions] == [0.0, 0.0]
    assert keep.judge(group(None, None)) == "unscored"


def test_so_many_equal_groups_in_a_row_end_the_run_and_say_of_which_kind() -> None:
    r = rules(limit=3)
    r.judge(group(0.0, 0.0)), r.judge(group(0.0, 0.0))
    r.judge(group(0.0, 1.0))  # the row starts again
    r.judge(group(0.0, 0.0)), r.judge(group(1.0, 1.0))
    with pytest.raises(NothingToLearn, match="3 groups in a row") as caught:
        r.judge(group(0.0, 0.0))
    assert caught.value.kind == "all_wrong"


def test_outcomes_trained_masked_discarded() -> None:
    loss = PPOClip(mask_truncated=True)
    kept, gone, cut = group(1.0, 0.0, None), group(1.0, 1.0, index=1), group(1.0, 0.0, index=2, finish="length")
    gone.discarded = "zero_variance:all_right"
    outcomes = settle_outcomes([kept, gone, cut], loss, {})
    assert [outcomes[id(c)] for c in kept.completions] == ["trained", "trained", "masked:unscored"]
    assert {outcomes[id(c)] for c in gone.completions} == {"discarded:zero_variance:all_right"}
    assert {outcomes[id(c)] for c in cut.completions} == {"masked:truncated"}
    assert kept.completions[0].advantage == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6))
    assert gone.completions[0].advantage is None


def test_a_length_penalty_can_tell_equal_rewards_apart() -> None:
    loss = PPOClip(overlong_share=0.5, overlong_factor=1.0, max_tokens=10)
    g = group(1.0, 1.0)
    g.completions[1].token_ids = [4] * 10
    assert rules(loss).judge(g) is None
    assert [c.reward for c in g.completions] == [1.0, 0.0]
    assert g.completions[1].rewards == {"overlong": -1.0}


def test_metrics_count_discarded_groups_too() -> None:
    kept, gone = group(1.0, 0.0), group(1.0, 1.0, index=1)
    gone.discarded = "zero_variance:all_right"
    metrics = group_metrics([kept, gone])
    assert metrics["reward/mean"] == 0.75
    assert metrics["reward/std"] == pytest.approx(math.sqrt(3) / 4)
    assert (metrics["groups/consumed"], metrics["groups/trained"], metrics["groups/zero_variance"]) == (2, 1, 1)
    assert metrics["completion/length_mean"] == 2
    assert metrics["completion/truncated_fraction"] == 0
