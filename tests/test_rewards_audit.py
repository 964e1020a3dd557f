"""The audit: what a lenient or a harsh verifier does is shown, and a right one is left in peace."""

import re
from pathlib import Path

import pytest
from data_tools import write_jsonl
from reward_tools import MINE

from grpo.rewards.__main__ import main, run


def set_of(tmp_path: Path, *golds: str) -> str:
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"question {i}", "answer": g} for i, g in enumerate(golds)])
    return f"data.path={file}"


def counts(report: list[str]) -> dict[str, int]:
    return {line.strip().partition("  ")[2]: int(line.split()[0]) for line in report[1:6]}


def test_a_better_reading_is_shown_for_a_person_to_look_at(tmp_path: Path) -> None:
    report = run(
        ["data=jsonl", set_of(tmp_path, "1/2", "0.5"), "data.reward=math_verify"], rows=10, folder=None, name=None
    )
    assert counts(report) == {
        "both right": 2,
        "both wrong": 0,
        "verifier right, strict wrong": 2,
        "verifier wrong, strict right": 0,
        "not scored": 0,
    }
    text = "\n".join(report)
    assert "verifier right, strict wrong: row train/0, another row's gold" in text
    assert "gold       '1/2'" in text
    assert r"completion 'So the answer is \\boxed{0.5}.'" in text


def test_a_verifier_that_loses_right_answers_is_found(tmp_path: Path) -> None:
    """`exits` says 1 to everything but "exit"; `matches` wants the very text, so it loses 7.0 for 7."""
    golds = ["data=jsonl", set_of(tmp_path, "7", "7.0", "8")]
    harsh = counts(run([*golds, f"data.reward={MINE}:matches"], rows=10, folder=None, name="matches"))
    assert harsh["verifier wrong, strict right"] >= 1
    assert harsh["verifier right, strict wrong"] == 0
    lenient = counts(run([*golds, f"data.reward={MINE}:exits"], rows=10, folder=None, name="exits"))
    assert lenient["verifier right, strict wrong"] >= 1
    assert lenient["verifier wrong, strict right"] == 0


def test_the_completions_of_a_run_are_judged(tmp_path: Path) -> None:
    path = set_of(tmp_path, "7", "8")
    completions = [
        ("train/0", r"so \boxed{7}"),
        ("train/1", r"so \boxed{16/2}"),
        ("train/1", r"\boxed{9!!!!}"),
        ("x/1", ""),
    ]
    write_jsonl(
        tmp_path / "run" / "rollouts.jsonl",
        [
            {"row": row, "prompt": "q", "completion": text, "step": 3, "finish_reason": "stop"}
            for row, text in completions
        ],
    )
    report = run(
        ["data=jsonl", path, "data.reward=[{kind: math_verify, timeout: 1}]"],
        rows=10,
        folder=tmp_path / "run",
        name=None,
    )
    assert report[0] == "3 answers judged by math_verify and by strict comparison"
    assert counts(report) == {
        "both right": 1,
        "both wrong": 0,
        "verifier right, strict wrong": 1,
        "verifier wrong, strict right": 0,
        "not scored": 1,
    }
    assert "verifier right, strict wrong: row train/1, step 3" in "\n".join(report)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data.reward=length"],
            "none of the rewards compares with an answer by itself; name one with --reward: length",
        ),
        (["--reward", "nonesuch"], "--reward nonesuch: the data has no such reward; it has number_match"),
        (["--run", "nowhere"], "--run nowhere: no rollouts.jsonl in it"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["audit", "data=jsonl", set_of(tmp_path, "7"), *arguments]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_mistake_in_the_configuration_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "data=reasoning_gym", "data.reward=[{kind: number_match}]"]) == 2
    assert re.fullmatch(r"error: data\.answer=null: .*number_match.*\n", capsys.readouterr().err)


def test_the_default_data_set_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "data=arithmetic", "--rows", "30"]) == 0
    printed = capsys.readouterr().out
    assert "60 answers judged by exact_match" in printed
    assert printed.count("row train/") == 0
