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
