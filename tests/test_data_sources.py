"""Where rows come from: our own task, the hub, reasoning-gym; and every shipped file is built."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from data_tools import byte_tokenizer, prompts
from tiny import tiny_tokenizer

from grpo.data import Arithmetic, Guessing, Hub, ReasoningGym
from grpo.data import hub as hub_module

ROOT = Path(__file__).parent.parent


# ---- arithmetic ----


def arithmetic(**options: Any) -> Arithmetic:
    keys: dict[str, Any] = {
        "reward": [{"kind": "exact_match", "after": ":"}],
        "max_prompt_tokens": 16,
        "max_tokens": 16,
        "template": "plain",
    }
    return Arithmetic(**(keys | options))


def test_arithmetic_needs_no_file_and_holds_out_what_it_evaluates() -> None:
    loaded = arithmetic().load(tiny_tokenizer(), 3)
    held_out = {p.columns["problem"] for p in loaded.evals["held_out"]}
    assert len(held_out) == 256
    train = [p for i in range(3000) if (p := loaded.train.prompt(i)) is not None]
    assert not held_out & {p.columns["problem"] for p in train}
    assert len({p.row for p in train}) == 3000
    assert all(p.text == p.columns["problem"] + "=" and len(p.token_ids) == 7 for p in train)


def test_arithmetic_prompts_that_do_not_fit_are_an_error_at_load() -> None:
    with pytest.raises(ValueError, match=r"data.max_prompt_tokens=6: the prompt of row .* has 7 tokens"):
        arithmetic(max_prompt_tokens=6).load(tiny_tokenizer(), 0)
    with pytest.raises(ValueError, match="digits=40"):
        arithmetic(digits=40).check()


def test_columns_that_made_up_rows_lack_are_named_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"data.prompt='\{nope\}': arithmetic has no column 'nope'; it has answer, "):
        arithmetic(prompt="{nope}").check()
    game = Guessing(reward="environment", environment={"kind": "guess"}, max_prompt_tokens=8, max_tokens=64, answer="a")
    with pytest.raises(ValueError, match=r"data.answer='a': the guessing game has no column 'a'; it has prompt, "):
        game.check()


def test_the_default_data_set_does_not_import_what_is_slow() -> None:
    slow = "'datasets', 'torch', 'transformers', 'reasoning_gym', 'sympy', 'aiohttp'"
    code = f"import sys, grpo.data, grpo.rewards; print([m for m in ({slow}) if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


# ---- hub ----


def hub(path: str, **options: Any) -> Hub:
    keys: dict[str, Any] = {"path": path, "reward": "exact_match", "max_prompt_tokens": 64, "max_tokens": 8}
    return Hub(**(keys | {"eval_rows": 0} | options))


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, start in (("train", 0), ("test", 100)):
        rows = [{"prompt": f"q{i}", "answer": i, "heavy": "x" * 100} for i in range(start, start + 10)]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def test_a_local_folder_of_parquet_is_read_and_split(parquet: Path) -> None:
    data = hub(str(parquet), columns=["prompt", "answer"], rows=8, eval_rows=4, evals={"unseen": {"split": "test"}})
    data.check()
    loaded = data.load(byte_tokenizer(), 0)
    assert {p.columns["answer"] for p in prompts(loaded).values()} == {str(i) for i in range(8)}
    assert set(only_columns := next(iter(prompts(loaded).values())).columns) == {"prompt", "answer", "raw_answer"}
    assert isinstance(only_columns["raw_answer"], int)
    assert {int(p.columns["answer"]) >= 100 for p in loaded.evals["unseen"]} == {True}
    assert len(loaded.evals["unseen"]) == 4


def test_what_a_hub_set_lacks_is_named(parquet: Path) -> None:
    with pytest.raises(ValueError, match=r"data.columns: .* has no column 'gold'; it has prompt, answer, heavy"):
        hub(str(parquet), columns=["gold"]).load(byte_tokenizer(), 0)
    with pytest.raises(ValueError, match=r"Unknown split \"validation\""):
        hub(str(parquet), split="validation").load(byte_tokenizer(), 0)
    with pytest.raises(ValueError, match=r"data.answer='gold': the data \(train\) has no column 'gold'"):
        hub(str(parquet), answer="gold").load(byte_tokenizer(), 0)
    with pytest.raises(ValueError, match=r"data.path=/no/such/folder: there is no such folder"):
        hub("/no/such/folder").check()
    with pytest.raises(ValueError, match=r"data.streaming=true"):
        hub(str(parquet), streaming=True)


def test_a_hub_that_cannot_be_reached_says_how_to_give_a_local_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    def unreachable(self: Any, path: str, timeout: float) -> None:
        assert timeout == hub_module.HUB_TIMEOUT
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"data.path=owner/set: .*Name or service.*data.path=/path/to/folder"):
        hub("owner/set").check()


# ---- reasoning-gym ----


def gym(**options: Any) -> ReasoningGym:
    keys: dict[str, Any] = {
        "tasks": ["chain_sum"],
        "reward": [{"kind": "exact_match", "tag": "answer"}],
        "prompt": "{question}",
        "max_prompt_tokens": 2000,
        "max_tokens": 64,
        "rows": 40,
        "eval_rows": 6,
    }
    return ReasoningGym(**(keys | options))


def test_reasoning_gym_rows_are_the_same_whatever_the_seed_and_none_is_held_out() -> None:
    tasks = ["chain_sum", {"task": "leg_counting", "weight": 3}]
    loaded = [gym(tasks=tasks).load(byte_tokenizer(), seed) for seed in (0, 1)]
    texts = [{row: p.text for row, p in prompts(each).items()} for each in loaded]
    assert texts[0] == texts[1]
    tasks_of = [p.columns["task"] for p in prompts(loaded[0]).values()]
    assert (tasks_of.count("chain_sum"), tasks_of.count("leg_counting")) == (10, 30)
    assert {name: len(found) for name, found in loaded[0].evals.items()} == {"chain_sum": 3, "leg_counting": 3}
    held_out = {p.text for found in loaded[0].evals.values() for p in found}
    assert not held_out & set(texts[0].values())
    other = gym(tasks=tasks, task_seed=99).load(byte_tokenizer(), 0)
    assert {p.text for p in prompts(other).values()} != set(texts[0].values())


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["chain_sums"], r"data.tasks=chain_sums: reasoning-gym has no such task; it has .*chain_sum"),
        (
            [{"task": "chain_sum", "terms": 3}],
            r"data.tasks\[chain_sum\].terms: no such parameter; the task has .*max_terms, min_digits, min_terms",
        ),
        ([{"task": "chain_sum", "min_terms": 9, "max_terms": 2}], r"data.tasks\[chain_sum\]: .*max_terms"),
        ([{"task": "chain_sum", "weight": 0}], r"data.tasks\[chain_sum\].weight=0"),
        ([{"name": "chain_sum"}], r"is no task; expected a name"),
        ([], r"name at least one task"),
    ],
)
def test_mistakes_in_tasks_are_named(tasks: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gym(tasks=tasks).check()


# ---- the shipped files ----


@pytest.mark.parametrize("name", sorted(f.stem for f in (ROOT / "conf/data").glob("[!_]*.yaml")))
def test_every_shipped_data_set_composes_and_is_built(name: str) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    overrides = [f"data={name}", *(["data.path=somewhere"] if name in ("hub", "jsonl") else [])]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides=overrides)
        replaced = (
            compose("config", overrides=[*overrides, "data.reward=length", "data.answer=null"])
            if name != "mixture"
            else None
        )
    data = instantiate(config.data, _convert_="all")
    assert data.rewards().weights
    assert data.max_tokens == config.data.max_tokens
    if replaced is not None:
        assert instantiate(replaced.data, _convert_="all").rewards().weights == {"length": 1.0}
