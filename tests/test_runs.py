"""`python -m grpo.runs`: listing, filters and differences, by what is printed."""

import json
import os
import time
from pathlib import Path

import pytest
from make_run import RunSpec, make_empty, make_hostile, make_run, make_sweep

from grpo.runs import diff, find_runs, main, read_listed


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs and a sweep of four. Read only."""
    root = tmp_path_factory.mktemp("outputs")
    make_run(root / "day" / "one", RunSpec(steps=12, overrides=("loss=gspo", "model.lr=1e-5")))
    make_run(root / "day" / "two", RunSpec(steps=12, state="failed", stop_at=5))
    make_empty(root / "day" / "three")
    make_sweep(root / "sweep", (0, 1), (4,), (0, 1), failed=(), steps=12)
    return root


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main([*arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def names(rows: list[dict[str, object]], root: Path) -> set[str]:
    return {str(Path(str(row["folder"])).relative_to(root)) for row in rows}


def test_every_run_is_found_once_and_nothing_inside_a_run(outputs: Path) -> None:
    (outputs / "day" / "one" / "checkpoints" / "step_000010" / ".hydra").mkdir(parents=True, exist_ok=True)
    found = [path.relative_to(outputs).as_posix() for path in find_runs(outputs)]
    assert found == ["day/one", "day/three", "day/two", "sweep/0", "sweep/1", "sweep/2", "sweep/3"]


def test_the_list_shows_state_results_and_overrides(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(outputs), "--sort", "name"]) == 0
    out = capsys.readouterr().out.splitlines()
    first, last = [json.loads(line) for line in (outputs / "day/one/evals.jsonl").read_text().splitlines()][::2]
    [row] = [line for line in out if " day/one " in line]
    assert row.startswith("finished  ")
    for cell in (" 12/12 ", " tiny ", " gspo ", " model.lr=1e-5"):
        assert cell in row
    assert f"{first['accuracy']:.3f} -> {last['accuracy']:.3f}" in row
    assert out[-1] == f"7 of 7 runs in {outputs}"


def test_filters_are_joined_by_and(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(outputs)
    assert names(listed(capsys, root, "--state", "failed"), outputs) == {"day/two"}
    assert names(listed(capsys, root, "--state", "running"), outputs) == {"day/three"}
    assert names(listed(capsys, root, "--match", "loss=gspo"), outputs) == {"day/one"}
    assert names(listed(capsys, root, "--match", "max_staleness=1", "seed=0"), outputs) == {"sweep/2"}
    assert names(listed(capsys, root, "--match", "nothing"), outputs) == set()
    assert len(listed(capsys, root, "--limit", "2")) == 2


def test_best_first(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = [row["after"] for row in listed(capsys, str(outputs), "--sort", "eval", "--state", "finished")]
    assert values == sorted(values, key=lambda value: -float(str(value)))


def test_a_run_without_a_sign_of_life_is_doubted(tmp_path: Path) -> None:
    folder = make_empty(tmp_path / "run")
    assert read_listed(folder, tmp_path).state == "running"
    for name in ("status.json", "metrics.jsonl"):
        os.utime(folder / name, (time.time() - 3600, time.time() - 3600))
    assert read_listed(folder, tmp_path).state == "running?"


def test_thousands_of_runs_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 runs of 4 kinds in 20 sweeps: each is listed once, with its own state, overrides and evaluation."""
    kinds = [
        make_run(tmp_path / "kinds" / str(i), RunSpec(steps=2, seed=i, state="failed" if i == 3 else "finished"))
        for i in range(4)
    ]
    last = [json.loads((kind / "evals.jsonl").read_text().splitlines()[-1])["accuracy"] for kind in kinds]
    root = tmp_path / "outputs"
    for number in range(2000):
        folder = root / f"sweep-{number // 100}" / str(number % 100)
        (folder / ".hydra").mkdir(parents=True)
        for name in ("status.json", "summary.json", "evals.jsonl", ".hydra/hydra.yaml"):
            (folder / name).symlink_to(kinds[number % 4] / name)
        (folder / ".hydra" / "overrides.yaml").write_text(f"- seed={number}\n")
    rows = listed(capsys, str(root))
    assert names(rows, root) == {f"sweep-{s}/{j}" for s in range(20) for j in range(100)}
    for row in rows:
        sweep_, job = str(Path(str(row["folder"])).relative_to(root)).removeprefix("sweep-").split("/")
        number = 100 * int(sweep_) + int(job)
        assert row["overrides"] == {"seed": str(number)}
        assert row["state"] == ("failed" if number % 4 == 3 else "finished")
        assert row["after"] == last[number % 4]
    best = listed(capsys, str(root), "--sort", "eval", "--state", "finished", "--limit", "500")
    assert {row["after"] for row in best} == {max(last[:3])}
    assert names(listed(capsys, str(root), "--match", "seed=1234"), root) == {"sweep-12/34"}


def test_differences(outputs: Path) -> None:
    sections = dict(diff(outputs / "sweep" / "0", outputs / "sweep" / "3"))
    assert sections["config"] == [["seed", "0", "1"], ["rollout.max_staleness", "0", "1"]]
    assert sections["environment"] == []
    result = {key: (a, b) for key, a, b in sections["result"]}
    assert result["step"] == ("12/12", "12/12")
    last = json.loads((outputs / "sweep/3/evals.jsonl").read_text().splitlines()[-1])
    assert result["evaluation arithmetic, last"][1].startswith(f"{last['accuracy']:.3f} [{last['low']:.3f}, ")


def test_differences_of_the_environment(outputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git = {"git": {"revision": "abc", "dirty": False}}
    other = make_run(tmp_path / "other", RunSpec(steps=12, state="failed", stop_at=5, status=git))
    assert main(["diff", str(outputs / "day" / "two"), str(other)]) == 0
    out = capsys.readouterr().out
    assert "config: no difference" in out
    assert "git.dirty" in out
    assert "807452b4f1c3a9e2d5b6708192a3b4c5d6e7f809" in out


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "no")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'no'}: no such folder\n"
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 1
    assert "not a run folder" in capsys.readouterr().err


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_hostile(tmp_path / "run")
    assert main([str(tmp_path)]) == 0
    assert main(["diff", str(tmp_path / "run"), str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_broken_folders_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a", "{"), ("b", "[]"), ("c", '{"state": 3, "step": "x", "started": "soon"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "status.json").write_text(content)
    assert [row["state"] for row in listed(capsys, str(tmp_path), "--sort", "name")] == ["unknown", "unknown", "3"]
