"""Environments: turn borders as the chat template has them, deadlines, failures, and the game that ships."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from composed import ROOT, composed
from data_tools import byte_tokenizer, jsonl
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo import preflight
from grpo.data.render import Renderer
from grpo.environments.base import EnvironmentFailed
from grpo.environments.borders import Borders
from grpo.environments.build import build_environment
from grpo.environments.guess import Game
from grpo.environments.hosted import Hosted, parse_step
from grpo.rollout.episode import EpisodeLost
from grpo.types import Prompt

T = TypeVar("T")

# As Qwen3's template: thoughts of earlier turns are dropped, tool messages are user turns that share one.
QWEN = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
    "{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
END = "<|im_end|>"


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(chat=QWEN)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END, "<|endoftext|>"]})
    return tokenizer


def borders(tokenizer: Any, stops: list[str], **kwargs: Any) -> Borders:
    renderer = Renderer(tokenizer, template="auto", system=None, chat_template_kwargs=kwargs)
    return Borders(renderer, [tokenizer.convert_tokens_to_ids(s) for s in stops])


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(limited())


# ---- borders ----


@pytest.mark.parametrize("thinking", [None, False])
def test_ids_of_several_turns_are_those_of_the_whole_rendered_chat(thinking: bool | None) -> None:
    tokenizer = qwen_tokenizer()
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    border = borders(tokenizer, [END], **kwargs)
    turns: list[tuple[str, Any]] = [
        ("<tool_call>{}</tool_call>", [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]),
        ("Is it so?", "Yes, it is."),
    ]
    messages: list[dict[str, str]] = [{"role": "user", "content": "2+2?"}]
    ids = border.renderer.ids([border.renderer.text(messages)])[0]
    for answer, observation in turns:
        sampled = border.renderer.encode([answer + END])[0]
        ids = ids + sampled + border.observation(observation, sampled[-1]).token_ids
        more = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        messages = [*messages, {"role": "assistant", "content": answer}, *more]
    whole = border.renderer.text(messages)
    if thinking is False:  # earlier turns were opened with an empty thought, which the template drops afterwards
        assert tokenizer.decode(ids).replace("<think>\n\n</think>\n\n", "") == whole.replace(
            "<think>\n\n</think>\n\n", ""
        )
        assert tokenizer.decode(ids).count("<think>") == 3
    else:
        assert ids == border.renderer.ids([whole])[0]


def test_the_end_token_stands_once_whatever_ended_the_answer() -> None:
    tokenizer = qwen_tokenizer()
    border = borders(tokenizer, [END, "<|endoftext|>"])
    end, other = (tokenizer.convert_tokens_to_ids(t) for t in (END, "<|endoftext|>"))
    rest = border.renderer.encode(["\n<|im_start|>user\nhm<|im_end|>\n<|im_start|>assistant\n"])[0]
    assert border.observation("hm", end).token_ids == rest
    assert border.observation("hm", other).token_ids == rest, "another end token stands for the template's"
    assert border.observation("hm", rest[0]).token_ids == [end, *rest], "after a stop string the turn is ended"


def test_thoughts_that_the_template_would_drop_stay_as_sampled() -> None:
    tokenizer = qwen_tokenizer()
    border = borders(tokenizer, [END])
    sampled = border.renderer.encode(["<think>hm</think>\n\n4" + END])[0]
    text = tokenizer.decode([*sampled, *border.observation("and?", sampled[-1]).token_ids])
    assert text == "<think>hm</think>\n\n4<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_plain_text_goes_behind_the_answer_as_it_is() -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    border = borders(tokenizer, ["<eos>"])
    seen = border.observation("+=", tokenizer.eos_token_id)
    assert (tokenizer.convert_ids_to_tokens(seen.token_ids), seen.text) == (["+", "="], "+=")
    with pytest.raises(EnvironmentFailed, match="plain text"):
        border.observation([{"role": "tool", "content": "4"}], 1)
    with pytest.raises(EnvironmentFailed, match="empty"):
        border.observation("", 1)


def test_a_template_that_hides_the_answer_is_refused_before_training() -> None:
    tokenizer = byte_tokenizer(
        chat="{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ValueError, match="does not show an assistant's message"):
        borders(tokenizer, []).check()


# ---- running the user's ----


def hosted(name: str, *, tokenizer: Any = None, **options: Any) -> Hosted:
    kind = build_environment({"kind": f"{ROOT / 'tests' / 'my_environments.py'}:{name}", **options})
    assert kind is not None
    kind.check()
    return Hosted(kind, borders(tokenizer or byte_tokenizer(), []), max_prompt_tokens=32)


PROMPT = Prompt(0, "train/0", "p", [5, 6], {"answer": "7"})


def test_a_plain_class_with_arguments_of_its_own() -> None:
    async def play(environments: Hosted) -> None:
        prompt, (first, second) = await environments.begin(PROMPT, 2)
        assert prompt is PROMPT
        assert first is not None
        assert second is not None
        assert (first.max_turns, first.max_turn_tokens) == (5, 9)
        for n in (1, 2):
            seen = await first.step("x", 0)
            assert seen is not None
            assert seen.text == f"{n} 7"
        assert await first.step("x", 0) is None
        assert (first.earned, second.earned) == (0.75, 0.0)

    with hosted("Counting", limit=3, max_turns=5, max_turn_tokens=9) as environments:
        run(play(environments))


def test_coroutines_a_prompt_of_their_own_and_no_score() -> None:
    async def play(environments: Hosted) -> None:
        prompt, (session,) = await environments.begin(PROMPT, 1)
        assert prompt.text == "<|im_start|>user\nask 7<|im_end|>\n<|im_start|>assistant\n"
        assert (prompt.row, prompt.columns) == (PROMPT.row, PROMPT.columns)
        assert session is not None
        seen = await session.step("hello", 0)
        assert seen is not None
        assert "<tool_response>\nHELLO\n</tool_response>" in seen.text
        assert session.earned is None
        assert await session.step("done", 0) is None

    kind = build_environment(f"{ROOT / 'tests' / 'my_environments.py'}:Coroutine")
    assert kind is not None
    with Hosted(kind, borders(qwen_tokenizer(), [END]), max_prompt_tokens=64) as environments:
        run(play(environments))
    with Hosted(kind, borders(qwen_tokenizer(), [END]), max_prompt_tokens=4) as environments:
        with pytest.raises(EpisodeLost) as lost:
            run(environments.begin(PROMPT, 1))
        assert lost.value.reason == "too_long"


def test_blocking_calls_run_beside_each_other_and_stall_nothing() -> None:
    async def play(environments: Hosted) -> list[float]:
        _, sessions = await environments.begin(PROMPT, 8)
        gaps, stop = [0.0], asyncio.Event()

        async def beat() -> None:
            while not stop.is_set():
                before = time.perf_counter()
                await asyncio.sleep(0.01)
                gaps.append(time.perf_counter() - before)

        beating = asyncio.create_task(beat())
        await asyncio.gather(*(s.step("x", 0) for s in sessions if s is not None))
        stop.set()
        await beating
        return gaps

    with hosted("Blocking") as environments:
        gaps = run(play(environments))
    assert len(gaps) >= 5, "the loop went on while eight calls blocked it for 0.3 s each"


def one_step(environments: Hosted, *, beside: bool = False) -> Any:
    async def play() -> Any:
        _, (session, *_) = await environments.begin(PROMPT, 2 if beside else 1)
        assert session is not None
        return await session.step("x", 0)

    return run(play())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Endless", {"timeout": 0.2}, r"failed on row train/0: no answer within 0\.2 s"),
        ("Raising", {}, "my own mistake"),
        ("Exiting", {}, "SystemExit: 3"),
        ("Impatient", {}, "its own time-out"),
        ("Returning", {"value": "text"}, r"step returned 'text'; expected \(observation, reward, done\)"),
        ("Returning", {"value": ["x", "1", False]}, "step's reward: returned a text"),
        ("Returning", {"value": ["x", float("nan"), False]}, "expected a finite number"),
        ("Returning", {"value": [None, 1.0, False]}, "step returned None; expected a text or a list"),
        ("Returning", {"value": ["x", 1.0, 1]}, "done=1; expected true or false"),
        ("Random", {}, "different messages for one row"),
    ],
)
def test_what_goes_wrong_ends_the_run_and_says_whose_fault_it_is(
    name: str, options: dict[str, Any], message: str
) -> None:
    with hosted(name, **options) as environments, pytest.raises(EnvironmentFailed, match=message):
        one_step(environments, beside=name == "Random")


def test_a_failure_can_be_left_out_instead() -> None:
    with hosted("Raising", on_error="discard") as environments:
        with pytest.raises(EpisodeLost) as lost:
            one_step(environments)
        assert lost.value.reason == "environment"
        assert environments.failures == 1


def test_the_own_traceback_begins_in_the_users_file() -> None:
    with hosted("Raising") as environments, pytest.raises(EnvironmentFailed) as caught:
        one_step(environments)
    text = str(caught.value)
    assert text.splitlines()[0] == "data.environment failed on row train/0: KeyError: 'my own mistake'"
    assert "my_environments.py" in text
    assert "hosted.py" not in text


def test_an_endless_call_leaves_no_wait_behind() -> None:
    with hosted("Endless", timeout=0.1) as environments, pytest.raises(EnvironmentFailed):
        one_step(environments)
    assert all(t.daemon for t in threading.enumerate() if t.name == "environment")


# ---- settings ----


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("chess", r"data\.environment=chess: choose one of guess, tools, or file\.py:Class"),
        (3, r"data\.environment=3: expected a name"),
        ({"kind": "guess", "turns": 3}, r"data\.environment\.turns: no such option; guess has"),
        ({"kind": "guess", "max_turns": 0}, r"data\.environment\.max_turns=0: must be at least 1"),
        ({"kind": "guess", "timeout": "x"}, r"data\.environment\.timeout='x': expected a number"),
        ({"kind": "guess", "on_error": "zero"}, r"data\.environment\.on_error='zero': choose one of raise, discard"),
        ({"kind": "guess", "hint": "warm"}, r"data\.environment\.hint='warm': choose one of distance, side"),
        ({"kind": "nowhere.py:Game"}, r"data\.environment: there is no file nowhere\.py"),
        (
            {"kind": f"{ROOT / 'tests' / 'my_environments.py'}:Nobody"},
            "defines no 'Nobody'; it defines Counting, Coroutine",
        ),
        (
            {"kind": f"{ROOT / 'tests' / 'my_environments.py'}:Counting", "limits": 3},
            r"data\.environment\.limits: no such argument; Counting has limit",
        ),
        ({"kind": "tools"}, r"data\.environment\.tools: has no default; give it"),
    ],
)
def test_mistakes_are_one_line(spec: Any, message: str) -> None:
    def look() -> None:
        kind = build_environment(spec)
        assert kind is not None
        kind.check()

    with pytest.raises(ValueError, match=message) as caught:
        look()
    assert "\n" not in str(caught.value)


def test_arguments_of_a_constructor_are_looked_at_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "games.py"
    file.write_text(
        "raise RuntimeError\n"
        "class Board:\n    def __init__(self, size, *, seed, depth=1): ...\n"
        "class Open:\n    def __init__(self, **options): ...\n"
        "class Heir(Board): ...\n"
    )

    def look(name: str, **arguments: Any) -> None:
        kind = build_environment({"kind": f"{file}:{name}", **arguments})
        assert kind is not None
        kind.check()

    look("Board", size=3, seed=1)
    look("Open", anything=1)
    look("Heir", seen="when it is made")
    for given, missing in ({"size": 3}, "seed"), ({"seed": 3}, "size"):
        with pytest.raises(ValueError, match=rf"data\.environment\.{missing}: Board has no default for it; give it"):
            look("Board", **given)


def test_a_reward_from_an_environment_needs_one(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"data\.reward=environment: there is none; set data\.environment"):
        jsonl(tmp_path / "x.jsonl", reward="environment")
    plan = preflight.check(composed("data=guess"), ROOT)
    assert plan.data.kind.max_turns == 3


# ---- the game ----


def test_the_game_by_hand() -> None:
    game = Game()
    game.reset({"secret": 6})
    assert game.step(":4") == ("2=", 0.0, False)
    assert game.step("88:8") == ("8=", 0.0, False)
    assert game.step(":") == ("?=", 0.0, False)
    assert game.step(":6") == (None, 1.0, True)
    game = Game("side")
    game.reset({"secret": 6})
    assert game.step(":4") == ("+=", 0.0, False)
    assert game.step("88:8") == ("-=", 0.0, False)
    assert game.step(":") == ("?=", 0.0, False)
    assert game.step("²") == ("?=", 0.0, False)
    assert game.step(":6") == (None, 1.0, True)


def test_a_step_may_end_without_an_observation() -> None:
    assert parse_step((None, None, True)) == ("", None, True)
