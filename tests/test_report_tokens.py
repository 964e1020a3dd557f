"""Tokens on the run's page: their numbers are those of the record, and what has no room or no record is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from make_run import EOS, RunSpec, make_run
from safetensors import safe_open
from safetensors.numpy import load_file, save
from test_report import page_data, texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from grpo import token_record
from grpo.report import build_run, tokens
from grpo.report.rollouts import HEAD, TAIL, _turns
from grpo.report.run import run_data
from grpo.token_record import TokenRecorder
from grpo.types import Completion, Group, Prompt


def traced(data: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(group, row) for group in data["groups"] for row in group["rows"] if "trace" in row]


def one_run(folder: Path, completions: list[Completion], text: str = "x") -> Path:
    """A run of one step with one group, in both files."""
    rows = [
        {"step": 1, "group": 4, "index": c.index, "prompt": "p", "completion": text, "tokens": c.tokens, "lag": 2}
        | {"advantage": c.advantage, "version_first": 3, "reward": 1.0, "outcome": "trained"}
        for c in completions
    ]
    folder.mkdir(exist_ok=True)
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    TokenRecorder(folder).write(1, 5, [Group(4, Prompt(4, "", "", [1], {}), completions)])
    return folder


def completion(ids: list[int], index: int = 0) -> Completion:
    n = len(ids)
    ratios = [0.001 * i for i in range(n)]
    return Completion(
        4,
        index,
        ids,
        [-1.0] * n,
        [3] * (n - 1) + [5],
        "stop",
        advantage=0.5,
        policy_logprobs=[-1.0 + ratio for ratio in ratios],
    )


@pytest.mark.parametrize("observed", [False, True])
def test_every_number_is_that_of_the_record(tmp_path: Path, observed: bool) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=8, max_staleness=2, tokens=True, observed=observed))
    data = page_data(build_run(folder))
    assert data["traces"]["rows"] == len(traced(data)) == 8 * 4 * 8 == data["rollout_rows"]
    assert data["traces"]["special"] == [EOS]
    assert texts(data) == ""
    for group, row in traced(data):
        record = token_record.read(folder, row["step"], {group["group"]})
        c = record.groups[0].completions[row["index"]]
        trace = row["trace"]
        assert trace["ids"] == c.token_ids
        assert "".join(trace["texts"]) == row["completion"] + "<eos>"
        versions = iter(c.versions)
        sampler, policy = iter(c.logprobs), iter(c.policy_logprobs)
        for i, sampled in enumerate(c.mask):
            if not sampled:
                assert trace["logprobs"][i] is trace["log_ratios"][i] is None
                assert trace["observed"][i]
                continue
            logprob = next(sampler)
            assert trace["logprobs"][i] == pytest.approx(logprob, rel=1e-3)
            assert trace.get("versions", {i: trace.get("version")})[i] == next(versions)
            if row["outcome"] == "trained":
                assert trace["log_ratios"][i] == pytest.approx(next(policy) - logprob, rel=1e-3)
            else:
                assert trace["log_ratios"][i] is None
        assert ("observed" in trace) == observed == ("turns" in row)
        if observed:
            assert "".join(text for _, text in row["turns"]) == row["completion"]
            assert [by_policy for by_policy, _ in row["turns"]][1] is False


def test_without_records_nothing_is_said(tmp_path: Path) -> None:
    data = page_data(build_run(make_run(tmp_path / "run", RunSpec(steps=3))))
    assert data["traces"] is None
    assert traced(data) == []


def test_the_notable_ones_come_first_where_there_is_little_room(tmp_path: Path, monkeypatch: Any) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=30, tokens=True))
    counts = []
    for budget in (0, 4000, 40_000, 500_000):
        monkeypatch.setattr("grpo.report.run.TRACE_BYTES", budget)
        data = run_data(folder)
        rows = [row for group in data["groups"] for row in group["rows"]]
        with_trace = [row for row in rows if "trace" in row]
        counts.append(len(with_trace))
        size = sum(len(json.dumps(row["trace"], separators=(",", ":"))) for row in with_trace)
        assert size <= budget
        notable = [row for row in rows if "why" in row]
        if len(with_trace) <= len(notable):
            assert all("why" in row for row in with_trace)
        else:
            assert all("trace" in row for row in notable)
    assert counts == sorted(set(counts))
    assert counts[0] == 0
    assert counts[-1] == 30 * 4 * 8


def test_a_long_completion_keeps_its_ends_and_says_what_is_left_out(tmp_path: Path) -> None:
    n = tokens.HEAD + tokens.TAIL
    data = page_data(build_run(one_run(tmp_path / "run", [completion(list(range(n + 7))), completion([*range(n)], 1)])))
    long, whole = (row["trace"] for _, row in traced(data))
    assert long["ids"] == [*range(tokens.HEAD), *range(n + 7 - tokens.TAIL, n + 7)]
    assert long["cut"] == [tokens.HEAD, 7]
    assert long["log_ratios"][-1] == pytest.approx(0.001 * (n + 6), rel=1e-3)
    assert long["versions"][-2:] == [3, 5]
    assert "cut" not in whole


def test_a_character_in_several_tokens_is_shown_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<|im_end|>"], show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    ids = tokenizer.encode("a😀b<|im_end|>").ids
    folder = one_run(tmp_path / "run", [completion([*ids, 9999])])
    (folder / "tokens" / "tokenizer.json").write_text(tokenizer.to_str())
    data = page_data(build_run(folder))
    [(_, row)] = traced(data)
    assert row["trace"]["texts"] == ["a", "", "", "", "😀", "b", "<|im_end|>", ""]  # the last id has no token
    assert data["traces"]["special"] == [0]


def test_full_colour_is_where_99_of_100_tokens_are_within() -> None:
    assert tokens.Traces().scale == 0.01
    for typical, scale in ((0.0, 0.01), (0.02, 0.03), (0.11, 0.3), (0.9, 1.0), (50.0, 10.0)):
        assert tokens.Traces(sizes=[typical] * 990 + [99.0] * 10).scale == scale


def test_a_record_of_something_else_colours_nothing(tmp_path: Path) -> None:
    for change in ({"tokens": 2}, {"advantage": 0.25}):
        folder = one_run(tmp_path / "run", [completion([3, 4, 5])])
        row = json.loads((folder / "rollouts.jsonl").read_text())
        (folder / "rollouts.jsonl").write_text(json.dumps(row | change))
        data = page_data(build_run(folder))
        assert traced(data) == []
        assert "tokens/: 1 completions are not those of rollouts.jsonl" in texts(data)


def test_damage_is_said_and_the_rest_is_there(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=4, tokens=True))
    path = token_record.file_of(folder, 2)
    path.write_bytes(path.read_bytes()[:-3])
    (folder / "tokens" / "tokenizer.json").write_text("{")
    data = page_data(build_run(folder))
    assert {row["step"] for _, row in traced(data)} == {1, 3, 4}
    assert "tokens/: step_000002.safetensors: damaged (" in texts(data)
    assert "tokens/tokenizer.json cannot be read" in texts(data)
    assert all(row["trace"]["texts"] == [f"[{i}]" for i in row["trace"]["ids"]] for _, row in traced(data))
    (folder / "tokens" / "tokenizer.json").unlink()
    (folder / "tokens" / "step_x.safetensors").touch()
    data = page_data(build_run(folder))
    assert traced(data) == []
    assert "tokens/: invalid literal" in texts(data)


@pytest.mark.parametrize("key", ["format", "step", "version", "facts", "discarded", "outcomes", "finish_reasons"])
@pytest.mark.parametrize("value", [None, "[]", '{"a": 1}', '"x"', "1e999"])
def test_no_header_makes_it_raise(tmp_path: Path, key: str, value: str | None) -> None:
    folder = one_run(tmp_path / "run", [completion([3, 4, 5])])
    path = token_record.file_of(folder, 1)
    with safe_open(path, "np") as file:
        header = file.metadata()
    header.pop(key)
    path.write_bytes(save(load_file(path), header | ({} if value is None else {key: value})))
    page_data(build_run(folder))


def test_turns_are_clipped_as_the_completion_is() -> None:
    def turns(*lengths: int) -> list[list[Any]]:
        parts = ["".join(chr(97 + (i + k) % 26) for k in range(n)) for i, n in enumerate(lengths)]
        listed = [{"by_policy": i % 2 == 0, "tokens": 1, "text": part} for i, part in enumerate(parts)]
        shown: list[list[Any]] = _turns({"turns": listed, "completion": "".join(parts)})["turns"]
        whole = "".join(parts)
        head = "".join(text if isinstance(text, str) else text[0] for _, text in shown)
        left_out = sum(0 if isinstance(text, str) else text[1] for _, text in shown)
        tail = "".join(text[2] for _, text in shown if not isinstance(text, str))
        assert len(head) + left_out + len(tail) == len(whole)
        assert left_out == max(0, len(whole) - HEAD - TAIL)
        return shown

    assert [by_policy for by_policy, _ in turns(5, 3, 4)] == [True, False, True]
    assert len(turns(HEAD + TAIL - 3, 3)) == 2
    assert len(turns(HEAD, 5000, 300, 300, 300, TAIL)) == 3  # four turns of which nothing is left are one cut
    turns(HEAD - 10, 5000, TAIL - 5)
    turns(10_000, 20)
    assert _turns({"turns": [{"by_policy": True, "text": "x"}], "completion": "x"}) == {}
    assert _turns({"turns": [{"by_policy": False, "text": "x"}], "completion": "other"}) == {}
