"""No reward of a user's can stall, end or mislead a run, whatever it does."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from reward_tools import MINE, completion, make, mine, row, score, score_all

from grpo.rewards import RewardError
from grpo.rewards import pool as pool_module
from grpo.rewards import process as process_module
from grpo.rewards.base import RewardTimeoutError
from grpo.types import Group


def test_a_function_gets_its_columns() -> None:
    prompt = row(level=3, tags=["a", "ب"], prompt="hidden", completion="hidden")
    assert score(mine("matches"), "4", "5", prompt=prompt) == [1.0, 0.0]
    assert score(mine("keywords"), "4", prompt=prompt) == [1.0]
    assert score(mine("optional"), "4", prompt=prompt) == [0.25]
    assert score(mine("numpy_number"), "4") == [0.5]
    assert score(mine("truth"), "4") == [1.0]


def test_a_module_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("from mypackage.helper import half as half\n")
    (package / "helper.py").write_text("def half(prompt, completion, **columns): return 0.5\n")
    monkeypatch.chdir(tmp_path)
    rewards = make("mypackage.scores:half")
    rewards.check()
    assert score(rewards, "4") == [0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"completion '4': KeyError: '4'\nTraceback .*my_rewards.py.*KeyError: '4'"),
        ("raises_late", r"completion '4': LookupError: late trouble\nTraceback .*my_rewards.py"),
        ("says_exit", r"completion '4': SystemExit: enough\nTraceback .*my_rewards.py"),
        ("crashes", r"killed by SIGABRT"),
        ("a_list", r"returned list of 2 \(\[1.0, 0.0\]\); one completion has one number"),
        ("a_text", r"returned a text \('1.0'\)"),
        ("not_a_number", r"returned nan; expected a finite number"),
        ("an_object", r"returned object"),
    ],
)
def test_an_error_ends_the_run_with_the_users_traceback_or_is_not_scored(name: str, message: str) -> None:
    with pytest.raises(RewardError) as failure:
        score(mine(name), "4")
    text = str(failure.value)
    assert re.search(message, text, re.DOTALL), text
    assert text.startswith(f"data.reward[{name}] failed on row train/0, completion '4': ")
    assert "grpo/rewards" not in text
    rewards = mine(name, on_error="unscored")
    assert score(rewards, "4", "4") == [None, None]
    unscored = completion("4")
    unscored.rewards = {name: None}
    stats = rewards.stats([Group(0, row(), [unscored])])
    assert (stats[f"reward/{name}/errors"], stats[f"reward/{name}/unscored"]) == (2, 2)
    assert f"reward/{name}/mean" not in stats


def test_a_reward_that_cannot_be_loaded_is_an_error_with_its_traceback(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import nonesuch\ndef score(prompt, completion): return 1\n")
    with make(f"{file}:score") as rewards, pytest.raises(RewardError) as failure:
        rewards.wait_ready()
    assert "data.reward[score] cannot be loaded: " in str(failure.value)
    assert "broken.py" in str(failure.value)
    assert "No module named 'nonesuch'" in str(failure.value)


def test_a_function_that_ends_its_process_costs_one_completion() -> None:
    assert score(mine("exits", on_error="unscored", workers=1), "a", "exit", "b") == [1.0, None, 1.0]


def test_a_function_that_never_returns_costs_its_deadline() -> None:
    rewards = mine("hangs", on_error="unscored", timeout=0.5, workers=1)
    assert score(rewards, "a", "hang", "b") == [1.0, None, 1.0]
    assert rewards.stats([])["reward/hangs/timeouts"] == 1
    with pytest.raises(RewardError, match=r"no answer within 0.5 s"):
        score(mine("hangs", timeout=0.5), "hang")


@pytest.mark.parametrize(
    ("how", "seconds", "computes", "late"),
    [
        ("rests", 1.0, True, False),  # as it would, in the eyes of the clock, on a machine that has no time for it
        ("rests", 1.0, False, True),
        ("computes", 60.0, True, True),
        ("rests", 60.0, True, True),  # for ever
    ],
)
def test_a_deadline_of_what_only_computes_is_in_seconds_of_cpu(
    how: str, seconds: float, computes: bool, late: bool
) -> None:
    async def call() -> Any:
        pool = pool_module.Pool(
            name="spend", target="my_rewards:prepare_deadline", options={}, workers=1, timeout=0.4, computes=computes
        )
        try:
            await pool.ready()
            return await pool.call(how, seconds)
        finally:
            await pool.close()

    if late:
        with pytest.raises(RewardTimeoutError, match=r"no answer within 0.4 s"):
            asyncio.run(call())
    else:
        assert asyncio.run(call()) == how


def test_a_function_that_allocates_without_end_hits_its_limit() -> None:
    with pytest.raises(RewardError, match="MemoryError"):
        score(mine("allocates", memory_gb=1.0), "4")


def test_prints_go_to_the_log_and_not_to_the_terminal(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="grpo.rewards")
    rewards = mine("prints")
    with rewards:
        asyncio.run(score_all(rewards, [completion("عربي")]))
        _wait_for(lambda: "[prints] to the descriptor" in caplog.text)
    assert "[prints] to stdout عربي" in caplog.text
    assert "[prints] to stderr" in caplog.text
    out, err = capfd.readouterr()
    assert out == ""
    assert "to std" not in err


def test_a_flood_of_prints_is_cut_off_and_blocks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="grpo.rewards")
    with mine("prints_much") as rewards:
        asyncio.run(score_all(rewards, [completion()]))
        _wait_for(lambda: "the rest is dropped" in caplog.text)
    assert caplog.text.count("[prints_much] line") == process_module.PRINTED
    assert caplog.text.count("the rest is dropped") == 1


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# ---- time ----


async def counted(work: Awaitable[Any]) -> int:
    """How often another task of this loop came to its turn while the work was going on."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.005)
            turns += 1

    task = asyncio.create_task(turn())
    await work
    task.cancel()
    return turns


@pytest.mark.parametrize("name", ["waits", "blocks", "hangs"])
def test_the_loop_goes_on_while_rewards_wait_block_or_hang(name: str) -> None:
    """At least a fifth of the turns that an idle loop would have in the half second (100), on a busy machine."""
    rewards = mine(name, timeout=0.5 if name == "hangs" else 30, on_error="unscored")
    with rewards:
        rewards.wait_ready()
        turns = asyncio.run(counted(score_all(rewards, [completion("hang")])))
    assert turns >= 20


def test_coroutines_run_at_the_same_time(tmp_path: Path) -> None:
    """Eight that meet: each waits until all eight have begun, so one after the other would never end."""
    source = (
        "import asyncio\nbegun = 0\nasync def meets(prompt, completion):\n    global begun\n    begun += 1\n"
        "    while begun < 8:\n        await asyncio.sleep(0.01)\n    return 1\n"
    )
    file = tmp_path / "rewards.py"
    file.write_text(source)
    assert score(make(f"{file}:meets", timeout=20), *("4",) * 8) == [1.0] * 8


def test_a_coroutine_that_is_late_delays_no_other_and_ends_alone() -> None:
    rewards = mine("waits_for_ever", timeout=0.5, on_error="unscored")
    assert score(rewards, "quick", "late", "quick") == [1.0, None, 1.0]
    assert rewards.stats([])["reward/waits_for_ever/timeouts"] == 1


@pytest.mark.parametrize("bad", ["block", "exit"])
def test_a_coroutine_that_takes_its_worker_down_is_found_and_the_others_run_again(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "GRACE", 0.2)
    rewards = mine("blocks_its_loop", timeout=1.0, on_error="unscored")
    assert score(rewards, "a", bad, "b", "c") == [1.0, None, 1.0, 1.0]
    stats = rewards.stats([])
    assert stats["reward/blocks_its_loop/timeouts"] == (bad == "block")
    assert stats["reward/blocks_its_loop/errors"] == (bad == "exit")


def test_nothing_is_left_after_closing() -> None:
    before = _children()
    rewards = mine("hangs", timeout=60)

    async def abandon() -> None:
        task = asyncio.create_task(rewards.score(row(), completion("hang")))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with rewards:
        rewards.wait_ready()
        asyncio.run(abandon())
    assert _children() == before
    rewards.close()  # twice does no harm


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_two_workers_start_at_a_time_and_serve_whoever_is_first_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    starting: list[int] = []
    served: list[int] = []

    class Slow:
        def __init__(self, name: str) -> None:
            self.slots, self.taken, self.lost = 1, 0, False

        async def start(self, request: Any, slots: int) -> None:
            starting.append(len(pool._starting))
            await asyncio.sleep(0.01)

        async def call(self, args: tuple[int], timeout: float, *, computes: bool) -> None:
            served.append(args[0])
            await asyncio.sleep(0.05)

        async def close(self) -> None: ...

    monkeypatch.setattr(pool_module, "Worker", Slow)

    async def go() -> None:
        nonlocal pool
        pool = pool_module.Pool(name="x", target="", options={}, workers=5, timeout=1)
        await asyncio.gather(*(pool.call(i) for i in range(12)))
        assert len(pool._live) == 5
        await pool.close()

    pool: Any = None
    asyncio.run(go())
    assert max(starting) == 2
    assert served == list(range(12))


def test_closing_ends_calls_that_are_open_or_wait_in_line_and_starts_no_new_worker() -> None:
    before = _children()
    rewards = mine("hangs", timeout=60, workers=1, on_error="unscored")
    rewards.start()
    rewards.wait_ready()
    completions = [completion("hang") for _ in range(3)]

    async def close_in_the_middle() -> None:
        scoring = asyncio.gather(*(rewards.score(row(), c) for c in completions), return_exceptions=True)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(rewards.close)
        await scoring

    asyncio.run(close_in_the_middle())
    assert rewards.stats([])["reward/hangs/errors"] == 3  # each is told, none is left waiting
    assert _children() == before


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel to end a child with its parent")
def test_workers_end_when_the_run_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    noted = tmp_path / "pid"
    script.write_text(
        "import asyncio\nfrom grpo.rewards import Rewards, build_rewards\nfrom grpo.types import Completion, Prompt\n"
        f"rewards = Rewards(build_rewards({str(MINE) + ':writes_its_process'!r}, max_tokens=9))\n"
        f"c = Completion(0, 0, [1], [0.0], [0], 'stop', text={str(noted)!r})\n"
        "with rewards:\n    asyncio.run(rewards.score(Prompt(0, 'r', 'q', [1], {}), c))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(MINE.parent.parent)}
    run = subprocess.Popen([sys.executable, str(script)], env=environment)
    _wait_for(lambda: noted.exists() and noted.read_text() != "")
    worker = int(noted.read_text())
    run.send_signal(signal.SIGKILL)
    run.wait()
    _wait_for(lambda: not _is_alive(worker))


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except FileNotFoundError:
        return False
