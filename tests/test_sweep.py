"""Multiruns: a job that fails harms no other, what is finished is not run again, and the end says what happened."""

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import command
import pytest
from composed import composed
from fake_faults import Fault
from fake_server import FakeServer
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from grpo import checkpoint, cli, sweep
from grpo.claim import claim

# A job of it ends the process, as careless code does.
LOSSES = """
import sys
from grpo.losses import Reinforce

class Exits(Reinforce):
    def token_loss(self, tokens):
        sys.exit("a loss that exits")
"""
MENDED = """
from grpo.losses import Reinforce

class Exits(Reinforce):
    pass

class Missing(Reinforce):
    pass
"""
JOBS = "loss._target_=my_losses.Missing,grpo.losses.GRPO,my_losses.Exits,grpo.losses.Reinforce"


@pytest.fixture(autouse=True)
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process remembers of its sweep."""
    monkeypatch.setattr(sweep, "_folder", [])
    monkeypatch.setattr(sweep, "_failures", {})


def states(folder: Path) -> dict[str, str]:
    return {path.parent.name: command.load(path)["state"] for path in sorted(folder.glob("*/status.json"))}


def rows(output: str) -> list[list[str]]:
    """The table at the end: job, state, before, after, seconds, overrides."""
    found = [line.split() for line in output.splitlines()]
    start = found.index(["job", "state", "before", "after", "seconds", "overrides"])
    return [row for row in found[start + 1 :] if row and row[0].isdigit()]


def written(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_jobs_that_fail_harm_no_other_and_asking_again_runs_only_those(tmp_path: Path, server: FakeServer) -> None:
    """The first job is refused (there is no such loss), the third one exits in its first step."""
    (tmp_path / "my_losses.py").write_text(LOSSES)
    arguments = [*command.small(server), "-m", "train.steps=2", "train.checkpoint_every=1", "loss=reinforce", JOBS]
    arguments.append("hydra.sweep.dir=jobs")
    ended = command.run(*arguments, folder=tmp_path)
    jobs = tmp_path / "jobs"
    assert ended.returncode == 1, ended.stderr
    assert states(jobs) == {"0": "failed", "1": "finished", "2": "failed", "3": "finished"}
    for job, word in (("0", "my_losses.Missing"), ("2", "a loss that exits")):
        status = command.load(jobs / job / "status.json")
        assert word in status["error"]["message"]
        assert status["step"] == 0
        assert word in (jobs / job / "run.log").read_text()
        assert re.search(rf"^job {job}: .*{word}", ended.stderr, re.MULTILINE)
    assert "Traceback" in (jobs / "2" / "run.log").read_text()
    for job in ("1", "3"):
        assert len(command.lines(jobs / job / "metrics.jsonl")) == 2
        assert not re.search(rf"^job {job}:", ended.stderr, re.MULTILINE)
    assert [(row[0], row[1], row[-1]) for row in rows(ended.stdout)] == [
        ("0", "failed", "loss._target_=my_losses.Missing"),
        ("1", "finished", "loss._target_=grpo.losses.GRPO"),
        ("2", "failed", "loss._target_=my_losses.Exits"),
        ("3", "finished", "loss._target_=grpo.losses.Reinforce"),
    ]
    assert (jobs / "report.html").is_file()

    # The same again, with the losses mended: the finished ones are not run, nothing of theirs is written.
    (tmp_path / "my_losses.py").write_text(MENDED)
    before = {job: written(jobs / job) for job in ("1", "3")}
    requests = len(server.requests())
    ended = command.run(*arguments, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert states(jobs) == dict.fromkeys("0123", "finished")
    assert re.findall(r"job (\d): finished before, skipped", ended.stdout) == ["1", "3"]
    assert {job: written(jobs / job) for job in ("1", "3")} == before
    # per job: 2 evaluations of 4 prompts, 2 steps of 8 completions, and the proofs of the sync
    assert 48 <= len(server.requests()) - requests < 96
    for job in ("0", "2"):
        assert [line["step"] for line in command.lines(jobs / job / "metrics.jsonl")] == [1, 2]
        assert "error" not in (ended.stderr + ended.stdout).lower()


@pytest.mark.slow
def test_an_interrupted_sweep_stops_and_goes_on_where_it_was(tmp_path: Path, server: FakeServer) -> None:
    """Ctrl-C while job 0 waits for completions: its checkpoint is kept, and what it has made is not made again."""
    hang = server.add_fault(Fault("generate", after=4 + 3 * 8, hang=True))  # an evaluation and three steps go well
    arguments = [*command.small(server), "-m", "train.steps=5", "rollout.max_staleness=0", "sync.verify_every=0"]
    arguments += ["seed=0,1", "hydra.sweep.dir=jobs"]
    jobs = tmp_path / "jobs"
    with command.start(*arguments, folder=tmp_path) as process:
        server.wait_for(lambda s: hang.hits > 0 or process.poll() is not None, timeout=command.TIMEOUT)
        process.send_signal(signal.SIGINT)
        ended = command.finish(process)
    assert ended.returncode == 128 + signal.SIGINT, ended.stderr
    assert states(jobs) == {"0": "interrupted"}
    made = len(command.lines(jobs / "0" / "metrics.jsonl"))
    assert 1 <= made < 5
    assert rows(ended.stdout)[0][:2] == ["0", "interrupted"]
    assert f"hydra.sweep.dir={jobs}" in ended.stdout
    assert "Traceback" not in ended.stderr

    server.clear_faults()
    first = (jobs / "0" / "metrics.jsonl").read_text()
    ended = command.run(*arguments, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert states(jobs) == {"0": "finished", "1": "finished"}
    for job in ("0", "1"):
        assert [line["step"] for line in command.lines(jobs / job / "metrics.jsonl")] == [1, 2, 3, 4, 5]
        shown = [(r["group"], r["index"]) for r in command.lines(jobs / job / "rollouts.jsonl")]
        assert shown == [(group, index) for group in range(10) for index in range(4)]
    assert (jobs / "0" / "metrics.jsonl").read_text().startswith(first)
    assert command.load(jobs / "0" / "summary.json")["eval"]["held_out"]["before"]["step"] == 0


# ---- what a job's folder holds ----


def config(*overrides: str) -> tuple[DictConfig, HydraConf]:
    whole = composed(*overrides, hydra=True)
    return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"]), whole.hydra


def job(
    folder: Path, *overrides: str, state: str = "finished", step: int = 2, checkpoints: tuple[int, ...] = ()
) -> Path:
    with claim(folder, *config(*overrides), None, again=True):
        (folder / "status.json").write_text(json.dumps({"state": state, "step": step, "overrides": list(overrides)}))
        summary: dict[str, Any] = {"state": state, "reason": "why\nand more", "seconds": 61.4, "objective": 0.5}
        summary["eval"] = {"held_out": {"before": {"reward": 0.25}, "after": {"reward": None}}}
        (folder / "summary.json").write_text(json.dumps(summary))
        for made in checkpoints:
            (folder / "checkpoints" / f"step_{made:06d}").mkdir(parents=True)
    return folder


def test_an_empty_folder_is_a_new_job(tmp_path: Path) -> None:
    assert sweep.before(tmp_path / "0", config()[0]) == sweep.Before()
    (tmp_path / "run.log").touch()
    assert sweep.before(tmp_path, config()[0]) == sweep.Before()


def test_a_finished_job_is_skipped_wherever_its_server_is(tmp_path: Path) -> None:
    folder = job(tmp_path / "0", "rollout.urls=['http://a:1']")
    before = sweep.before(folder, config("rollout.urls=['http://a:2']")[0])
    assert before.summary is not None
    assert before.summary["objective"] == 0.5


def test_a_job_that_was_begun_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    for state in ("interrupted", "running", "failed"):
        folder = job(tmp_path / state, state=state, checkpoints=(2, 10))
        assert sweep.before(folder, config()[0]) == sweep.Before(checkpoint=folder / "checkpoints" / "step_000010")
        (folder / "checkpoints" / "step_000012.damaged").mkdir()  # put aside by an earlier resume
        assert sweep.before(folder, config()[0]) == sweep.Before(checkpoint=folder / "checkpoints" / "step_000010")
        bare = job(tmp_path / f"{state}-bare", state=state)
        assert sweep.before(bare, config()[0]) == sweep.Before()


def test_a_job_whose_checkpoints_are_all_damaged_says_what_to_delete_to_begin_anew(tmp_path: Path) -> None:
    """And what it says is true; until then nothing is touched."""
    folder = job(tmp_path / "0", state="interrupted", checkpoints=(2, 4))
    cfg, hydra = config()
    before = written(folder)
    named = (
        rf"step_000004: trainer.pt cannot be read \(FileNotFoundError\); .*: delete {folder}/checkpoints, and the same"
    )
    with pytest.raises(ValueError, match=named) as caught:
        cli.last_checkpoint(folder, 10)
    assert "resume from another checkpoint" not in str(caught.value)
    sweep.refuse(folder, cfg, hydra, caught.value)
    assert written(folder) == before
    shutil.rmtree(folder / "checkpoints")
    assert sweep.before(folder, cfg) == sweep.Before()
    with claim(folder, cfg, hydra, None, again=True):
        assert not (folder / "summary.json").exists()


def test_the_command_itself_says_it(tmp_path: Path, server: FakeServer) -> None:
    folder = job(tmp_path / "jobs" / "0", *command.small(server), state="interrupted", checkpoints=(2,))
    before = written(folder)
    ended = command.run(*command.small(server), "-m", "seed=0", "hydra.sweep.dir=jobs", folder=tmp_path)
    assert ended.returncode == 1
    told = re.findall(r"^job 0: .*", ended.stderr, re.MULTILINE)
    assert told[-1].endswith(f": delete {folder / 'checkpoints'}, and the same command begins the job anew")
    kept = {name: content for name, content in written(folder).items() if name in before}
    assert kept == before
    assert server.requests() == []


def test_a_job_with_nothing_left_to_make_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = job(tmp_path / "0", state="interrupted", checkpoints=(4,))
    monkeypatch.setattr(checkpoint, "inspect", lambda path: {"step": 4})
    assert cli.last_checkpoint(folder, 5) == folder / "checkpoints" / "step_000004"
    with pytest.raises(ValueError, match=r"has made 4 of train.steps=3") as caught:
        cli.last_checkpoint(folder, 3)
    assert "delete" not in str(caught.value)


def test_another_job_is_refused_and_nothing_of_it_changes(tmp_path: Path) -> None:
    """Also where only the configuration file differs, not the overrides."""
    folder = job(tmp_path / "0", "seed=1")
    cfg, hydra = config("seed=2")
    before = written(folder)
    with pytest.raises(
        sweep.OtherJob, match=r"holds a job with seed=1, not 2; choose another hydra.sweep.dir"
    ) as caught:
        sweep.before(folder, cfg)
    assert isinstance(sweep.refuse(folder, cfg, hydra, caught.value), sweep.JobFailed)
    assert written(folder) == before
    assert list(sweep._failures) == ["0"]
    (folder / "status.json").unlink()  # killed before it could say anything
    assert sweep.before(folder, cfg) == sweep.Before()


def test_a_mended_job_takes_the_place_of_one_that_made_no_step(tmp_path: Path) -> None:
    folder = job(tmp_path / "0", "model.lr=abc", state="failed", step=0)
    assert sweep.before(folder, config("model.lr=0.1")[0]) == sweep.Before()
    with pytest.raises(sweep.OtherJob):
        sweep.before(job(tmp_path / "1", "model.lr=0.2", state="failed", step=0, checkpoints=(1,)), config()[0])


def test_a_refused_job_leaves_its_reason_in_its_folder(tmp_path: Path) -> None:
    cfg, hydra = config("model.lr=abc", "train.steps=${nope}")
    failure = sweep.refuse(tmp_path / "3", cfg, hydra, ValueError("model.lr='abc': expected a finite number"))
    assert str(failure) == "job 3: model.lr='abc': expected a finite number"
    status = command.load(tmp_path / "3" / "status.json")
    assert (status["state"], status["overrides"]) == ("failed", ["model.lr=abc", "train.steps=${nope}"])
    assert status["error"]["message"] == "model.lr='abc': expected a finite number"
    assert OmegaConf.load(tmp_path / "3" / ".hydra" / "config.yaml").model.lr == "abc"


def test_a_job_refused_for_now_keeps_what_it_had(tmp_path: Path) -> None:
    """The hub or the server cannot be reached while a begun job is asked for again."""
    folder = job(tmp_path / "0", state="interrupted", checkpoints=(2,))
    before = written(folder)
    sweep.refuse(folder, *config(), ValueError("nothing answers"))
    assert written(folder) == before


def test_a_refused_job_of_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    sweep.refuse(tmp_path / "0", *config("dry_run=true"), ValueError("no"))
    assert list(tmp_path.iterdir()) == []


# ---- the end ----


def test_no_sweep_no_table() -> None:
    assert sweep.finish(None) is None


def test_the_table_has_what_differs_and_the_status_says_whether_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep._folder.append(tmp_path)
    for number in (0, 2, 10):
        job(tmp_path / str(number), "train.steps=3", f"data.reward=[{{kind: length, weight: {number}}}]")
    assert sweep.finish(None) == 0
    out, err = capsys.readouterr()
    lines = [line.rstrip().split(maxsplit=5) for line in out.splitlines()]
    assert lines[1] == ["0", "finished", "0.250", "-", "61", "data.reward=[{kind: length, weight: 0}]"]
    assert [line[0] for line in lines[1:4]] == ["0", "2", "10"]
    assert err == ""
    assert "not all jobs" not in out

    job(tmp_path / "11", "train.steps=3", state="failed")
    assert sweep.finish(sweep.JobFailed("job 11: why")) == 1
    assert capsys.readouterr().err == "job 11: why\n"


def test_an_interruption_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep._folder.append(tmp_path)
    job(tmp_path / "0", state="interrupted")
    assert sweep.finish(KeyboardInterrupt()) == 1
    assert f"hydra.sweep.dir={tmp_path}" in capsys.readouterr().out


def test_a_sweep_without_a_job_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "sweep"
    folder.mkdir(parents=True)
    (folder / "multirun.yaml").touch()
    sweep._folder.append(folder)
    assert sweep.finish(None) is None
    assert list(tmp_path.iterdir()) == []
