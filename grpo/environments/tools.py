"""Tools for chat models, in the format of Hermes and Qwen.

    <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>      in an answer of the policy
    {"role": "tool", "name": "add", "content": "5"}                           what comes back, by the chat template

Tools are Python functions. The chat template is given their signatures and docstrings; an answer may call several at
once, and one without a call is the last. They run in worker processes (grpo/rewards/pool.py), so they may block, crash
or run for ever. Whatever goes wrong in a call, the policy reads it ("error: ...") and may do better: no tool, no JSON,
wrong arguments, an exception, a deadline. Calls inside a thought (`<think>`) are none.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from grpo.environments.base import KEY, Environment, EnvironmentFailed, Kind, Step
from grpo.environments.source import check_defined
from grpo.rewards.base import RewardError, RewardTimeoutError
from grpo.rewards.options import above, at_least
from grpo.rewards.pool import Pool
from grpo.rewards.python import import_function

if TYPE_CHECKING:
    from grpo.environments.borders import Borders

CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(kw_only=True)
class Tools(Kind):
    """tools: `file.py:function` or `module:function` each. timeout: seconds for one call. workers: processes at most
    (null: half of the cores). memory_gb: address space of each; null is no limit. max_result: characters of a result
    that the policy sees."""

    OWN_DEADLINE: ClassVar[bool] = True

    tools: list[str]
    timeout: float = 10.0
    workers: int | None = None
    memory_gb: float | None = 4.0
    max_result: int = 2000
    _pool: Pool | None = field(default=None, init=False)

    def check_options(self) -> None:
        at_least(1, KEY, workers=self.workers, max_result=self.max_result)
        above(0, KEY, memory_gb=self.memory_gb)
        if not self.tools:
            raise ValueError(f"{KEY}.tools=[]: name at least one function")
        names = [*map(_name, self.tools)]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{KEY}.tools: {names.count(name)} tools are called {name!r}")

    def check(self) -> None:
        for path in self.tools:
            check_defined(path, f"{KEY}.tools")

    def template_arguments(self) -> Mapping[str, Any]:
        """`tools`: a JSON schema for each, made from its type hints and docstring."""
        from transformers.utils.chat_template_utils import get_json_schema

        schemas = []
        for path in self.tools:
            try:
                schemas.append(get_json_schema(import_function(path)))
            except Exception as error:  # transformers' own kinds, and whatever the user's module raises
                reason = " ".join(str(error).split()) or type(error).__name__
                raise ValueError(
                    f"{KEY}.tools: {path}: {reason}; a tool needs type hints and a docstring with an Args: section"
                ) from error
        return {"tools": schemas}

    def check_template(self, borders: "Borders") -> None:
        """Raises ValueError when the chat template does not show tools, or what comes back from them."""
        if not borders.renderer.chat:
            raise ValueError(f"{KEY}=tools: needs a model with a chat template, and data.template=auto or chat")
        shown = borders.renderer.text("x")
        for path in self.tools:
            if _name(path) not in shown:
                raise ValueError(
                    f"{KEY}=tools: the model's chat template does not show tools (no {_name(path)!r} in it)"
                )
        if "4711" not in borders.text([{"role": "tool", "name": "x", "content": "4711"}]):
            raise ValueError(f"{KEY}=tools: the model's chat template does not show messages of the role tool")

    async def start(self) -> None:
        self._pool = Pool(
            name="tools",
            target="grpo.environments.tools:prepare",
            options={"tools": {_name(path): path for path in self.tools}},
            workers=self.workers or max(1, len(os.sched_getaffinity(0)) // 2),
            timeout=self.timeout,
            memory_gb=self.memory_gb,
        )
        try:
            await self._pool.ready()
        except RewardError as error:
            raise EnvironmentFailed(f"{KEY}.tools cannot be loaded: {error}") from None

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    def make(self) -> Environment:
        return Loop(self)

    async def run(self, call: "Call") -> dict[str, Any]:
        """One call's message. Never raises for what the policy or a tool did wrong."""
        assert self._pool is not None, "the tools have not been started"
        if call.error is not None:
            return _message(call, f"error: {call.error}")
        if call.name not in (names := [*map(_name, self.tools)]):
            return _message(call, f"error: there is no tool {call.name!r}; there are {', '.join(names)}")
        try:
            text = await self._pool.call(call.name, call.arguments)
        except RewardTimeoutError:
            text = f"error: no result within {self.timeout:g} s"
        except RewardError as error:
            text = f"error: {str(error).splitlines()[0]}"
        if len(text) > self.max_result:
            text = f"{text[: self.max_result]}... ({len(text) - self.max_result} more characters)"
        return _message(call, text)


@dataclass(slots=True, frozen=True)
class Call:
    """A call as the policy wrote it; `error` says why it is none."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Loop:
    """One completion."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools

    async def reset(self, row: dict[str, Any]) -> None:
        """The prompt is the row's own, with the tools in the chat template."""

    async def step(self, completion: str) -> Step:
        calls = parse_calls(completion)
        if not calls:
            return None, 0.0, True
        return await asyncio.gather(*(self.tools.run(call) for call in calls)), 0.0, False


def parse_calls(answer: str) -> list[Call]:
    """The calls of an answer, in order. Where the template has opened the thought, the answer has its end only."""
    thought, ended, rest = answer.partition("</think>")
    said = rest if ended and "<think>" not in thought else answer
    return [_parse(text) for text in CALL.findall(THOUGHT.sub("", said))]


def _parse(text: str) -> Call:
    try:
        call = json.loads(text)
    except ValueError as error:
        return Call(error=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(error='a call is {"name": <tool>, "arguments": {...}}')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):  # JSON in JSON, as some models write it
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return Call(call["name"], error=f"the arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(call["name"], error="the arguments are not a JSON object")
    return Call(call["name"], arguments)


def _message(call: Call, text: str) -> dict[str, Any]:
    return {"role": "tool", "name": call.name, "content": text}


def _name(path: str) -> str:
    return path.rpartition(":")[2]


# ---- in the worker ----


def prepare(tools: dict[str, str]) -> Any:
    """What a worker calls: (name, arguments) -> the result as text."""
    functions = {name: import_function(path) for name, path in tools.items()}

    def call(name: str, arguments: dict[str, Any]) -> str:
        try:
            value = functions[name](**arguments)
            if asyncio.iscoroutine(value):
                value = asyncio.run(value)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    return call
