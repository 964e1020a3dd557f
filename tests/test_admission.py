"""Law 2 by itself: any order of events keeps the lag bound, and nothing but the bound stops a group."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.rollout.admission import Admission


def admission(**changes: int) -> Admission:
    values = {"groups_per_step": 2, "max_staleness": 1, "max_inflight": 100, "total_groups": 1000}
    return Admission(**{**values, **changes})


def test_the_first_version_admits_one_plus_staleness_steps() -> None:
    for staleness, places in ((0, 2), (1, 4), (4, 10)):
        a = admission(max_staleness=staleness)
        while a.may_admit():
            a.admit(1)
        assert a.places == places


def test_a_new_version_admits_one_more_step_and_a_handed_back_place_one_more_group() -> None:
    a = admission(max_staleness=0)
    a.admit(1), a.admit(1)
    assert not a.may_admit()
    a.hand_back()
    assert a.may_admit()
    a.admit(1)
    a.advance(1)
    a.admit(1), a.admit(1)
    assert not a.may_admit()


def test_open_requests_stop_new_groups_until_they_close() -> None:
    a = admission(max_inflight=8)
    a.admit(8)
    assert not a.may_admit()
    a.close_request()
    assert a.may_admit()


def test_nothing_is_generated_past_the_last_step() -> None:
    a = admission(max_staleness=4, total_groups=3)
    while a.may_admit():
        a.admit(1)
    assert a.places == 3


@pytest.mark.parametrize(("key", "value"), [("max_staleness", -1), ("max_inflight", 0), ("groups_per_step", 0)])
def test_impossible_settings_name_key_and_value(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{key}={value}"):
        admission(**{key: value})


def test_the_version_never_goes_back() -> None:
    a = admission(version=3)
    with pytest.raises(AssertionError, match="from 3 to 2"):
        a.advance(2)


@given(
    staleness=st.integers(0, 4),
    per_step=st.integers(1, 4),
    start=st.integers(0, 50),
    events=st.lists(
        st.tuples(st.sampled_from(["admit", "finish", "discard", "train"]), st.integers(0, 7)), max_size=200
    ),
)
@settings(deadline=None)
def test_no_order_of_events_breaks_the_bound(
    staleness: int, per_step: int, start: int, events: list[tuple[str, int]]
) -> None:
    """A model of the loader and the trainer: groups finish in any order, are consumed in order, some are discarded."""
    a = admission(
        groups_per_step=per_step, max_staleness=staleness, total_groups=10**6, version=start, places=start * per_step
    )
    born: dict[int, int] = {}  # group -> version at its admission
    finished: dict[int, bool] = {}  # group -> kept
    admitted = consumed = 0
    for event, choice in events:
        open_groups = [g for g in born if g not in finished]
        if event == "admit" and a.may_admit():
            born[admitted] = a.version
            admitted += 1
            a.admit(1)
        elif event in ("finish", "discard") and open_groups:
            finished[open_groups[choice % len(open_groups)]] = event == "finish"
            a.close_request()
            if event == "discard":
                a.hand_back()
        elif event == "train":
            batch: list[int] = []
            position = consumed
            while len(batch) < per_step and position in finished:
                batch += [position] if finished[position] else []
                position += 1
            if len(batch) == per_step:
                assert all(a.version - born[g] <= staleness for g in batch)
                consumed = position
                a.advance(a.version + 1)
    if staleness == 0:
        assert all(born[g] >= a.version - 1 for g in born if g >= consumed)
