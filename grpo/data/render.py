"""From a row's content to the ids that the server is sent and the trainer trains: rendered and tokenized here, once.

Law 3 begins here: no other place encodes a prompt. There is at most one BOS token, whoever would add it: the chat
template, the tokenizer or the text itself.
"""

from typing import Any

from grpo.data.rows import Content


class Renderer:
    """`template`: "chat" renders with the tokenizer's chat template and opens the assistant's turn; "plain" takes the
    text as it is (a system prompt goes in front, with a blank line); "auto" is chat where there is a template.

    chat_template_kwargs: passed to the chat template, e.g. {"enable_thinking": False} for Qwen3.
    """

    def __init__(
        self, tokenizer: Any, *, template: str, system: str | None, chat_template_kwargs: dict[str, Any]
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if template == "chat" and not has_template:
            raise ValueError(
                f"data.template=chat: the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template "
                "(a base model?); use data.template=plain"
            )
        self.chat = has_template if template == "auto" else template == "chat"
        self.tokenizer = tokenizer
        self.system = system
        self.kwargs = chat_template_kwargs
        self._bos = tokenizer.bos_token_id
        # Whether this tokenizer begins a text with BOS by itself. Its end token, if it adds one, has no place in a
        # prompt, so special tokens are left to us altogether.
        self._adds_bos = self._bos is not None and tokenizer("a")["input_ids"][:1] == [self._bos]

    def text(self, content: Content) -> str:
        """The prompt as the model reads it (for plain prompts: without BOS)."""
        if not self.chat:
            if not isinstance(content, str):
                raise ValueError(
                    "data.template: the rows are chat messages, which need a chat template; this tokenizer has none or "
                    "data.template=plain. Use a model with a template, or a data.prompt over text columns"
                )
            return content if self.system is None else f"{self.system}\n\n{content}"
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self.system is not None:
            rest = messages[1:] if messages[0]["role"] == "system" else messages
            messages = [{"role": "system", "content": self.system}, *rest]
        return self.render(messages)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Messages as the chat template writes them, with the assistant's next turn opened. Raises ValueError."""
        try:
            rendered = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.kwargs
            )
        except Exception as error:  # jinja's own errors, which templates raise on purpose ("system role not supported")
            raise ValueError(
                f"the tokenizer's chat template refuses the prompt ({error}); look at data.system, "
                "data.chat_template_kwargs and the messages' roles, or use data.template=plain"
            ) from error
        return str(rendered)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Token ids of rendered prompts."""
        return [self._one_bos(ids) for ids in self.encode(texts)]

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that stand anywhere: nothing is put around them."""
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [list(ids) for ids in encoded]

    def _one_bos(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        begins = start > 0 or (self._adds_bos and not self.chat)
        return [self._bos, *ids[start:]] if begins else ids
