"""The counts that people are shown: of a dry run, before any model is loaded, and of a run's log."""

from pathlib import Path

import command
import pytest
from data_tools import jsonl, write_jsonl

from grpo.data import Arithmetic, Hub, Mixture
from grpo.data.counts import dry_lines

TINY = str(Path(__file__).parent.parent / "models" / "tiny")
ROWS = [
    *({"prompt": f"{i}+{i}=", "answer": 2 * i} for i in range(10)),
    {"prompt": "1+1=", "answer": 2},  # a duplicate
    {"prompt": "7+8=", "answer": None},
    {"prompt": "8+8="},
    {"prompt": "", "answer": 3},
    {"prompt": "9" * 65, "answer": 3},
    {"prompt": "5+4=", "answer": "nine"},
]


def test_every_row_that_was_read_is_counted_under_what_became_of_it(tmp_path: Path) -> None:
    data = jsonl(write_jsonl(tmp_path / "rows.jsonl", ROWS), reward="number_match", eval_rows=3)
    reasons = "2 null_answer, 1 empty_prompt, 1 too_long, 1 duplicate, 1 unreadable_answer"
    found = dry_lines(data, TINY, 0)
    assert sorted(found[0].partition("(")[2].partition(")")[0].split(", ")) == sorted(reasons.split(", "))
    assert found[0].partition(" (")[0] == "rows      train: 16 read, 6 left out"
    assert found[0].endswith("), 8 to train on")
    assert found[1:] == ["rows      held_out: 2 to evaluate, taken out of train (data.eval_rows=3)"]


def test_held_out_sets_are_counted_by_themselves_and_overlap_with_training_too(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a" / "train.jsonl", ROWS[:10])
    write_jsonl(tmp_path / "a" / "test.jsonl", [*ROWS[2:5], {"prompt": "0+9=", "answer": 9}])
    assert dry_lines(jsonl(train.parent, eval_rows=2), TINY, 0) == [
        "rows      train: 10 read, 3 left out (3 in_held_out), 7 to train on",
        "rows      test: 4 read, none left out, 2 to evaluate",
    ]


def test_a_mixture_counts_by_part_and_what_another_part_holds_out(tmp_path: Path) -> None:
    one = jsonl(write_jsonl(tmp_path / "one.jsonl", ROWS[:10]))
    write_jsonl(tmp_path / "two" / "train.jsonl", [{"prompt": "0+9=", "answer": 9}])
    write_jsonl(tmp_path / "two" / "test.jsonl", ROWS[:4])
    mixed = Mixture(parts={"a": one, "b": jsonl(tmp_path / "two", eval_rows=9)}, max_prompt_tokens=64, max_tokens=8)
    assert dry_lines(mixed, TINY, 0) == [
        "rows      a/train: 10 read, none left out, 4 more that another part holds out, 6 to train on",
        "rows      b/train: 1 read, none left out, 1 to train on",
        "rows      b/test: 4 read, none left out, 4 to evaluate",
    ]


def test_computed_rows_are_counted_without_a_tokenizer() -> None:
    data = Arithmetic(reward="length", max_prompt_tokens=16, max_tokens=8, eval_rows=12, digits=3)
    assert dry_lines(data, "/nowhere", 0) == ["rows      train: 500 to train on", "rows      held_out: 12 to evaluate"]


def test_a_set_that_would_be_downloaded_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    data = Hub(path="some/set", reward="length", max_prompt_tokens=16, max_tokens=8)
    assert dry_lines(data, "/nowhere", 0) == [
        "rows      not counted: some/set would have to be downloaded first, which the run does"
    ]


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = jsonl(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    with pytest.raises(ValueError, match=r"^model\.path=.*/model: its tokenizer cannot be read \("):
        dry_lines(data, str(tmp_path / "model"), 0)


def test_a_dry_run_prints_them_and_refuses_a_set_without_a_usable_row(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    options = ["dry_run=true", "data=jsonl", f"data.path={file}", "data.max_prompt_tokens=64", "data.max_tokens=8"]
    ended = command.run(*options, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "rows      train: 16 read, 6 left out (" in ended.stdout
    write_jsonl(file, [{"prompt": "1+1=", "answer": "two"}])
    ended = command.run(*options, folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == ["error: data: no row of train can be used: 1 unreadable_answer (e.g. train/0)"]
    assert command.tree(tmp_path) == ["rows.jsonl"]
