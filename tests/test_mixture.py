"""A mixture: every part keeps its template and rewards, and what one part holds out no part trains on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from data_tools import CHAT, byte_tokenizer, write_jsonl

from grpo.data import Jsonl, Mixture
from grpo.rollout.loader import Scorer
from grpo.types import Completion, Group, Prompt


def part(file: Path, rows: list[tuple[str, str]], **options: Any) -> Jsonl:
    write_jsonl(file, [{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    keys: dict[str, Any] = {"reward": "exact_match", "max_prompt_tokens": 64, "max_tokens": 8, "eval_rows": 0}
    return Jsonl(path=str(file), **(keys | options))


def mixed(parts: dict[str, Jsonl], **options: Any) -> Mixture:
    return Mixture(parts=parts, **({"max_prompt_tokens": 64, "max_tokens": 8} | options))


def test_a_prompt_that_one_part_holds_out_is_trained_on_in_none(tmp_path: Path) -> None:
    shared = [(f"question {i}", "1") for i in range(20)]
    parts = {
        "first": part(tmp_path / "a.jsonl", shared, eval_rows=4),
        "second": part(tmp_path / "b.jsonl", [*shared, ("only here", "1")], template="chat", system="s"),
    }
    loaded = mixed(parts).load(byte_tokenizer(chat=CHAT), 0)
    held_out = {p.columns["prompt"] for p in loaded.evals["first_held_out"]}
    prompts = [p for i in range(300) if (p := loaded.train.prompt(i)) is not None]
    assert len(held_out) == 4
    assert not held_out & {p.columns["prompt"] for p in prompts}
    assert loaded.report["second"]["in_held_out_of_another_part"] == 4
    assert {len({p.row for p in prompts if p.row.startswith(name)}) for name in ("first", "second")} == {16, 17}
    assert {p.row.partition("/")[0] for p in prompts if "<system>" in p.text} == {"second"}


def test_each_part_is_scored_by_its_own_rewards(tmp_path: Path) -> None:
    parts = {
        "words": part(tmp_path / "a.jsonl", [("p", "four")]),
        "numbers": part(tmp_path / "b.jsonl", [("q", "4")], reward=[{"kind": "number_match", "weight": 0.5}]),
    }
    completions = [Completion(0, 0, [1], [0.0], [0], "stop", text=text) for text in ("four", "4.0", "4.0")]
    rows = [Prompt(0, "words/train/0", "p", [1], {"answer": "four"})] * 2
    rows.append(Prompt(0, "numbers/train/0", "q", [1], {"answer": "4"}))

    async def everything(rewards: Scorer) -> None:
        tasks = [asyncio.create_task(rewards.score(row, c)) for row, c in zip(rows, completions, strict=True)]
        await asyncio.sleep(0)
        assert rewards.open == 3, "of all parts; the watchdog asks for it"
        await asyncio.gather(*tasks)
        assert rewards.open == 0

    with mixed(parts).rewards() as rewards:
        assert rewards.weights == {"exact_match": 1.0, "number_match": 0.5}
        asyncio.run(everything(rewards))
        groups = [Group(at, row, [c]) for at, (row, c) in enumerate(zip(rows, completions, strict=True))]
        stats = rewards.stats(groups)
    assert [c.reward for c in completions] == [1.0, 0.0, 0.5]
    assert completions[2].rewards == {"number_match": 1.0}
    assert stats["reward/words/exact_match/mean"] == 0.5
    assert stats["reward/numbers/number_match/mean"] == 1.0


def test_a_part_with_turns_mixes_with_one_without(tmp_path: Path) -> None:
    """Each prompt is played as its own part has it, and each completion scored so."""
    counting = f"{Path(__file__).with_name('my_environments.py')}:Counting"
    parts = {
        "game": part(
            tmp_path / "a.jsonl", [("p", "four")], environment=counting, reward="environment", template="chat"
        ),
        "plain": part(tmp_path / "b.jsonl", [("q", "4")]),
    }
    tokenizer = byte_tokenizer(chat=CHAT)
    mixture = mixed(parts)
    prompts = {p.row.partition("/")[0]: p for i in range(20) if (p := mixture.load(tokenizer, 0).train.prompt(i))}
    environments = mixture.environments(tokenizer, [tokenizer.eos_token_id])
    assert environments is not None

    async def play(name: str) -> list[Any]:
        prompt, sessions = await environments.begin(prompts[name], 2)
        assert prompt.token_ids == prompts[name].token_ids
        for session in sessions:
            if session is not None:
                await session.close()
        return sessions

    with environments:
        assert [session is None for session in asyncio.run(play("plain"))] == [True, True]
        assert [session is None for session in asyncio.run(play("game"))] == [False, False]
    played = Completion(0, 0, [1], [0.0], [0], "stop", text="x")
    played.earned = 0.5
    right = Completion(1, 0, [1], [0.0], [0], "stop", text="4")
    with mixture.rewards() as rewards:
        asyncio.run(rewards.score(prompts["game"], played))
        asyncio.run(rewards.score(prompts["plain"], right))
    assert (played.reward, right.reward) == (0.5, 1.0)


def test_mistakes_are_named(tmp_path: Path) -> None:
    one = part(tmp_path / "a.jsonl", [("p", "4")])
    with pytest.raises(ValueError, match=r"data.parts=\{\}: name at least one"):
        mixed({})
    with pytest.raises(ValueError, match=r"data.weights.two: no such part; there are one"):
        mixed({"one": one}, weights={"two": 1.0})
    with pytest.raises(ValueError, match=r"data.weights.one=0.0: must be above 0"):
        mixed({"one": one}, weights={"one": 0.0})
    with pytest.raises(ValueError, match=r"data.max_tokens=4: less than data.parts.one.max_tokens=8"):
        mixed({"one": one}, max_tokens=4)
    with pytest.raises(ValueError, match=r"data.parts.one.epochs=2: a mixture is endless"):
        mixed({"one": part(tmp_path / "b.jsonl", [("p", "4")], epochs=2)})
    with pytest.raises(
        ValueError, match=r"data.parts.two: its reward 'exact_match' has weight 0.5, another part's has 1"
    ):
        mixed(
            {
                "one": one,
                "two": part(tmp_path / "c.jsonl", [("p", "4")], reward=[{"kind": "exact_match", "weight": 0.5}]),
            }
        ).check()
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ValueError, match=r"data.parts.one: data.path=.*: there is no such file"):
        mixed({"one": one}).check()
