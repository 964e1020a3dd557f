"""The roster: who is out gets nothing, and what was open there is cut."""

import asyncio

import pytest

from grpo.rollout.errors import TransientError
from grpo.rollout.roster import Roster

URL = "http://a:1"


def test_what_is_open_is_cut_and_cancelled_when_its_server_goes() -> None:
    async def go() -> None:
        roster, ended = Roster([URL]), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()

        waiting = asyncio.ensure_future(roster.member(URL).while_in(work()))
        await asyncio.sleep(0)
        roster.exclude(URL, "the engine died")
        async with asyncio.timeout(30):
            with pytest.raises(TransientError, match="cut off: the engine died"):
                await waiting
            await ended.wait()

    asyncio.run(go())


def test_one_that_is_in_again_starts_afresh() -> None:
    async def go() -> None:
        roster = Roster([URL])
        roster.member(URL).failures = 4
        roster.exclude(URL, "gone")
        assert (roster.live, roster.out) == ([], {URL: "gone"})
        roster.exclude(URL, "for another reason")
        assert roster.out == {URL: "gone"}, "the first reason counts"
        roster.readmit(URL)
        roster.readmit(URL)
        assert (roster.live, roster.out, roster.returns) == ([URL], {}, 1)
        assert roster.member(URL).failures == 0

        async def answer() -> int:
            for _ in range(9):  # longer than a cut takes
                await asyncio.sleep(0)
            return 7

        assert await roster.member(URL).while_in(answer()) == 7

    asyncio.run(go())


def test_choosing_waits_for_a_return() -> None:
    async def go() -> None:
        roster = Roster([URL])
        roster.exclude(URL, "gone")
        choice = asyncio.ensure_future(roster.choose())
        await asyncio.sleep(0)
        assert not choice.done()
        roster.readmit(URL)
        async with asyncio.timeout(30):
            assert (await choice).url == URL
        roster.exclude(URL, "gone again")
        again = asyncio.ensure_future(roster.choose())
        await asyncio.sleep(0)
        assert not again.done()
        assert not roster._back.is_set(), "it would wait no longer, and never let the loop go on"
        again.cancel()

    asyncio.run(go())


OTHER, THIRD = "http://b:1", "http://c:1"


@pytest.mark.parametrize(
    ("open_", "failures", "chosen"),
    [
        ((3, 1, 2), (0, 0, 0), OTHER),  # the fewest open requests
        ((3, 1, 2), (0, 2, 0), THIRD),  # of those that answer
        ((3, 1, 2), (1, 5, 2), OTHER),  # where none answers, again the fewest open ones, however often each failed
        ((2, 2, 2), (0, 0, 0), URL),
    ],
)
def test_choosing(open_: tuple[int, ...], failures: tuple[int, ...], chosen: str) -> None:
    async def go() -> str:
        roster = Roster([URL, OTHER, THIRD])
        for member, n, failed in zip(roster.members, open_, failures, strict=True):
            member.open, member.failures = n, failed
        return (await roster.choose()).url

    assert asyncio.run(go()) == chosen


def test_one_that_is_out_is_not_chosen_and_a_url_may_end_in_a_slash() -> None:
    async def go() -> str:
        roster = Roster([f"{URL}/", OTHER])
        roster.member(OTHER).open = 9
        roster.exclude(URL, "gone")
        return (await roster.choose()).url

    assert asyncio.run(go()) == OTHER


def test_nothing_is_left_running_by_work_that_ended() -> None:
    async def go() -> None:
        roster = Roster([URL])

        async def answer() -> int:
            return 7

        assert await roster.member(URL).while_in(answer()) == 7
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(go())


def test_work_that_ended_as_its_server_went_counts() -> None:
    async def go() -> int:
        roster = Roster([URL])

        async def answer() -> int:
            roster.exclude(URL, "gone")
            return 7

        return await roster.member(URL).while_in(answer())

    assert asyncio.run(go()) == 7


@pytest.mark.parametrize(
    ("versions", "floor", "foreign"),
    [
        ([4, 4], 4, False),
        ([4, 5], 4, False),  # a sync of 5 is on its way
        ([5], 4, False),
        ([3, 4], 4, True),  # older than what was confirmed when it was sent
        ([4, 3], 4, True),
        ([6], 4, True),  # newer than anything announced
        ([4, 6], 4, True),
        ([0], None, False),  # nothing was confirmed when it was sent
    ],
)
def test_versions_of_other_weights_than_ours(versions: list[int], floor: int | None, foreign: bool) -> None:
    roster = Roster([URL])
    assert not roster.foreign(versions, floor), "before anything was announced"
    roster.announce(5)
    assert roster.foreign(versions, floor) is foreign
