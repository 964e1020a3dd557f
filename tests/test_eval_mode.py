"""`python run.py mode=eval`: a model alone, on every held-out set; what it serves is proven first."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import command
import pytest
from composed import ROOT, composed
from fake_faults import Fault
from fake_server import FakeServer
from tiny import save_tiny_model

from grpo import preflight


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """Overrides: two held-out sets of 3 and 2 rows."""
    for name, count, start in (("train", 20, 0), ("easy", 3, 100), ("hard", 2, 200)):
        lines = [json.dumps({"prompt": f"{start + i}=", "answer": str(i)}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    sets = [f"+data.evals.{name}={{path: {tmp_path / name}.jsonl}}" for name in ("easy", "hard")]
    return ["data=jsonl", f"data.path={tmp_path / 'train.jsonl'}", *sets, "data.max_prompt_tokens=16"]


def test_every_set_is_evaluated_with_samples_and_the_folder_says_so(
    server: FakeServer, tmp_path: Path, rows: list[str]
) -> None:
    done = command.run(
        *rows,
        *command.small(server),
        "data.reward=[{kind: exact_match}]",
        "mode=eval",
        "train.eval_samples=2",
        "hydra.run.dir=out",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "out"
    lines = command.lines(folder / "evals.jsonl")
    assert [(x["name"], x["n"], x["samples"], x["step"], x["version"]) for x in lines] == [
        ("easy", 3, 2, 0, 0),
        ("hard", 2, 2, 0, 0),
    ]
    assert set(lines[0]["pass"]) == {"1", "2"}
    assert len(command.lines(folder / "eval_rollouts.jsonl")) == 2 * (3 + 2)
    status, summary = command.load(folder / "status.json"), command.load(folder / "summary.json")
    assert (status["state"], status["model"], status["steps"]) == ("finished", str(server.model_dir), 0)
    assert status["proof"]["sync/probe_max"] < 1e-3
    assert summary["mode"] == "eval"
    assert set(summary["eval"]) == {"easy", "hard"}
    assert summary["objective"] == lines[0]["reward"]
    assert (folder / "report.html").exists()
    assert not (folder / "checkpoints").exists()
    assert command.lines(folder / "metrics.jsonl") == command.lines(folder / "rollouts.jsonl") == []
    table = [line.split() for line in done.stdout.splitlines() if line.startswith(("set ", "easy ", "hard "))]
    assert [row[0] for row in table] == ["set", "easy", "hard"]
    assert "easy: " in done.stdout
    assert "step 0/" not in done.stdout, "there is no step to show"
    assert server.calls.index("finish_weight_update") < server.calls.index("generate")


def test_a_run_folder_stands_for_its_newest_checkpoint_and_gives_the_same_figures(
    server: FakeServer, tmp_path: Path
) -> None:
    greedy = [*command.small(server), "train.eval_temperature=0"]
    trained = command.run(
        *greedy,
        "train.steps=2",
        "train.checkpoint_every=1",
        "model.lr=0.01",
        "hydra.run.dir=trained",
        folder=tmp_path,
    )
    assert trained.returncode == 0, trained.stderr
    (_, after) = command.lines(tmp_path / "trained" / "evals.jsonl")
    done = command.run(*greedy, "mode=eval", "model.path=trained", "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert Path(command.load(tmp_path / "out" / "status.json")["model"]).name == "step_000002"
    (line,) = command.lines(tmp_path / "out" / "evals.jsonl")
    assert (line["reward"], line["length_mean"]) == (after["reward"], after["length_mean"])
    checkpoint = tmp_path / "trained" / "checkpoints" / "step_000001"
    assert preflight.resolve_model(str(tmp_path / "trained"), ROOT).endswith("step_000002")
    assert preflight.resolve_model(str(checkpoint), ROOT) == str(checkpoint)


def test_a_server_that_keeps_other_weights_is_found_out(server: FakeServer, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=5)
    server.add_fault(Fault("update_weights", apply="nothing"))
    done = command.run(*command.small(server), "mode=eval", f"model.path={other}", "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode == 1
    assert "LogprobsDiffer" in done.stderr
    assert command.load(tmp_path / "out" / "status.json")["state"] == "failed"
    assert command.lines(tmp_path / "out" / "evals.jsonl") == []


def empty_run(folder: Path) -> str:
    (folder / "run" / ".hydra").mkdir(parents=True)
    return str(folder / "run")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (lambda folder: ["mode=evaluate"], "mode='evaluate': expected train or eval"),
        (lambda folder: ["mode=eval", "resume=x"], r"resume=x: mode=eval has nothing to go on with; .*model\.path=x"),
        (lambda folder: ["mode=eval", "data.eval_rows=0"], r"data\.eval_rows=0: mode=eval has nothing to evaluate"),
        (
            lambda folder: ["mode=eval", f"model.path={empty_run(folder)}"],
            r"model\.path=.*: a run folder without a checkpoint",
        ),
        (lambda folder: ["mode=eval", "model.path=./nowhere"], r"model\.path=\./nowhere: no such directory"),
    ],
)
def test_mistakes_are_one_line(overrides: Callable[[Path], list[str]], line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        preflight.check(composed(*overrides(tmp_path)), ROOT)
    assert "\n" not in str(caught.value)


def test_the_plan_says_what_is_evaluated_and_nothing_of_training() -> None:
    plan = preflight.check(composed("mode=eval", "train.eval_samples=4", "train.eval_temperature=0.5"), ROOT)
    text = "\n".join(plan.lines())
    assert "evaluate  4 sample(s) a prompt at temperature 0.5" in text
    assert not re.search(r"^(batch|loss) ", text, re.MULTILINE)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_launched_vllm_evaluates_the_tiny_model(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    done = command.run(
        f"model.path={ROOT / 'models' / 'tiny'}", "mode=eval", "data.eval_rows=64", "hydra.run.dir=out", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (line,) = command.lines(tmp_path / "out" / "evals.jsonl")
    assert line["n"] == 64
    assert 0.15 < line["accuracy"] < 0.6  # the warm start is right in a third of its samples
