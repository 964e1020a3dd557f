"""Packing: every token once, in its place; balanced plans that are the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.batch import MicroBatch, Sequence, pack, plan


def sequence(prompt: list[int], completion: list[int], *, advantage: float = 0.5, weight: float = 0.25) -> Sequence:
    n = len(completion)
    return Sequence(prompt, completion, [-0.1 * token for token in completion], [2] + [0] * (n - 1), advantage, weight)


def test_two_sequences_by_hand() -> None:
    first, second = (
        sequence([5, 6], [7, 8, 9], advantage=1.0, weight=0.1),
        sequence([3], [4], advantage=-2.0, weight=0.2),
    )
    (mb,) = pack([first, second], tokens_per_microbatch=16, context=16)
    assert mb.ids_T.tolist() == [5, 6, 7, 8, 9, 3, 4]
    assert mb.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert mb.cu_seqlens.tolist() == [0, 5, 7]
    assert mb.cu_seqlens.dtype == torch.int32
    assert mb.max_seqlen == 5
    # 7 is predicted at the last prompt token, 9 at 8; 4 at the second sequence's first token
    assert mb.predict_N.tolist() == [1, 2, 3, 5]
    assert mb.targets_N.tolist() == [7, 8, 9, 4]
    assert mb.sequence_N.tolist() == [0, 0, 0, 1]
    assert mb.advantages_N.tolist() == [1.0, 1.0, 1.0, -2.0]
    torch.testing.assert_close(mb.weights_N, torch.tensor([0.1, 0.1, 0.1, 0.2]))
    torch.testing.assert_close(mb.sampler_logprobs_N, torch.tensor([-0.7, -0.8, -0.9, -0.4]))
    assert mb.lag_N.tolist() == [2, 0, 0, 2]
    assert (mb.rows, mb.num_sequences, mb.lengths) == ([0, 1], 2, [3, 1])


def test_padding_is_a_sequence_of_its_own_that_predicts_nothing() -> None:
    (mb,) = pack([sequence([5, 6], [7, 8, 9])], tokens_per_microbatch=16, context=16, pad_to=4)
    assert mb.cu_seqlens.tolist() == [0, 5, 8]
    assert mb.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert mb.num_sequences == 1
    assert mb.predict_N.tolist() == [1, 2, 3]
    (full,) = pack([sequence([5, 6], [7, 8])], tokens_per_microbatch=16, context=16, pad_to=4)
    assert full.cu_seqlens.tolist() == [0, 4]


def test_a_rank_without_rows_gets_a_micro_batch_that_trains_nothing() -> None:
    (mb,) = pack([sequence([5], [7])], tokens_per_microbatch=8, context=16, rank=1, ranks=2)
    assert mb.ids_T.shape == (1,)
    assert mb.cu_seqlens.tolist() == [0, 1]
    assert (mb.rows, mb.num_sequences, mb.lengths) == ([], 0, [])
    for values_N in (mb.predict_N, mb.targets_N, mb.sequence_N, mb.weights_N, mb.lag_N, mb.sampler_logprobs_N):
        assert values_N.shape == (0,)


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 has 5 tokens \(2 prompt \+ 3 completion\), the model's context is 4"):
        pack([sequence([5, 6], [7, 8, 9])], tokens_per_microbatch=16, context=4)


@pytest.mark.parametrize(
    "broken",
    [
        Sequence([1], [2, 3], [-1.0], [0, 0], 0.0, 0.0),
        Sequence([1], [2, 3], [-1.0, -1.0], [0], 0.0, 0.0),
        Sequence([], [2], [-1.0], [0], 0.0, 0.0),
        Sequence([1], [], [], [], 0.0, 0.0),
    ],
)
def test_short_arrays_are_never_padded(broken: Sequence) -> None:
    with pytest.raises(AssertionError, match="row 0"):
        pack([broken], tokens_per_microbatch=16, context=16)


def test_plan_by_hand() -> None:
    # 6+2, 5+3, 4+4 fill three micro-batches of 8 exactly
    assert sorted(plan([6, 2, 5, 3, 4, 4], 8)[0]) == [[0, 1], [2, 3], [4, 5]]
    # a row longer than the budget stays alone
    assert sorted(plan([9, 1, 1], 4)[0]) == [[0], [1, 2]]
    # even loads rather than one full and one nearly empty: 3 rows of 2 and one of 4 within 8
    loads = [sum([2, 2, 4, 2][row] for row in rows) for rows in plan([2, 2, 4, 2], 8)[0]]
    assert sorted(loads) == [4, 6]


def test_the_budget_counts_more_than_even_loads() -> None:
    # longest first onto the least loaded gives 3+2+2 and 3+2, and 7 is too many; first-fit has 3+3 and 2+2+2
    assert sorted(plan([3, 3, 2, 2, 2], 6)[0]) == [[0, 1], [2, 3, 4]]


def test_plan_gives_ranks_equal_rounds() -> None:
    lengths = [8, 7, 6, 5, 4, 3, 2, 1]
    ranks = plan(lengths, 9, ranks=2)
    loads = [[sum(lengths[row] for row in rows) for rows in rank] for rank in ranks]
    assert len(ranks[0]) == len(ranks[1]) == 2
    assert loads == [[9, 9], [9, 9]]
    with pytest.raises(ValueError, match=r"train\.tokens_per_microbatch=0"):
        plan([1], 0)


@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    budget=st.integers(1, 400),
    ranks=st.integers(1, 4),
)
def test_every_row_once_and_within_budget(lengths: list[int], budget: int, ranks: int) -> None:
    plans = plan(lengths, budget, ranks)
    assert plans == plan(list(lengths), budget, ranks)
    assert sorted(row for rank in plans for rows in rank for row in rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plans}) == 1
    for rank in plans:
        for rows in rank:
            assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1
    # first-fit decreasing needs at most 11/9 of the fewest bins, and the fewest is at least the total over the budget
    if lengths and max(lengths) <= budget:
        fewest = -(-sum(lengths) // budget)
        halves = sum(2 * n > budget for n in lengths)
        assert len(plans[0]) <= -(-max(2 * fewest, halves) // ranks)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12), st.integers(4, 40))
def test_what_goes_in_comes_out(shapes: list[tuple[int, int]], budget: int) -> None:
    rows = [
        Sequence(
            list(range(p)), [100 * i + j for j in range(c)], [-float(j) for j in range(c)], [i] * c, float(i), i / 7
        )
        for i, (p, c) in enumerate(shapes)
    ]
    seen: dict[int, list[int]] = {}
    for mb in pack(rows, tokens_per_microbatch=budget, context=20, pad_to=8):
        assert len(mb.ids_T) % 8 == 0
        assert mb.ids_T[mb.predict_N + 1].equal(mb.targets_N)  # the target stands right behind its predictor
        for place, row in enumerate(mb.rows):
            mine_N = mb.sequence_N == place
            seen[row] = mb.targets_N[mine_N].tolist()
            assert mb.advantages_N[mine_N].unique().tolist() == [float(row)]
            assert mb.sampler_logprobs_N[mine_N].tolist() == rows[row].sampler_logprobs
            assert mb.lag_N[mine_N].tolist() == rows[row].lags
    assert seen == {i: row.completion_ids for i, row in enumerate(rows)}


def test_moving_keeps_every_field() -> None:
    (mb,) = pack([sequence([5, 6], [7, 8, 9])], tokens_per_microbatch=16, context=16)
    assert mb.to("cpu") is mb
    moved = mb.to("meta")
    assert isinstance(moved, MicroBatch)
    assert moved.ids_T.device.type == moved.lag_N.device.type == "meta"
    assert (moved.rows, moved.lengths, moved.max_seqlen) == (mb.rows, mb.lengths, mb.max_seqlen)
