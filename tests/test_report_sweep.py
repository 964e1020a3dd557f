"""The sweep report's data: arms, intervals and differences by hand, failed and dead jobs said, links that hold."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from make_run import RunSpec, make_run, make_sweep
from test_report import page_data, texts

from grpo.report import build, build_run, build_sweep
from grpo.report.arms import mean_curve
from grpo.report.stats import Interval, mean_interval, paired_difference, pareto_front, t_quantile


def set_result(job: Path, accuracy: float) -> None:
    """Make `accuracy` the last evaluation of a job."""
    rows = [json.loads(line) for line in (job / "evals.jsonl").read_text().splitlines()]
    rows[-1]["accuracy"] = accuracy
    (job / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def small_sweep(folder: Path, results: dict[int, list[float]], **options: Any) -> Path:
    """Arms by staleness, a seed per result, in the order of jobs 0, 1, ..."""
    seeds = tuple(range(len(next(iter(results.values())))))
    make_sweep(folder, tuple(results), (8,), seeds, steps=12, **{"failed": (), **options})
    for job, accuracy in enumerate(x for values in results.values() for x in values):
        set_result(folder / str(job), accuracy)
    return folder


# ---- statistics, against tables and by hand ----


def test_t_quantiles_are_those_of_the_tables() -> None:
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 10: 2.22814, 30: 2.04227, 120: 1.97993}
    for df, value in table.items():
        assert t_quantile(0.975, df) == pytest.approx(value, rel=1e-5)


def test_interval_by_hand() -> None:
    # mean 0.8, s = 0.1, t(2) = 4.30265: 0.8 +- 4.30265 * 0.1 / sqrt(3)
    got = mean_interval([0.7, 0.8, 0.9])
    assert got is not None
    half = 4.302652729749 * 0.1 / math.sqrt(3)
    assert (got.mean, got.low, got.high, got.n) == pytest.approx((0.8, 0.8 - half, 0.8 + half, 3))
    assert mean_interval([0.5]) == Interval(0.5, None, None, 1)
    assert mean_interval([]) is None


def test_pairing_removes_what_seeds_share() -> None:
    a = {"0": 0.50, "1": 0.70, "2": 0.90}
    b = {"0": 0.55, "1": 0.74, "2": 0.96, "3": 0.1}
    difference = paired_difference(a, b)
    assert difference.interval is not None
    # differences 0.05, 0.04, 0.06: mean 0.05, s 0.01
    assert difference.interval.mean == pytest.approx(0.05)
    assert difference.interval.high == pytest.approx(0.05 + 4.302652729749 * 0.01 / math.sqrt(3))
    assert difference.separated
    assert not paired_difference(a, {"0": 0.9, "1": 0.4, "2": 0.9}).separated
    assert paired_difference(a, {"7": 0.9}).interval is None
    assert not paired_difference(a, {"0": 0.9}).separated  # one pair tells nothing


def test_differences_that_happen_to_be_equal_separate_nothing() -> None:
    """Two seeds, each two of 64 problems better: the interval has no width, and is no evidence."""
    difference = paired_difference({"0": 37 / 64, "1": 46 / 64}, {"0": 35 / 64, "1": 44 / 64})
    assert difference.interval is not None
    assert difference.interval.mean == pytest.approx(-2 / 64)
    assert not difference.separated


def test_pareto_front() -> None:
    #                 cheapest  best    worse     as dear   as good   nothing  equal to the first
    points = [(1, 0.5), (2, 0.9), (3, 0.8), (2, 0.7), (4, 0.9), None, (1, 0.5)]
    assert pareto_front(points) == [True, True, False, False, False, False, True]


def test_mean_curve_interpolates_in_the_common_range_only() -> None:
    curve = mean_curve([([0, 10], [0.0, 1.0]), ([2, 6, 14], [0.0, 0.4, 1.2])], points=5)
    assert curve == {
        "x": [2, 4, 6, 8, 10],
        "y": [0.1, 0.3, 0.5, 0.7, 0.9],
        "lo": [0.0, 0.2, 0.4, 0.6, 0.8],
        "hi": [0.2, 0.4, 0.6, 0.8, 1.0],
        "n": 2,
    }
    same = mean_curve([([0, 10], [0.0, 1.0]), ([0, 10], [0.5, None])], points=5)
    assert same is not None
    assert same["x"] == [0]
    assert mean_curve([([0, 1], [1.0, 1.0]), ([5, 6], [1.0, 1.0])], points=5) is None
    assert mean_curve([([], [])], points=5) is None


# ---- the page's data ----


def test_arms_are_jobs_that_differ_in_the_seed_alone(tmp_path: Path) -> None:
    data = page_data(build_sweep(make_sweep(tmp_path / "sweep", failed=())))
    assert data["knobs"] == ["rollout.max_staleness", "rollout.group_size"]
    assert data["shared"] == [["train.steps", "40"]]
    assert [arm["values"] for arm in data["arms"]] == [
        {"rollout.max_staleness": s, "rollout.group_size": g} for s in ("0", "1", "4") for g in ("4", "8")
    ]
    assert all(arm["seeds"] == ["0", "1", "2"] for arm in data["arms"])
    for arm, index in zip(data["arms"], range(6), strict=True):
        values = [job["after"]["value"] for job in data["jobs"] if job["arm"] == index]
        assert arm["result"]["mean"] == pytest.approx(sum(values) / 3)


def test_results_and_differences(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path / "sweep", {0: [0.90, 0.91, 0.92], 1: [0.89, 0.93, 0.88], 4: [0.50, 0.51, 0.53]})
    data = page_data(build_sweep(folder))
    assert data["best"] == 0
    assert [arm["result"]["mean"] for arm in data["arms"]] == pytest.approx([0.91, 0.90, 0.51333333])
    pairs = {(d["a"], d["b"]): d for d in data["differences"]}
    assert set(pairs) == {(0, 1), (0, 2), (1, 2)}
    assert not pairs[(0, 1)]["separated"]
    assert pairs[(0, 2)]["separated"]
    assert pairs[(0, 2)]["interval"]["mean"] == pytest.approx(-0.39666667)


def test_numeric_knobs_are_in_order_of_size(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for job, lr in enumerate(("1e-4", "5e-5", "0.001", "2e-5")):
        make_run(folder / str(job), RunSpec(steps=3, overrides=(f"model.lr={lr}", "seed=0")))
    data = page_data(build(folder))
    assert [arm["values"]["model.lr"] for arm in data["arms"]] == ["2e-5", "5e-5", "1e-4", "0.001"]
    assert "one seed an arm" in texts(data)


def test_jobs_are_in_order_of_number(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for job in (10, 9, 2):
        make_run(folder / str(job), RunSpec(steps=2, seed=job, overrides=(f"seed={job}",)))
    assert [job["path"] for job in page_data(build_sweep(folder))["jobs"]] == ["2", "9", "10"]


def test_a_default_given_by_name_is_no_knob(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    make_run(folder / "0", RunSpec(steps=2, overrides=("seed=0", "loss.clip_low=0.2", "loss=ppo_clip")))
    make_run(folder / "1", RunSpec(steps=2, overrides=("seed=1",)))
    data = page_data(build_sweep(folder))
    assert data["knobs"] == []
    assert [arm["seeds"] for arm in data["arms"]] == [["0", "1"]]


def test_failed_jobs_are_in_no_mean_and_are_said(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path / "sweep", {0: [0.9, 0.9, 0.1], 1: [0.8, 0.8, 0.8]}, failed=(2,))
    data = page_data(build_sweep(folder))
    first = data["arms"][0]
    assert (first["result"]["mean"], first["result"]["n"], first["missing"]) == (pytest.approx(0.9), 2, 1)
    assert "1 of 6 jobs are not finished (1 failed)" in texts(data)
    assert "arms have not the same finished seeds (2 to 3 of them)" in texts(data)
    assert "127.0.0.1:8000 does not answer" in data["jobs"][2]["error"]


def test_dead_arms_are_flagged(tmp_path: Path) -> None:
    folder = small_sweep(tmp_path / "sweep", {0: [0.9, 0.9], 1: [0.3, 0.3], 4: [0.8, 0.8]}, dead=(2, 3), failed=(4, 5))
    data = page_data(build_sweep(folder))
    assert [arm["flags"] for arm in data["arms"]] == [[], ["parameters did not move"], ["no job finished"]]
    assert "dead arm: rollout.max_staleness=1, rollout.group_size=8: parameters did not move" not in texts(data)
    assert "dead arm: rollout.max_staleness=1: parameters did not move" in texts(data)


def test_an_arm_whose_updates_are_rounded_away_is_dead(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "sweep" / "0", RunSpec(steps=3, overrides=("seed=0", "loss=grpo"))).parent
    metrics = folder / "0" / "metrics.jsonl"
    lines = [json.loads(line) | {"update_size": 0.0} for line in metrics.read_text().splitlines()]
    assert all(line["grad_norm"] > 0 for line in lines)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert page_data(build_sweep(folder))["arms"][0]["flags"] == ["parameters did not move"]


def test_all_rewards_equal_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for seed in (0, 1):
        overrides = (f"seed={seed}", "loss=grpo")
        make_run(folder / str(seed), RunSpec(steps=3, seed=seed, dead_rewards=True, overrides=overrides))
    assert page_data(build_sweep(folder))["arms"][0]["flags"] == ["all rewards equal"]


def test_the_same_seed_twice_stays_apart(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    for job in range(3):
        make_run(folder / str(job), RunSpec(steps=2, overrides=("seed=0",)))
    assert page_data(build_sweep(folder))["arms"][0]["seeds"] == ["0", "0 (2)", "0 (3)"]


def test_links_only_to_reports_that_exist(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "a sweep", (0, 1), (4,), (0,), failed=(), steps=5)
    (folder / "1").rename(folder / "b c&d")
    build_run(folder / "b c&d")
    jobs = {job["path"]: job["href"] for job in page_data(build_sweep(folder))["jobs"]}
    assert jobs == {"0": None, "b c&d": "b%20c%26d/report.html"}


def test_time_counts_from_the_first_step(tmp_path: Path) -> None:
    """The job that starts the server and the one that finds it running have the same training time."""
    folder = tmp_path / "sweep"
    for job, start in enumerate((100.0, 1.0)):
        run = make_run(folder / str(job), RunSpec(steps=5, overrides=(f"loss.clip_low=0.{job + 1}", "seed=0")))
        clock = [{"step": s, "time/step_s": 2.0, "time/elapsed_s": start + 2 * s} for s in (1, 2, 3)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in clock))
        evals = [{"step": s, "accuracy": 0.5, "time/elapsed_s": start + 2 * s - 0.5 * (s == 0)} for s in (0, 3)]
        (run / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    data = page_data(build_sweep(folder))
    assert [job["seconds"] for job in data["jobs"]] == [6.0, 6.0]
    assert [curve["x"] for curve in data["curves"]["eval"]["seconds"]] == [[0, 6], [0, 6]]


def test_without_evaluations_the_reward_decides_and_the_page_says_so(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "sweep", (0, 1), (4,), (0, 1), failed=(), steps=10)
    for job in folder.iterdir():
        if job.is_dir():
            (job / "evals.jsonl").unlink()
            (job / "summary.json").unlink()
    data = page_data(build_sweep(folder))
    assert data["result"] == "training reward at the end (no evaluation recorded)"
    rows = [json.loads(line) for line in (folder / "0" / "metrics.jsonl").read_text().splitlines()]
    other = [json.loads(line) for line in (folder / "1" / "metrics.jsonl").read_text().splitlines()]
    assert data["arms"][0]["result"]["mean"] == pytest.approx((rows[-1]["reward/mean"] + other[-1]["reward/mean"]) / 2)


def test_broken_jobs_do_not_stop_it(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path / "sweep", (0, 1), (4,), (0, 1), failed=(), steps=5)
    (folder / "0" / "metrics.jsonl").write_text("not json\n{")
    (folder / "1" / "status.json").write_text("{")
    (folder / "2" / ".hydra" / "overrides.yaml").write_text("[a: !!python/object:x {]")
    (folder / "9").mkdir()
    data = page_data(build_sweep(folder))
    assert [job["state"] for job in data["jobs"]] == ["finished", "unknown", "finished", "finished"]
    assert data["jobs"][0]["flags"] == ["no step"]
    assert data["jobs"][0]["damage"] == ["metrics.jsonl: 1 line is unreadable (the first is line 1) and missing here"]


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    assert texts(page_data(build_sweep(tmp_path))) == "there is no run in this folder"


def test_many_jobs_stay_under_three_megabytes(tmp_path: Path) -> None:
    template = make_run(tmp_path / "template", RunSpec(steps=60))
    for job in range(300):
        folder = tmp_path / "sweep" / str(job)
        (folder / ".hydra").mkdir(parents=True)
        for name in ("metrics.jsonl", "evals.jsonl", "status.json"):
            (folder / name).symlink_to(template / name)
        (folder / ".hydra" / "overrides.yaml").write_text(f"- model.lr={1e-6 * (job + 1):.3g}\n- seed=0\n")
    page = build_sweep(tmp_path / "sweep")
    assert page.stat().st_size < 3_000_000
    assert len(page_data(page)["arms"]) == 300
