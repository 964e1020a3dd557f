"""The run report's data: numbers equal the files', damage is said, hostile text stays text, size is bounded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_run import HOSTILE, RunSpec, make_empty, make_hostile, make_huge, make_run

from grpo.report import build, build_run
from grpo.report.__main__ import main
from grpo.report.page import to_json
from grpo.report.rollouts import clip, strangeness
from grpo.report.run import run_data
from grpo.report.series import Series

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_data(page: Path) -> dict[str, Any]:
    """The data as a browser would read it."""
    found = DATA.search(page.read_text("utf-8"))
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(data: dict[str, Any]) -> str:
    return "\n".join(note["text"] for note in data["notes"])


def rewrite(path: Path, change: Any) -> None:
    """change(line) edits each line of a .jsonl file in place."""
    rows = lines(path)
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- numbers ----


def test_curves_are_the_lines_of_metrics_jsonl(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    data = page_data(build_run(folder))
    recorded = lines(folder / "metrics.jsonl")
    keys = {key for line in recorded for key in line if key != "drift" and not key.endswith("ratio_mean")}
    assert set(data["series"]["columns"]) == keys
    for key, values in data["series"]["columns"].items():
        assert values == [line.get(key) for line in recorded], key
    assert data["series"]["width"] == 1
    assert data["findings"] == [f for f in data["findings"] if f["level"] != "error"]


def test_headline_is_first_and_last_evaluation_and_the_ledger(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    data = page_data(build_run(folder))
    evals, last = lines(folder / "evals.jsonl"), lines(folder / "metrics.jsonl")[-1]
    for when, line in (("before", evals[0]), ("after", evals[-1])):
        got = data["headline"][when]
        assert [got[key] for key in ("value", "low", "high", "n", "step")] == [
            line[key] for key in ("accuracy", "low", "high", "n", "step")
        ]
    spent = sum(
        line[f"time/{part}_s"]
        for line in lines(folder / "metrics.jsonl")
        for part in ("wait_rollouts", "train", "sync")
    )
    assert data["headline"]["tokens_per_s"] == pytest.approx(last["tokens/generated"] / spent)
    accounts = {account: last[f"tokens/{account}"] for account in ("generated", "trained", "masked", "discarded")}
    assert data["ledger"] == {**accounts, "in_flight": last["tokens/in_flight"], "missing": 0}
    assert data["ledger_broken"] == 0


def test_one_evaluation_is_no_improvement(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=3))
    first = (folder / "evals.jsonl").read_text().splitlines(keepends=True)[0]
    (folder / "evals.jsonl").write_text(first)
    data = page_data(build_run(folder))
    assert data["headline"]["before"]["value"] == json.loads(first)["accuracy"]
    assert data["headline"]["after"] is None


def test_counts_are_over_every_rollout_and_agree_with_the_ledger(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    data = page_data(build_run(folder))
    rows = lines(folder / "rollouts.jsonl")
    assert data["counts"]["completions"] == len(rows) == data["rollout_rows"]
    assert data["counts"]["groups"] == 60 * 4
    equal = sum(row["advantage"] is None for row in rows) / 8
    assert data["counts"]["zero_variance"] == equal
    assert data["counts"]["outcome_tokens"]["trained"] == data["ledger"]["trained"]
    shown = {(row["step"], group["group"], row["index"]): row for group in data["groups"] for row in group["rows"]}
    for row in rows:
        got = shown[(row["step"], row["group"], row["index"])]
        assert [got[key] for key in ("completion", "reward", "advantage", "lag", "tokens")] == [
            row[key] for key in ("completion", "reward", "advantage", "lag", "tokens")
        ]


def test_figures_by_lag_are_weighted_by_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    metrics = [
        {"step": 1, "lag_1/tokens": 100, "lag_1/kl": 0.1, "lag_1/ratio_min": 0.5, "lag_1/ratio_max": 1.5},
        {"step": 2, "lag_1/tokens": 300, "lag_1/kl": 0.3, "lag_1/ratio_min": 0.9, "lag_1/ratio_max": 1.1},
        {"step": 3, "lag_0/tokens": 50, "lag_0/kl": 0.0, "lag_1/tokens": 0, "lag_1/kl": 7.0},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    assert page_data(build_run(folder))["lags"] == {
        "0": {"tokens": 50, "kl": 0.0},
        "1": {"tokens": 400, "kl": pytest.approx(0.25), "ratio_min": 0.5, "ratio_max": 1.5},
    }


def test_overlap_is_what_busy_and_training_exceed_the_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"step": 1, "time/step_s": 10.0, "time/wait_rollouts_s": 2.0, "time/train_s": 6.0, "time/sync_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps({**line, "sampler/idle_fraction": 0.1}) + "\n")
    data = page_data(build_run(folder))
    assert data["overlap_s"] == pytest.approx(5.0)  # busy 9 s and training 6 s within 10 s
    assert data["idle"] == {"trainer": pytest.approx(2 / 9), "sampler": pytest.approx(0.1)}
    assert data["time"] == {"wait_rollouts": 2.0, "train": 6.0, "sync": 1.0, "other": pytest.approx(1.0)}


def test_the_idle_sampler_is_that_of_the_closing_table(tmp_path: Path) -> None:
    """A step's share is of the time since the last line; weighted by steps it forgets the evaluations between them."""
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"step": 1, "time/step_s": 10.0, "time/wait_rollouts_s": 2.0, "time/train_s": 6.0, "time/sync_s": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps({**line, "sampler/idle_fraction": 0.1}) + "\n")
    for resumed_at, sampler in ((None, 0.3), (0, 0.1)):
        summary = {"resumed_at": resumed_at, "idle": {"trainer": 0.9, "sampler": 0.3}}
        (folder / "summary.json").write_text(json.dumps(summary))
        assert page_data(build_run(folder))["idle"] == pytest.approx({"trainer": 2 / 9, "sampler": sampler})


def test_the_clock_of_a_resumed_run_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    clock = [(1, 5.0), (2, 10.0), (3, 4.0), (4, 8.0)]  # resumed after step 2
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "time/elapsed_s": s}) + "\n" for step, s in clock)
    )
    evals = [(0, 1.0), (2, 9.0), (2, 1.5), (4, 7.0)]
    (folder / "evals.jsonl").write_text(
        "".join(json.dumps({"step": step, "accuracy": 0.5, "time/elapsed_s": s}) + "\n" for step, s in evals)
    )
    data = page_data(build_run(folder))
    assert data["series"]["columns"]["time/elapsed_s"] == [5.0, 10.0, 14.0, 18.0]
    assert [e["seconds"] for e in data["evals"]["eval"]] == [1.0, 9.0, 11.5, 17.0]
    assert "started again at step 3" in texts(data)


def test_merged_points_keep_means_and_extremes() -> None:
    series = Series(limit=4)
    for step in range(1, 11):
        series.add({"step": step, "x": float(step), "tokens/trained": 10 * step, "spike": 99.0 if step == 6 else 0.0})
    columns = series.columns()
    assert columns["width"] == 4
    assert columns["lines"] == 10
    assert columns["columns"]["step"] == [4, 8, 10]
    assert columns["columns"]["tokens/trained"] == [40, 80, 100]
    assert columns["columns"]["x"] == [2.5, 6.5, 9.5]
    assert columns["hi"]["spike"] == [0.0, 99.0, 0.0]
    assert series.total("x") == 55
    assert series.mean("x") == 5.5


@given(st.integers(1, 200), st.integers(2, 9))
def test_merging_loses_no_line(n: int, limit: int) -> None:
    series = Series(limit=limit)
    for step in range(n):
        series.add({"step": step, "x": float(step)})
    assert len(series.points) <= limit
    assert series.total("x") == n * (n - 1) / 2
    counts = [point["x"].count for point in series.points]
    assert all(count == series.width for count in counts[:-1])
    assert counts[-1] <= series.width


# ---- the sample of rollouts ----


def test_extremes_are_in_and_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = lines(folder / "rollouts.jsonl")
    rows[100] |= {"reward": 7.0, "completion": "the best"}
    rows[200] |= {"reward": -7.0, "completion": "the worst"}
    rows[300] |= {"tokens": 9999, "completion": "the longest"}
    rows[400] |= {"completion": "strange \u202e\x00 one"}
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    why = {
        row["completion"]: row["why"]
        for group in page_data(build_run(folder))["groups"]
        for row in group["rows"]
        if "why" in row
    }
    assert why["the best"] == ["best"]
    assert why["the worst"] == ["worst"]
    assert why["the longest"] == ["longest"]
    assert why["strange \u202e\x00 one"] == ["strange: 2 control or invisible characters"]


def test_groups_of_one_number_and_step_stay_apart(tmp_path: Path) -> None:
    rows = [{"step": 1, "group": 1, "index": 0, "prompt": p, "completion": p * 2, "reward": 1.0} for p in "abbb"]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = page_data(build_run(tmp_path))["groups"]
    assert [(group["prompt"], [row["completion"] for row in group["rows"]]) for group in groups] == [
        ("a", ["aa"]),
        ("b", ["bb", "bb", "bb"]),
    ]


def test_strangeness_tells_loops_and_unscored_from_prose() -> None:
    assert strangeness({"completion": "First add the digits, then take the last one. " * 3, "reward": 1.0}) == (0.0, "")
    assert strangeness({"completion": "na " * 300, "reward": 0.0})[1].startswith("repeats itself")
    assert strangeness({"completion": "x", "reward": None})[1] == "not scored"
    assert strangeness({"completion": "", "reward": 0.0, "finish_reason": "stop"})[1] == "empty"
    dropped = {"completion": "", "reward": None, "tokens": 0, "finish_reason": None}
    assert strangeness(dropped) < strangeness({"completion": "", "reward": 0.0}), "others go first"
    assert strangeness({"completion": "x", "log_ratio": -6.0})[1] == "log-ratio -6.0 at one token"


def test_a_completion_that_is_trained_twice_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=5))
    rows = lines(folder / "rollouts.jsonl")
    again = [row for row in rows if row["outcome"] == "trained"][:8]
    with (folder / "rollouts.jsonl").open("a") as file:
        file.writelines(json.dumps({**row, "step": 6}) + "\n" for row in again)
    assert "8 completions are trained a second time" in texts(page_data(build_run(folder)))


def test_long_texts_keep_head_and_tail() -> None:
    head, cut, tail = clip("a" * 5000 + "z" * 5000)
    assert len(head) + cut + len(tail) == 10_000
    assert set(head) == {"a"}
    assert set(tail) == {"z"}
    assert clip("short") == "short"


# ---- broken and hostile folders ----


def test_nothing_but_a_folder(tmp_path: Path) -> None:
    data = page_data(build_run(tmp_path))
    assert data["status"]["state"] == "unknown"
    assert data["findings"] == []
    assert "there is no metrics.jsonl" in texts(data)


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    data = page_data(build_run(make_empty(tmp_path / "run")))
    assert data["status"]["state"] == "running"
    assert data["status"]["step"] == 0
    assert data["notes"] == []


def test_a_cut_last_line_is_a_note_and_a_bad_line_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=6))
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert [(n["level"], n["text"]) for n in page_data(build_run(folder))["notes"]] == [
        ("note", "metrics.jsonl: the last line is cut off and left out")
    ]
    rows = whole.splitlines(keepends=True)
    path.write_text("".join([*rows[:2], rows[2][:50] + "\n", *rows[3:]]))
    data = page_data(build_run(folder))
    assert [(n["level"], n["text"]) for n in data["notes"]] == [
        ("error", "metrics.jsonl: 1 line is unreadable (the first is line 3) and missing here")
    ]
    assert data["series"]["columns"]["step"] == [1, 2, 4, 5, 6]


def test_a_step_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=6))
    text = (folder / "metrics.jsonl").read_text()
    for again in (4, 6):  # a step gone back to, and the last one twice
        (folder / "metrics.jsonl").write_text(text + text.splitlines(keepends=True)[again - 1])
        note = f"the step does not increase on 1 line (the first is step {again})"
        assert note in texts(page_data(build_run(folder)))


def test_null_gradients_are_said_and_null_by_design_is_not(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=6))
    rewrite(folder / "metrics.jsonl", lambda row: row.update(grad_norm=None if row["step"] > 4 else 1.0))
    data = page_data(build_run(folder))
    assert texts(data) == "grad_norm is no finite number on 2 lines, first at step 5"  # "drift": null is not there
    assert data["series"]["columns"]["grad_norm"] == [1.0, 1.0, 1.0, 1.0, None, None]


def test_hostile_text_cannot_leave_its_element(tmp_path: Path) -> None:
    folder = make_hostile(tmp_path / "run")
    page = build_run(folder)
    html = page.read_text("utf-8")
    found = DATA.search(html)
    assert found is not None
    assert not re.search(r"[<>&]|[^\x20-\x7f]", found[1])
    assert html.count("</script>") == 2
    assert html.count("<script") == 2
    data = page_data(page)
    shown = [row["completion"] for group in data["groups"] for row in group["rows"]]
    for text in HOSTILE:
        assert clip(text) in shown
    assert HOSTILE[1] in data["status"]["command"]
    assert "rollouts.jsonl: 3 lines are unreadable" in texts(data)
    assert page.stat().st_size < 3_000_000


def test_oversized_fields_do_not_oversize_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    long = "<" * 300_000
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": s, long[:999]: 1.0, **{f"key {k} <": s / 7 for k in range(400)}, f"lag_{s}/kl": 1.0})
            + "\n"
            for s in range(900)
        )
    )
    (folder / "rollouts.jsonl").write_text(
        "".join(json.dumps({"step": s, "group": s, "prompt": long, "completion": long}) + "\n" for s in range(60))
    )
    (folder / "evals.jsonl").write_text(
        "".join(json.dumps({"name": f"{s} {long[:999]}", "step": s, "accuracy": 1 / 3}) + "\n" for s in range(20)) * 200
    )
    status = {"error": {"traceback": long}, "packages": {str(k): long for k in range(400)}, "command": long}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / ".hydra" / "overrides.yaml").write_text("".join(f"- a{k}={long}\n" for k in range(200)))
    (folder / ".hydra" / "config.yaml").write_text(long)
    assert build_run(folder).stat().st_size < 3_000_000


def test_text_is_escaped_byte_for_byte() -> None:
    assert to_json("</script>&\u2028\x00\ud800é") == r'"\u003c/script\u003e\u0026\u2028\u0000\ud800\u00e9"'


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["NaN", 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
METRIC_KEYS = ["step", "time/elapsed_s", "time/step_s", "tokens/generated", "tokens/trained", "reward/mean", "entropy"]
METRIC_KEYS += ["lag_0/tokens", "lag_0/kl", "lag_1/ess", "grad_norm", "sampler/idle_fraction", "lag/max", "lr"]
ROLLOUT_KEYS = ["step", "group", "index", "prompt", "completion", "reward", "rewards", "advantage", "version_first"]
ROLLOUT_KEYS += ["lag", "tokens", "finish_reason", "outcome", "turns", "log_ratio"]
EVAL_KEYS = ["step", "name", "accuracy", "low", "high", "n", "time/elapsed_s"]
STATUS_KEYS = ["state", "step", "steps", "started", "ended", "git", "packages", "error", "command", "overrides"]
SUMMARY_KEYS = ["eval", "idle", "time", "tokens", "seconds"]


def objects(keys: list[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.dictionaries(st.sampled_from(keys), Json, max_size=len(keys)), max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    objects(METRIC_KEYS),
    objects(ROLLOUT_KEYS),
    objects(EVAL_KEYS),
    objects(STATUS_KEYS),
    objects(SUMMARY_KEYS),
    st.binary(max_size=30),
)
def test_no_content_makes_it_raise(
    tmp_path: Path,
    metrics: list[dict[str, Any]],
    rollouts: list[dict[str, Any]],
    evals: list[dict[str, Any]],
    status: list[dict[str, Any]],
    summary: list[dict[str, Any]],
    junk: bytes,
) -> None:
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    for name, rows in (("metrics", metrics), ("rollouts", rollouts), ("evals", evals)):
        body = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (folder / f"{name}.jsonl").write_bytes(body + junk)
    for name, rows in (("status", status), ("summary", summary)):
        (folder / f"{name}.json").write_text(json.dumps(rows[0]) if rows else "{")
    for name in ("config", "overrides", "hydra"):
        (folder / ".hydra" / f"{name}.yaml").write_bytes(junk)
    page_data(build_run(folder))
    page_data(build(tmp_path))


# ---- size, purity, command line ----


@pytest.mark.slow
def test_a_huge_run_stays_under_three_megabytes_and_says_what_it_samples(tmp_path: Path) -> None:
    folder = make_huge(tmp_path / "run")
    page = build_run(folder)
    assert page.stat().st_size < 3_000_000
    data = page_data(page)
    assert data["counts"]["completions"] == 200_000
    assert 1000 < data["rollout_rows"] < 200_000
    assert data["series"]["lines"] == 10_000
    assert data["series"]["width"] == 16
    assert "a point is the mean of 16 steps" in texts(data)
    last = lines(folder / "metrics.jsonl")[-1]
    assert data["ledger"]["trained"] == last["tokens/trained"] == data["counts"]["outcome_tokens"]["trained"]


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    first, second = run_data(folder), run_data(folder)
    assert {**first, "built": ""} == {**second, "built": ""}


def test_the_page_names_no_address(tmp_path: Path) -> None:
    html = build_run(make_run(tmp_path / "run", RunSpec(steps=3))).read_text()
    addresses = re.findall(r"""(?:https?:|src=|url\(|@import|//[a-z])[^\s"')]*""", DATA.sub("", html))
    assert [address for address in addresses if address != "http://www.w3.org/2000/svg"] == []
    assert "default-src 'none'" in html


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", RunSpec(steps=3))
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    (tmp_path / "nothing").mkdir()
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no run (status.json, metrics.jsonl, .hydra/)" in capsys.readouterr().err


def test_torch_is_not_imported() -> None:
    code = "import sys, grpo.report, grpo.runs; print([m for m in ('torch', 'hydra', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
