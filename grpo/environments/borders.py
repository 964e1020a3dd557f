"""What stands between two answers of the policy, as token ids (law 3: the answers themselves are never encoded).

Chat: what the tokenizer's chat template puts behind an assistant's message and before the next one: the end of the
turn, the observation's messages, the opening of the next turn. It is found by rendering a chat whose assistant says a
mark, and taking what follows the mark; so the ids are those that a rendering of the whole chat has there. A template
that rewrites earlier answers (Qwen3's drops their thoughts) renders another text than was sampled: then the ids rule.

Plain: the observation's text as it is.

The sampled end token is part of the answer. Where the template ends a turn with it (or with another end token, which
the sampled one stands for), it is not there twice; after an answer that a stop string has ended, it is added.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from grpo.environments.base import KEY, EnvironmentFailed, Messages
from grpo.rollout.episode import Observation

if TYPE_CHECKING:
    from grpo.data.render import Renderer

MARK = "the-answer-stands-here"


class Borders:
    """stop_ids: the tokens that end an answer."""

    def __init__(self, renderer: "Renderer", stop_ids: Collection[int]) -> None:
        self.renderer = renderer
        self.stop_ids = frozenset(stop_ids)

    def check(self) -> None:
        """Raises ValueError for a chat template that cannot render a second turn."""
        if self.renderer.chat:
            self.text([{"role": "user", "content": "x"}])

    def text(self, observation: Messages) -> str:
        """From behind the answer to the opening of the next. Raises ValueError, EnvironmentFailed."""
        if not self.renderer.chat:
            if not isinstance(observation, str):
                raise EnvironmentFailed(
                    f"{KEY}: the observation is a list of messages, and the prompts are plain text: return text, or "
                    "use a model with a chat template"
                )
            return observation
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        _, mark, rest = self.renderer.render([*before, *messages]).partition(MARK)
        if not mark:
            raise ValueError(f"{KEY}: the tokenizer's chat template does not show an assistant's message as it is")
        return rest

    def observation(self, observation: Messages, last_id: int) -> Observation:
        """`last_id`: the last token of the answer before it."""
        text = self.text(observation)
        (ids,) = self.renderer.encode([text])
        if self.renderer.chat and last_id in self.stop_ids and ids and ids[0] in self.stop_ids:
            ids = ids[1:]
        if not ids:
            raise EnvironmentFailed(f"{KEY}: the observation is empty, so the policy would answer nothing")
        return Observation(ids, text)

    def prompt(self, messages: Messages) -> tuple[str, list[int]]:
        """What `reset` returned, as text and ids."""
        text = self.renderer.text(messages)
        (ids,) = self.renderer.ids([text])
        return text, ids
