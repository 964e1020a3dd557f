"""Tool calls in Hermes' and Qwen's format: what is a call, what the policy reads back, and whole chats of turns."""

import asyncio
import json
from typing import Any

import pytest
from composed import ROOT
from data_tools import byte_tokenizer, jsonl, write_jsonl
from test_environments import END, QWEN, qwen_tokenizer, run

from grpo.environments.build import build_environment
from grpo.environments.hosted import Hosted
from grpo.environments.tools import Call, Tools, parse_calls
from grpo.rollout.client import Sampled
from grpo.rollout.episode import extend, play
from grpo.types import Completion, Sampling

FILE = ROOT / "tests" / "my_tools.py"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("answer", "calls"),
    [
        ("The answer is 4.", []),
        (call("add", a=1, b=2), [Call("add", {"a": 1, "b": 2})]),
        (f"First {call('add', a=1)} then {call('shout')}", [Call("add", {"a": 1}), Call("shout")]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("add", {"a": 1})]),
        ('<tool_call>{"name": "add"}</tool_call>', [Call("add")]),
        (f"<think>maybe {call('add')}</think>no", []),
        (f"<think>maybe {call('add')}", []),
        (f"maybe {call('add')}</think>{call('table')}", [Call("table")]),
        (f"<think>hm</think>{call('table')}", [Call("table")]),
        ('<tool_call>{"name": "add", "arguments": {}}', [Call("add")]),
    ],
)
def test_what_is_a_call(answer: str, calls: list[Call]) -> None:
    assert parse_calls(answer) == calls


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("<tool_call>add(1, 2)</tool_call>", "the call is not JSON: Expecting value"),
        ("<tool_call>[1]</tool_call>", 'a call is {"name": <tool>, "arguments": {...}}'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments are not a JSON object"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "the arguments are not JSON"),
        ("<tool_call></tool_call>", "the call is not JSON"),
    ],
)
def test_what_is_no_call_says_why(answer: str, error: str) -> None:
    (found,) = parse_calls(answer)
    assert found.error is not None
    assert found.error.startswith(error)


def tools(*names: str, **options: Any) -> Tools:
    kind = build_environment({"kind": "tools", "tools": [f"{FILE}:{name}" for name in names], **options})
    assert isinstance(kind, Tools)
    kind.check()
    return kind


def test_whatever_goes_wrong_the_policy_reads_it() -> None:
    kind = tools("add", "shout", "sleep", "leave", "table", timeout=1.0, max_result=27)
    cases = [
        (Call("add", {"a": 2, "b": 3}), "5"),
        (Call("shout", {"text": "hé"}), "HÉ"),
        (Call("divide"), "error: there is no tool 'divide'; there are add, shout, sleep, leave, table"),
        (Call("add", {"a": 2}), "error: TypeError: add() mis... ("),
        (Call("sleep", {"seconds": 30}), "error: no result within 1 s"),
        (Call("leave"), "error: its process ended (e"),
        (Call("table"), '{"digits": [0, 1, 2, 3, 4, ... (15 more characters)'),
        (Call(error="the call is not JSON"), "error: the call is not JSON"),
    ]

    async def all_calls() -> list[dict[str, Any]]:
        await kind.start()
        try:
            return list(await asyncio.gather(*(kind.run(c) for c, _ in cases)))
        finally:
            await kind.close()

    messages = run(all_calls())
    for (_, expected), message in zip(cases, messages, strict=True):
        assert message["role"] == "tool"
        assert message["content"].startswith(expected), message


def test_a_chat_with_tools_is_one_growing_sequence_of_ids(tmp_path: Any) -> None:
    """Scripted answers through the whole path: data, prompt with tools, worker, borders; against one rendering."""
    tokenizer = qwen_tokenizer()
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+3, loudly?", "answer": "FIVE"}])
    data = jsonl(
        file,
        max_prompt_tokens=4000,
        max_tokens=2000,
        environment={"kind": "tools", "tools": [f"{FILE}:add", f"{FILE}:shout"], "max_turns": 4},
    )
    data.check()
    prompt = data.load(tokenizer, 0).train.prompt(0)
    assert prompt is not None
    assert '"name": "add"' in prompt.text
    assert "Adds two numbers." in prompt.text
    end = tokenizer.convert_tokens_to_ids(END)
    script = [call("add", a=2, b=3) + call("shout", text="five"), "bad " + call("nobody"), "FIVE"]
    asked: list[list[int]] = []

    async def ask(ids: list[int], sampling: Sampling, turn: int) -> Sampled:
        asked.append(ids)
        sampled = [*tokenizer(script[turn])["input_ids"], end]
        return Sampled(sampled, [-1.0] * len(sampled), [turn] * len(sampled), "stop")

    environments = data.environments(tokenizer, [end])
    assert environments is not None

    async def whole() -> Completion:
        begun, (session,) = await environments.begin(prompt, 1)
        completion = Completion(0, 0, [], [], [], "")
        await play(
            completion,
            begun,
            Sampling(1.0, data.max_tokens, None),
            session,
            ask=ask,
            decode=lambda ids: tokenizer.decode(ids[:-1]),
            arrived=lambda answer: extend(completion, answer),
        )
        return completion

    with environments:
        completion = run(whole())
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2+3, loudly?"},
        {"role": "assistant", "content": script[0]},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "FIVE"},
        {"role": "assistant", "content": script[1]},
        {"role": "tool", "content": "error: there is no tool 'nobody'; there are add, shout"},
    ]
    schemas = data.kind.template_arguments()["tools"] if data.kind else []
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, tools=schemas)
    expected = tokenizer(rendered + script[2] + END, add_special_tokens=False)["input_ids"]
    assert prompt.token_ids + completion.token_ids == expected
    assert asked == [expected[: len(ids)] for ids in asked]
    assert completion.text == "FIVE"
    assert (completion.finish_reason, completion.version_first, completion.earned) == ("stop", 0, 0.0)
    assert completion.tokens == sum(len(tokenizer(s)["input_ids"]) + 1 for s in script)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"tools": []}, r"tools=\[\]: name at least one function"),
        ({"tools": "add"}, r"tools='add': expected a list"),
        ({"tools": [f"{FILE}:add", f"{FILE}:add"]}, "2 tools are called 'add'"),
        ({"tools": [f"{FILE}:divide"]}, "defines no 'divide'; it defines add, shout"),
        ({"tools": ["nowhere:add"]}, "there is no module 'nowhere'"),
    ],
)
def test_mistakes_are_one_line(spec: dict[str, Any], message: str) -> None:
    def look() -> None:
        kind = build_environment({"kind": "tools", **spec})
        assert kind is not None
        kind.check()

    with pytest.raises(ValueError, match=message):
        look()


def test_a_tool_needs_hints_and_a_docstring() -> None:
    with pytest.raises(ValueError, match=r"my_tools\.py:undocumented: .* a tool needs type hints and a docstring"):
        tools("undocumented").template_arguments()


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (None, "needs a model with a chat template"),
        (QWEN.replace("if tools", "if nothing"), "does not show tools"),
        (QWEN.replace("m.role == 'tool'", "m.role == 'nobody'"), "does not show messages of the role tool"),
    ],
)
def test_a_model_without_a_template_for_tools_is_refused(tmp_path: Any, chat: str | None, message: str) -> None:
    data = jsonl(tmp_path / "rows.jsonl", environment={"kind": "tools", "tools": [f"{FILE}:add"]})
    with pytest.raises(ValueError, match=message):
        data.environments(byte_tokenizer(chat=chat), [1])


def test_hosted_tools_start_and_end_their_workers() -> None:
    kind = tools("add")
    with Hosted(kind, None, max_prompt_tokens=8):  # type: ignore[arg-type]
        assert kind._pool is not None
    assert kind._pool is None
