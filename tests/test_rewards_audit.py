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
    """The five lines of counts."""
    return {re.split("  +", line.strip())[1]: int(line.split()[0]) for line in report[1:6]}


def listed(report: list[str], kind: str) -> list[list[str]]:
    """The cells of the table below a kind of disagreement, without its head."""
    start = report.index(f"\n{kind}:") + 2
    below = [re.split("  +", line.strip()) for line in report[start:]]
    return below[: next((i for i, cells in enumerate(below) if len(cells) < 4), len(below))]


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
    assert listed(report, "verifier right, strict wrong") == [
        ["train/0", "another row's gold", "1/2", r"So the answer is \boxed{0.5}."],
        ["train/1", "another row's gold", "0.5", r"So the answer is \boxed{1/2}."],
    ]


def test_the_scorer_of_reasoning_gym_is_compared_with_the_answer_of_its_own_rows() -> None:
    pytest.importorskip("reasoning_gym")
    report = run(["data=reasoning_gym", "data.tasks=[{task: chain_sum, max_terms: 2}]"], rows=8, folder=None, name=None)
    assert report[0].startswith("16 answers judged by reasoning_gym ")
    assert counts(report)["both right"] >= 8
    assert sum(counts(report).values()) == 16


def test_the_texts_of_a_column_are_judged(tmp_path: Path) -> None:
    solutions = [r"so \boxed{16/2}", r"so \boxed{9}", None, "\\boxed{8}\nand so on"]
    rows = [{"prompt": f"q{i}", "answer": "8", "work": {"out": text}} for i, text in enumerate(solutions)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    overrides = ["data=jsonl", f"data.path={file}", "data.reward=math_verify"]
    report = run(overrides, rows=10, folder=None, name=None, column="work.out")
    assert list(counts(report).values()) == [1, 1, 1, 0, 0]
    assert listed(report, "verifier right, strict wrong") == [["train/0", "column work.out", "8", r"so \boxed{16/2}"]]


def test_what_training_would_leave_out_is_named_and_a_right_answer_is_right_by_definition(tmp_path: Path) -> None:
    """A gold that the verifier cannot read is not judged; one with a colon is lost behind the last colon."""
    report = run(["data=jsonl", set_of(tmp_path, "7", "5 apples")], rows=10, folder=None, name=None)
    assert report[0].startswith("2 answers judged by number_match ")
    assert report[6].endswith("right answers that number_match cannot read (their rows are left out): 5 apples")
    lost = ["data=jsonl", set_of(tmp_path, "7:30"), "data.reward=[{kind: exact_match, after: ':'}]"]
    assert counts(run(lost, rows=10, folder=None, name=None))["verifier wrong, strict right"] == 1


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
        ]
        + [{"row": "train/0", "prompt": "q", "completion": "", "step": 3, "finish_reason": None}],  # dropped
    )
    report = run(
        ["data=jsonl", path, "data.reward=[{kind: math_verify, timeout: 1}]"],
        rows=10,
        folder=tmp_path / "run",
        name=None,
    )
    assert report[0].startswith("3 answers judged by math_verify ")
    assert counts(report) == {
        "both right": 1,
        "both wrong": 0,
        "verifier right, strict wrong": 1,
        "verifier wrong, strict right": 0,
        "not scored": 1,
    }
    assert listed(report, "verifier right, strict wrong") == [["train/1", "step 3", "8", r"so \boxed{16/2}"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data.reward=length"],
            "none of the rewards compares with an answer by itself; name one with --reward: length",
        ),
        (["--reward", "nonesuch"], "--reward nonesuch: the data has no such reward; it has number_match"),
        (["--run", "nowhere"], "--run nowhere: no rollouts.jsonl in it"),
        (
            ["--run", "{other}"],
            "--run: none of its completions belongs to a row of this data set that has a right "
            "answer; give the data.* overrides of the run",
        ),
        (["--column", "work"], "--column work: no row has a text there; the rows have answer, prompt"),
        (["--rows", "0"], "--rows 0: must be at least 1"),
        (
            ["data.reward=[{kind: format, pattern: x}]", "--reward", "format", "data.answer=null"],
            "data.answer=null: no row has a right answer to compare with",
        ),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    other = tmp_path / "other"
    write_jsonl(
        other / "rollouts.jsonl", [{"row": row, "prompt": "q", "completion": "7"} for row in ("x/0", "train/9")]
    )
    arguments = [argument.replace("{other}", str(other)) for argument in arguments]
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
