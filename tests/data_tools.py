"""Tokenizers and files for the tests of data: real tokenizers of 260 ids, every byte one token."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from grpo.data import Jsonl
from grpo.data.base import LoadedData
from grpo.types import Prompt

BOS, EOS, UNKNOWN = "<bos>", "<eos>", "<unk>"
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def byte_tokenizer(
    *, adds_bos: bool = False, adds_eos: bool = False, chat: str | None = None
) -> PreTrainedTokenizerFast:
    """`adds_bos`, `adds_eos`: what the tokenizer puts around every text by itself, as Llama's and T5's do."""
    tokens = [BOS, EOS, UNKNOWN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos or adds_eos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS + ' ' if adds_bos else ''}$A{' ' + EOS if adds_eos else ''}",
            special_tokens=[(BOS, 0), (EOS, 1)],
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN)
    made.chat_template = chat
    return made


def write_jsonl(file: Path, rows: list[Any]) -> Path:
    """One JSON value a line; a str is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def jsonl(path: Path, **options: Any) -> Jsonl:
    keys: dict[str, Any] = {
        "path": str(path),
        "reward": "exact_match",
        "max_prompt_tokens": 64,
        "max_tokens": 8,
        "eval_rows": 0,
    }
    return Jsonl(**(keys | options))


def load(tmp_path: Path, rows: list[Any], tokenizer: Any = None, **options: Any) -> LoadedData:
    return jsonl(write_jsonl(tmp_path / "rows.jsonl", rows), **options).load(tokenizer or byte_tokenizer(), 0)


def prompts(loaded: LoadedData) -> dict[str, Prompt]:
    """The prompts of the first epoch by row."""
    count = loaded.report["train"]["used"]
    return {p.row: p for i in range(count) if (p := loaded.train.prompt(i)) is not None}


def only(loaded: LoadedData) -> Prompt:
    (prompt,) = prompts(loaded).values()
    return prompt
