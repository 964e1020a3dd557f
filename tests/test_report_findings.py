"""The rules of the warnings box: each speaks on a run that has its fault, and all are silent on a sound one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from make_run import RunSpec, make_run

from grpo.report import findings
from grpo.report.findings import RULES
from grpo.report.run import run_data

Change = Callable[[dict[str, Any]], None]


def data_after(tmp_path: Path, change: Change | None = None, spec: RunSpec | None = None, **files: Change) -> Any:
    """`run_data` of a sound run after `change` edited each metrics line, and e.g. evals=... each evaluation."""
    folder = make_run(tmp_path / "run", spec or RunSpec(steps=40))
    for name, edit in {"metrics": change or sound, **files}.items():
        path = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            edit(row)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_data(folder)


def sound(row: dict[str, Any]) -> None:
    """Nothing wasted, lag below its bound."""
    row["lag/mean"] = 0.5 if row["step"] else 0.0
    row["tokens/trained"] += row["tokens/discarded"]
    row["tokens/discarded"] = 0


def found(data: Any) -> list[tuple[str, str, str]]:
    return [(f["level"], f["number"], f["plot"]) for f in data["findings"]]


def test_a_sound_run_has_no_finding(tmp_path: Path) -> None:
    data = data_after(tmp_path)
    assert found(data) == []
    assert data["notes"] == []
    assert data["rules"] == len(RULES) == 14


def test_the_ledger(tmp_path: Path) -> None:
    data = data_after(tmp_path, lambda row: row.update({"tokens/trained": row["tokens/trained"] - (row["step"] == 7)}))
    assert ("error", "1 of 40 lines", "ledger") in found(data)
    assert "first at step 7" in data["findings"][0]["text"]
    assert data["ledger_broken"] == 1


def test_the_staleness_bound(tmp_path: Path) -> None:
    data = data_after(tmp_path, lambda row: row.update({"lag/max": 2}) if row["step"] == 9 else None)
    assert ("error", "lag 2", "staleness") in found(data)


def test_the_staleness_bound_holds_for_each_rollout(tmp_path: Path) -> None:
    def late(row: dict[str, Any]) -> None:
        if row["group"] == 50:
            row["lag"], row["outcome"] = 3, "trained"

    assert ("error", "lag 3", "staleness") in found(data_after(tmp_path, rollouts=late))


@pytest.mark.parametrize(("dtype", "kl", "speaks"), [("float32", 1e-5, True), ("bfloat16", 1e-3, False)])
def test_engine_kl_is_judged_by_precision(tmp_path: Path, dtype: str, kl: float, speaks: bool) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=12))
    config = folder / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("float32", dtype))
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "lag_0/tokens": 10, "lag_0/kl": kl}) + "\n" for row in rows))
    assert (f"KL {kl:.2g} at lag 0" in [f["number"] for f in run_data(folder)["findings"]]) == speaks


def test_parameters_that_do_not_move(tmp_path: Path) -> None:
    data = data_after(tmp_path, spec=RunSpec(steps=12, zero_gradient=True))
    assert ("error", "0", "update") in found(data)


def test_parameters_that_do_not_move_though_there_is_a_gradient(tmp_path: Path) -> None:
    """A bfloat16 model with so small a rate that every change is rounded away."""

    def rounded(row: dict[str, Any]) -> None:
        row["update_size"] = 0.0

    assert ("error", "0", "update") in found(data_after(tmp_path, rounded))


def test_groups_without_signal(tmp_path: Path) -> None:
    data = data_after(tmp_path, spec=RunSpec(steps=12, dead_rewards=True))
    assert ("error", "100 % of groups", "completions") in found(data)


def test_an_evaluation_that_got_worse(tmp_path: Path) -> None:
    def worse(row: dict[str, Any]) -> None:
        row |= {"accuracy": 0.5, "low": 0.45, "high": 0.55} if row["step"] == 0 else {}
        row |= {"accuracy": 0.3, "low": 0.25, "high": 0.35} if row["step"] == 40 else {}

    assert ("error", "0.500 → 0.300", "learning") in found(data_after(tmp_path, evals=worse))


def test_reward_that_rises_alone(tmp_path: Path) -> None:
    def flat(row: dict[str, Any]) -> None:
        row |= {"accuracy": 0.4, "low": 0.3, "high": 0.5}

    [finding] = [f for f in data_after(tmp_path, evals=flat)["findings"] if f["plot"] == "learning"]
    assert finding["level"] == "warning"
    assert finding["number"].endswith("evaluation +0")


@pytest.mark.parametrize(("accuracy", "level"), [(0.6, "warning"), (0.93, "note")])
def test_entropy_collapse_is_a_note_where_the_task_is_solved(tmp_path: Path, accuracy: float, level: str) -> None:
    def collapse(row: dict[str, Any]) -> None:
        sound(row)
        row["entropy"] = 1.0 if row["step"] <= 4 else 0.05

    def result(row: dict[str, Any]) -> None:
        row["accuracy"] = accuracy if row["step"] else 0.3

    assert (level, "1 → 0.05 nats", "update") in found(data_after(tmp_path, collapse, evals=result))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"completion/truncated_fraction": 0.25}, ("warning", "25 % truncated", "completions")),
        ({"lag_1/ess": 0.4, "lag_1/tokens": 500}, ("warning", "ESS 0.40 at lag 1", "staleness")),
        ({"clip/fraction": 0.4}, ("warning", "40 % clipped", "staleness")),
        ({"lag/mean": 0.97}, ("note", "mean lag 0.97 of 1", "staleness")),
        ({"sampler/idle_fraction": 0.5}, ("warning", "sampler idle 50 %", "time")),
        (
            {"time/step_s": 1.0, "time/wait_rollouts_s": 0.4, "time/train_s": 0.4, "time/sync_s": 0.2},
            ("warning", "trainer idle 40 %", "time"),
        ),
        (
            {"time/step_s": 1.0, "time/wait_rollouts_s": 0.0, "time/train_s": 0.5, "time/sync_s": 0.3},
            ("note", "20 % of the time", "time"),
        ),
    ],
)
def test_levels_that_are_too_high(tmp_path: Path, values: dict[str, float], expected: tuple[str, str, str]) -> None:
    def change(row: dict[str, Any]) -> None:
        sound(row)
        row |= values

    data = data_after(tmp_path, change)
    assert found(data) == [expected]
    assert data["findings"][0]["text"]


def test_waste(tmp_path: Path) -> None:
    def wasted(row: dict[str, Any]) -> None:
        sound(row)
        row["tokens/masked"] = row["tokens/trained"] // 4
        row["tokens/trained"] -= row["tokens/masked"]

    [finding] = data_after(tmp_path, wasted)["findings"]
    assert finding["plot"] == "ledger"
    assert "loss.mask_truncated" in finding["knobs"]


def test_every_knob_is_a_key_of_the_configuration() -> None:
    conf = Path(__file__).parent.parent / "conf"
    keys: dict[str, set[str]] = {"train": set(yaml.safe_load((conf / "config.yaml").read_text())["train"])}
    for group in ("model", "data", "rollout", "loss", "sync"):
        files = [yaml.safe_load(path.read_text()) for path in (conf / group).glob("*.yaml")]
        keys[group] = {key for content in files for key in content}
    source = Path(findings.__file__).read_text()
    knobs = re.findall(r'"((?:train|model|data|rollout|loss|sync)\.\w+)"', source)
    assert len(set(knobs)) > 15
    assert [knob for knob in knobs if knob.split(".")[1] not in keys[knob.split(".")[0]]] == []


def test_every_finding_has_a_number_a_plot_on_the_page_and_a_knob(tmp_path: Path) -> None:
    """Of one run with nearly every fault. Bugs of the framework have no knob, unknown time has none either."""

    def faults(row: dict[str, Any]) -> None:
        row["entropy"] = 1.0 if row["step"] <= 4 else 0.01
        row |= {"completion/truncated_fraction": 0.5, "clip/fraction": 0.5, "lag/mean": 1.0, "lag/max": 2}
        row |= {"lag_0/tokens": 10, "lag_0/kl": 1.0, "lag_1/tokens": 500, "lag_1/ess": 0.1, "grad_norm": 0.0}
        row |= {"time/step_s": 1.0, "time/wait_rollouts_s": 0.5, "time/train_s": 0.1, "time/sync_s": 0.1}
        row |= {"sampler/idle_fraction": 0.9, "tokens/masked": row["tokens/generated"], "reward/mean": row["step"]}

    def worse(row: dict[str, Any]) -> None:
        row["accuracy"] = row["low"] = row["high"] = 0.5 - row["step"] / 1000

    data = data_after(tmp_path, faults, RunSpec(steps=40, dead_rewards=True), evals=worse)
    assert len(data["findings"]) == len(RULES) + 1  # idle: both sides
    script = (Path(findings.__file__).parent / "static" / "run.js").read_text()
    sections = set(re.findall(r'^    \["(\w+)", "', script, re.MULTILINE))
    assert len(sections) == 9
    for finding in data["findings"]:
        assert re.search(r"\d", finding["number"]), finding
        assert finding["plot"] in sections
        assert finding["knobs"] or "bug of the framework" in finding["text"] or "% of the time" in finding["number"]


def test_trends_need_steps(tmp_path: Path) -> None:
    def collapse(row: dict[str, Any]) -> None:
        sound(row)
        row["entropy"] = 1.0 if row["step"] == 1 else 0.01

    data = data_after(tmp_path, collapse, spec=RunSpec(steps=9))
    assert [f for f in data["findings"] if f["plot"] == "update"] == []
