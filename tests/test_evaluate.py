"""Intervals and pass@k by hand; an evaluation that straddles a sync is an error."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo.evaluate import Evaluator, bootstrap, pass_at_k, summarize, wilson
from grpo.record import Recorder
from grpo.types import Completion, Group, Prompt, Sampling


def test_wilson_by_hand() -> None:
    # p = 0.5, n = 100, z = 1.96: centre 0.5, half = 1.96 / (1 + 0.038415) * sqrt(0.0025 + 0.0000960)
    assert wilson(50, 100) == pytest.approx((0.40383, 0.59617), abs=1e-5)
    low, high = wilson(0, 20)
    assert low == 0.0
    assert high == pytest.approx(0.16113, abs=1e-4)
    assert wilson(20, 20)[1] == 1.0


def test_pass_at_k_by_hand() -> None:
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert pass_at_k(4, 1, 2) == pytest.approx(0.5)  # 1 - C(3,2)/C(4,2) = 1 - 3/6
    assert pass_at_k(4, 3, 2) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0


def test_one_binary_completion_a_prompt_gives_accuracy_with_wilsons_interval() -> None:
    result = summarize([[1.0], [0.0], [1.0], [1.0]])
    assert result["accuracy"] == result["reward"] == 0.75
    assert (result["low"], result["high"]) == wilson(3, 4)
    assert result["n"] == 4
    assert "pass" not in result


def test_several_completions_a_prompt_give_pass_at_k_and_an_interval_over_prompts() -> None:
    result = summarize([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert result["accuracy"] == pytest.approx(0.5)
    assert result["pass"] == {"1": pytest.approx(0.5), "2": pytest.approx(2 / 3)}
    assert (result["low"], result["high"]) == bootstrap([0.5, 1.0, 0.0])


def test_pass_at_k_takes_each_prompts_own_number_of_scored_completions() -> None:
    result = summarize([[1.0, 0.0, None, 0.0], [None, None, None, 1.0], [None] * 4, [0.0, 1.0, 1.0, 0.0]])
    assert result["accuracy"] == pytest.approx((1 / 3 + 1 + 1 / 2) / 3)
    assert result["pass"] == {"1": pytest.approx(result["accuracy"])}, "one prompt has one: pass@2 would leave it out"
    fewer = summarize([[1.0, 0.0, None, 0.0], [None] * 4, [0.0, 1.0, 1.0, 0.0]])  # at least three each
    assert fewer["pass"] == {"1": pytest.approx((1 / 3 + 1 / 2) / 2), "2": pytest.approx((2 / 3 + 5 / 6) / 2)}


def test_all_right_or_all_wrong_has_an_interval_with_a_width() -> None:
    right = summarize([[1.0, 1.0]] * 12)
    assert (right["low"], right["high"]) == wilson(12, 12)
    wrong = summarize([[0.0, 0.0, None]] * 5)
    assert (wrong["low"], wrong["high"]) == wilson(0, 5)


def test_a_reward_that_is_no_zero_or_one_is_no_accuracy() -> None:
    result = summarize([[0.5], [1.0]])
    assert result["accuracy"] is None
    assert result["reward"] == 0.75


def test_unscored_completions_are_counted_and_left_out_not_zero() -> None:
    result = summarize([[1.0], [None], [1.0]])
    assert result["accuracy"] == 1.0
    assert (result["n"], result["unscored"]) == (2, 1)
    assert summarize([[None]])["reward"] is None


@dataclass
class Answers:
    """A loader that has been asked."""

    version: int
    asked: list[Any] = field(default_factory=list)

    def sample(self, prompts: list[Prompt], sampling: Sampling, count: int, timeout: float) -> list[Group]:
        self.asked.append((len(prompts), sampling.temperature, count))
        return [
            Group(
                -1,
                prompt,
                [Completion(-1, i, [4, 1], [-1.0, -1.0], [self.version] * 2, "stop", reward=1.0) for i in range(count)],
            )
            for prompt in prompts
        ]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with contextlib.closing(Recorder(tmp_path, steps=1)) as made:
        yield made


def evaluator(recorder: Recorder, version: int) -> Evaluator:
    prompts = [Prompt(i, f"test/{i}", "p", [3], {}) for i in range(3)]
    return Evaluator(
        loader=Answers(version),  # type: ignore[arg-type]
        recorder=recorder,
        sets={"held_out": prompts},
        sampling=Sampling(0.0, 4, None),
        samples=2,
        timeout=5,
    )


def test_a_line_and_the_completions_are_in_the_folder(tmp_path: Path, recorder: Recorder) -> None:
    line = evaluator(recorder, 3)(step=3, version=3)["held_out"]
    assert (line["step"], line["version"], line["accuracy"], line["n"]) == (3, 3, 1.0, 3)
    assert len((tmp_path / "evals.jsonl").read_text().splitlines()) == 1
    assert len((tmp_path / "eval_rollouts.jsonl").read_text().splitlines()) == 6


def test_a_missing_completion_is_unscored_and_counts_in_no_mean(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Answers.sample

    def some(self: Answers, *args: Any) -> list[Group]:
        groups = whole(self, *args)
        groups[0].completions.pop()
        groups[1].completions.clear()
        groups[2].completions[0].reward = 0.0
        return groups

    monkeypatch.setattr(Answers, "sample", some)
    line = evaluator(recorder, 3)(step=3, version=3)["held_out"]
    assert (line["accuracy"], line["n"], line["unscored"]) == (0.75, 2, 3)
    assert line["pass"] == {"1": 0.75}, "pass@1 is the accuracy; pass@2 would be of the one prompt with both"


def test_tokens_of_another_version_are_an_error(recorder: Recorder) -> None:
    with pytest.raises(AssertionError, match=r"version 4 got tokens of versions \[3\]"):
        evaluator(recorder, 3)(step=4, version=4)
