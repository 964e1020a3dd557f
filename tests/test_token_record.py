"""The record of a step's tokens: what was put in comes out, in few bytes, and a killed or damaged one does no harm."""

import contextlib
import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from grpo.record import Recorder
from grpo.token_record import TokenRecorder, cut_back, file_of, read, recorded_steps, recorder_of
from grpo.types import IN_FLIGHT, Completion, Group, Prompt, Turn


def groups(vocab: int = 300, version: int = 7) -> list[Group]:
    """A trained group (one completion unscored, one cut), a discarded one, and one that lost all its requests."""
    draw = np.random.default_rng(0)
    made = []
    for place, (discarded, size) in enumerate([(None, 3), ("zero_variance:all_right", 2), ("failed", 0)]):
        completions = []
        for i in range(size):
            n = int(draw.integers(1, 9))
            completions.append(
                Completion(
                    group=place + 40,
                    index=2 * i,
                    token_ids=[int(x) for x in draw.integers(0, vocab, n)],
                    logprobs=[float(np.float32(x)) for x in -draw.exponential(1.0, n)],
                    versions=sorted(int(x) for x in draw.integers(version - 3, version + 1, n)),
                    finish_reason="length" if i == 1 else "stop",
                    reward=None if i == 2 else 0.1 * i,
                    rewards={"a": None if i == 1 else 1.0 / 3, "b": 0.0},
                    advantage=None if discarded or i == 2 else 0.7,
                    outcome=f"discarded:{discarded}" if discarded else ("masked:unscored" if i == 2 else "trained"),
                    policy_logprobs=[]
                    if discarded or i == 2
                    else [float(np.float32(x)) for x in -draw.exponential(1.0, n)],
                )
            )
        prompt = Prompt(place + 40, "", "", [int(x) for x in draw.integers(0, vocab, 4 + place)], {})
        made.append(Group(place + 40, prompt, completions, discarded))
    return made


@pytest.mark.parametrize("vocab", [200, 60_000, 150_000])
def test_what_was_put_in_comes_out(tmp_path: Path, vocab: int) -> None:
    given = groups(vocab)
    facts = {"loss": {"_target_": "x", "cap": None, "clip_low": 0.2}, "reward_weights": {"a": 1.0}}
    TokenRecorder(tmp_path, facts).write(3, 7, given)
    record = read(tmp_path, 3)
    assert (record.step, record.version, record.facts) == (3, 7, facts)
    completions = [c for g in given for c in g.completions]
    assert record.advantages == [c.advantage for c in completions]
    assert record.outcomes == [c.outcome for c in completions]
    as_read = [
        replace(g, completions=[replace(c, advantage=None, outcome=IN_FLIGHT) for c in g.completions]) for g in given
    ]
    assert record.groups == as_read


def test_observations_between_turns_have_ids_and_nothing_else(tmp_path: Path) -> None:
    given = groups()[:1]
    for c in given[0].completions[:2]:
        answers = len(c.token_ids)
        c.token_ids = [*c.token_ids, 8, 9, 10, *c.token_ids[:1]]
        c.logprobs, c.versions = [*c.logprobs, -0.25], [*c.versions, 7]
        c.policy_logprobs = [*c.policy_logprobs, -0.5]
        c.turns = [Turn(True, answers, ""), Turn(False, 3, ""), Turn(True, 1, "")]
    TokenRecorder(tmp_path).write(3, 7, given)
    for ours, theirs in zip(read(tmp_path, 3).groups[0].completions, given[0].completions, strict=True):
        assert (ours.token_ids, ours.logprobs, ours.versions) == (theirs.token_ids, theirs.logprobs, theirs.versions)
        assert (ours.mask, ours.turns, ours.tokens) == (theirs.mask, theirs.turns, theirs.tokens)
        assert ours.policy_logprobs == theirs.policy_logprobs


def test_some_groups_alone_are_those_of_the_whole(tmp_path: Path) -> None:
    """By their place in the stream, which is no position in the file."""
    given = groups()
    path = TokenRecorder(tmp_path).write(3, 7, given)
    whole = read(tmp_path, 3)
    for places, rows in (({41}, slice(3, 5)), ({40, 42}, slice(0, 3)), (set(), slice(0, 0)), ({0, 1}, slice(0, 0))):
        some = read(tmp_path, 3, places)
        assert some.groups == [g for g in whole.groups if g.index in places]
        assert (some.outcomes, some.advantages) == (whole.outcomes[rows], whole.advantages[rows])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="damaged"):
        read(tmp_path, 3, {41})


def test_a_record_without_policy_logprobs_is_read(tmp_path: Path) -> None:
    """Those of earlier versions have none."""
    path = TokenRecorder(tmp_path).write(3, 7, groups())
    with safe_open(path, "np") as file:
        header = file.metadata()
    arrays = load_file(path)
    del arrays["policy_logprobs"]
    path.write_bytes(save(arrays, header))
    assert [c.policy_logprobs for g in read(tmp_path, 3).groups for c in g.completions] == [[]] * 5


def test_the_tokenizer_is_beside_the_records(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parent.parent / "models" / "tiny")
    recorder_of(tmp_path, {"a": 1}, tokenizer).write(1, 7, groups())
    assert read(tmp_path, 1).facts == {"a": 1}
    assert recorded_steps(tmp_path) == [1]
    saved = Tokenizer.from_file(str(tmp_path / "tokens" / "tokenizer.json"))
    assert saved.decode([5, 6, 7, 1], skip_special_tokens=False) == tokenizer.decode([5, 6, 7, 1]) == "234<eos>"
    recorder_of(tmp_path / "none", {}, object())  # a tokenizer in pure Python
    assert not (tmp_path / "none").exists()


def test_a_line_of_rollouts_has_the_largest_log_ratio(tmp_path: Path) -> None:
    given = groups()[:1]
    given[0].completions[0].logprobs = [-1.0, -1.0, -2.0]
    given[0].completions[0].versions = [7, 7, 7]
    given[0].completions[0].policy_logprobs = [-1.5, -3.0, -0.5]
    with contextlib.closing(Recorder(tmp_path, steps=2)) as recorder:
        recorder.rollouts(1, given, version=7)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert lines[0]["log_ratio"] == -2.0
    assert "log_ratio" not in lines[2]


@pytest.mark.parametrize(("vocab", "expected"), [(60_000, 11), (150_000, 13)])
def test_bytes_per_token(tmp_path: Path, vocab: int, expected: int) -> None:
    tokens = 100_000
    ids = [vocab - 1] * (tokens // 8)
    completions = [Completion(0, i, ids, [-0.5] * len(ids), [0] * len(ids), "stop") for i in range(8)]
    path = TokenRecorder(tmp_path).write(1, 2, [Group(0, Prompt(0, "", "", [1], {}), completions)])
    assert path.stat().st_size == pytest.approx(expected * tokens, rel=0.02)


def test_a_resumed_run_drops_later_and_half_written_records(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        TokenRecorder(tmp_path).write(step, step - 1, groups(version=step + 5))
    halves = [file_of(tmp_path, step).with_name(file_of(tmp_path, step).name + ".tmp") for step in (1, 4)]
    for half in halves:
        half.write_bytes(b"killed while writing")
    assert recorded_steps(tmp_path) == [1, 2, 3]
    with contextlib.closing(Recorder(tmp_path, steps=9, resumed_at=2)) as recorder:
        recorder.cut_back()
        assert recorded_steps(tmp_path) == [1, 2]
        assert not any(half.exists() for half in halves)
    cut_back(tmp_path / "a run without records", 0)


def test_the_recorder_writes_a_record_a_step_only_when_asked(tmp_path: Path) -> None:
    with contextlib.closing(Recorder(tmp_path, steps=2)) as recorder:
        recorder.rollouts(1, groups()[:2], version=7)
        recorder.tokens = TokenRecorder(tmp_path)
        recorder.rollouts(2, groups()[:2], version=7)
    assert recorded_steps(tmp_path) == [2]


def test_a_full_disk_is_an_os_error_and_leaves_no_record(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            TokenRecorder(tmp_path).write(1, 7, groups())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert recorded_steps(tmp_path) == []


def test_a_record_that_is_damaged_or_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_000005.safetensors: there is no record of step 5"):
        read(tmp_path, 5)
    path = TokenRecorder(tmp_path).write(5, 7, groups())
    whole = path.read_bytes()
    for broken in (whole[:-3], whole[:100], b"", whole.replace(b'\\"1\\"', b'\\"9\\"', 1)):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"step_000005.safetensors: damaged") as caught:
            read(tmp_path, 5)
        assert "\n" not in str(caught.value)


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    arrays = load_file(TokenRecorder(tmp_path).write(1, 7, groups()))
    assert arrays["logprobs"].dtype == np.float32
    assert (arrays["completion_ids"].dtype, arrays["lags"].dtype) == (np.uint16, np.uint8)
    assert len(arrays["completion_ids"]) == len(arrays["lags"]) == arrays["completion_lengths"].sum()
