"""A run folder holds one run, held by one process, and what may not be continued is not touched."""

import json
import logging
import re
import signal
from pathlib import Path

import pytest
from checkpoints import readable
from composed import composed
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from grpo import checksums
from grpo.checkpoint_folder import complete
from grpo.claim import claim, differences, discard, forget_after, note_end, task_overrides
from grpo.signals import Interrupted


def config(*overrides: str) -> tuple[DictConfig, HydraConf]:
    whole = composed(*overrides, hydra=True)
    return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"]), whole.hydra


def begun(folder: Path, *overrides: str, checkpoints: tuple[int, ...] = ()) -> Path:
    """A folder with a run that was begun, has made these checkpoints, and is over."""
    with claim(folder, *config(*overrides), None, again=False):
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')
        for step in checkpoints:
            readable(folder / "checkpoints" / f"step_{step:06d}", step)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_claimed_folder_has_the_configuration_and_what_the_user_changed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "loss=gspo", "model.lr=3e-4", "dry_run=true", "resume=/x")
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    assert isinstance(saved, DictConfig)
    assert saved.model.lr == 3e-4
    assert OmegaConf.to_container(saved, resolve=False)["loss"]["max_tokens"] == "${data.max_tokens}"  # type: ignore[index, call-overload]
    assert list(OmegaConf.load(folder / ".hydra" / "overrides.yaml")) == ["loss=gspo", "model.lr=3e-4"]
    assert OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.job.config_name == "config"
    assert (folder / ".hydra" / "hydra.yaml").read_text().count("\n      loss: gspo\n") == 1  # what the report reads


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "model.lr=1e-4", checkpoints=(1,))
    before = contents(folder)
    with (
        pytest.raises(ValueError, match=r"run: holds a run already; go on with it \(resume=.*/run\), or choose"),
        claim(folder, *config("model.lr=1e-5"), None, again=False),
    ):
        pytest.fail("it was claimed")
    assert contents(folder) == before


def test_a_run_that_is_going_on_is_not_continued_by_another_process(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", checkpoints=(1,))
    checkpoint = folder / "checkpoints" / "step_000001"
    with claim(folder, *config(), checkpoint, again=False):
        before = contents(folder)
        with (
            pytest.raises(ValueError, match="a run is going on there"),
            claim(folder, *config("model.lr=1e-5"), checkpoint, again=False),
        ):
            pytest.fail("it was claimed")
        with pytest.raises(ValueError, match="a run is going on there"), claim(folder, *config(), None, again=True):
            pytest.fail("it was claimed")
        assert contents(folder) == before
    with claim(folder, *config(), checkpoint, again=False):  # it has ended, so it may go on
        pass


def test_the_lock_ends_with_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), claim(tmp_path / "run", *config(), None, again=False):
        raise RuntimeError
    with claim(tmp_path / "run", *config(), None, again=True):
        pass


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed=1: .* has seed=0"),
        ("rollout.group_size=8", "rollout.group_size=8: .* has rollout.group_size=16"),
        ("train.batch_size=64", "train.batch_size=64: .* has train.batch_size=128"),
        ("model.path=/other", "model.path=/other: .* has model.path=models/tiny"),
        ("model.lora_rank=4", "model.lora_rank=4: .* has model.lora_rank=0"),
        ("model.lora_targets=[q_proj]", r"model.lora_targets=\['q_proj'\]"),
        ("model.weight_decay=0.1", "model.weight_decay=0.1: .* has model.weight_decay=0.0"),
        ("model.betas=[0.9,0.95]", r"model.betas=\[0.9, 0.95\]"),
    ],
)
def test_what_a_checkpoint_counts_in_or_restores_cannot_change(tmp_path: Path, override: str, key: str) -> None:
    folder = begun(tmp_path / "run", checkpoints=(1, 2))
    before = contents(folder)
    with (
        pytest.raises(ValueError, match=f"{key}.*, and cannot go on with another"),
        claim(folder, *config(override), folder / "checkpoints" / "step_000001", again=False),
    ):
        pytest.fail("it was claimed")
    assert contents(folder) == before


def test_resume_force_goes_on_with_another_order_but_never_with_another_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path / "run", checkpoints=(1,))
    checkpoint = folder / "checkpoints" / "step_000001"
    with (
        pytest.raises(ValueError, match=r"resume_force=true goes on"),
        claim(folder, *config("seed=1"), checkpoint, again=False),
    ):
        pytest.fail("it was claimed")
    with (
        pytest.raises(ValueError, match=r"model.dtype=.*cannot go on"),
        claim(folder, *config("model.dtype=bfloat16", "resume_force=true"), checkpoint, again=False),
    ):
        pytest.fail("it was claimed")
    with claim(folder, *config("seed=1", "train.batch_size=64", "resume_force=true"), checkpoint, again=False):
        assert "seed: 0 before, 1 now" in caplog.text
        assert "train.batch_size: 128 before, 64 now" in caplog.text
    assert "resume_force" not in (folder / ".hydra" / "overrides.yaml").read_text()


def test_a_run_older_than_a_key_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", checkpoints=(1,))
    file = folder / ".hydra" / "config.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "lora_" not in line))
    with claim(folder, *config(), folder / "checkpoints" / "step_000001", again=False) as go_on:
        go_on()
    assert "lora_rank: 0" in file.read_text()


@pytest.mark.parametrize("override", ["model.lora_rank=4", "model.lora_targets=[q_proj]"])
def test_a_run_older_than_lora_went_without(tmp_path: Path, override: str) -> None:
    folder = begun(tmp_path / "run", checkpoints=(1,))
    file = folder / ".hydra" / "config.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "lora_" not in line))
    with (
        pytest.raises(ValueError, match=f"{re.escape(override.split('=')[0])}=.* cannot go on with another"),
        claim(folder, *config(override), folder / "checkpoints" / "step_000001", again=False),
    ):
        pytest.fail("it was claimed")
    assert "lora_" not in file.read_text()


def test_other_settings_may_change_and_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = begun(tmp_path / "run", "train.steps=4", "model.lr=1e-4", checkpoints=(2,))
    changed = config("train.steps=9", "model.lr=1e-5", "rollout.urls=['http://a:1']", "resume=/x")
    checkpoint = folder / "checkpoints/step_000002"
    with caplog.at_level(logging.WARNING), claim(folder, *changed, checkpoint, again=False) as go_on:
        assert OmegaConf.load(folder / ".hydra" / "config.yaml").train.steps == 4, "the run may still be refused"
        go_on()
    assert [record.getMessage() for record in caplog.records] == [
        "resumed with another setting: train.steps: 4 before, 9 now",
        "resumed with another setting: model.lr: 0.0001 before, 1e-05 now",
    ]
    assert OmegaConf.load(folder / ".hydra" / "config.yaml").train.steps == 9
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'  # the recorder cuts it back


def test_checkpoints_after_the_one_that_is_resumed_are_of_another_timeline(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", checkpoints=(2, 4, 6)) / "checkpoints"
    (folder / "latest").write_text("step_000006\n")
    with claim(folder.parent, *config(), folder / "step_000004", again=False) as go_on:
        assert len(complete(folder)) == 3, "the run may still be refused"
        go_on()
        assert sorted(p.name for p in folder.glob("step_*")) == ["step_000002", "step_000004"]
        assert (folder / "latest").read_text() == "step_000004\n"


def test_a_damaged_checkpoint_after_the_one_that_is_resumed_is_put_aside_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path / "run", checkpoints=(2, 4, 6)) / "checkpoints"
    (folder / "latest").write_text("step_000006\n")
    (folder / "step_000006" / "config.json").write_text("{")
    before = contents(folder / "step_000006")
    forget_after(folder / "step_000002")
    assert sorted(p.name for p in folder.glob("step_*")) == ["step_000002", "step_000006.damaged"]
    assert contents(folder / "step_000006.damaged") == before
    assert (folder / "latest").read_text() == "step_000002\n"
    told = [record.getMessage() for record in caplog.records if "step_000006" in record.getMessage()]
    assert told == [
        "resuming from step_000002: step_000006 is damaged (config.json cannot be read (JSONDecodeError)), and kept as "
        "step_000006.damaged"
    ]
    # made again, and damaged again: the first one stays
    (folder / "step_000006").mkdir()
    forget_after(folder / "step_000002")
    names = ["step_000002", "step_000006.damaged", "step_000006.damaged.2"]
    assert sorted(p.name for p in folder.glob("step_*")) == names
    assert contents(folder / "step_000006.damaged") == before
    assert complete(folder) == [folder / "step_000002"]


def test_a_later_checkpoint_whose_bytes_have_changed_is_put_aside_too(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", checkpoints=(2, 4)) / "checkpoints"
    newest = folder / "step_000004"
    (newest / checksums.NAME).write_text(f"{'0' * 64}  model.safetensors\n")
    forget_after(folder / "step_000002")
    assert sorted(p.name for p in folder.glob("step_*")) == ["step_000002", "step_000004.damaged"]


def test_a_job_that_begins_anew_keeps_what_was_put_aside(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", checkpoints=(2,)) / "checkpoints"
    (folder / "step_000002").rename(folder / "step_000002.damaged")
    (folder / ".step_000004.tmp").mkdir()
    (folder / "latest").write_text("step_000002\n")
    before = contents(folder / "step_000002.damaged")
    with claim(folder.parent, *config(), None, again=True):
        pass
    assert [path.name for path in folder.iterdir()] == ["step_000002.damaged"]
    assert contents(folder / "step_000002.damaged") == before


def test_who_is_killed_while_checkpoints_go_leaves_whole_ones_and_a_true_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "run", checkpoints=(2, 4, 6)) / "checkpoints"
    (folder / "latest").write_text("step_000006\n")

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise InterruptedError(path.name)

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(InterruptedError, match=r"^\.step_000006\.tmp$"):
        forget_after(folder / "step_000002")
    assert (folder / "latest").read_text() == "step_000002\n"
    assert complete(folder) == [folder / "step_000002", folder / "step_000004"]  # a timeline, without a hole


def test_a_resume_that_finds_the_disk_full_leaves_the_configuration_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "run", "model.lr=1e-4", checkpoints=(2,))
    before = contents(folder / ".hydra")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    checkpoint = folder / "checkpoints" / "step_000002"
    with (
        pytest.raises(OSError, match="No space left"),
        claim(folder, *config("model.lr=1e-5"), checkpoint, again=False) as go_on,
    ):
        go_on()
    assert {name: content for name, content in contents(folder / ".hydra").items() if ".tmp" not in name} == before


def test_a_job_begun_again_starts_from_nothing(tmp_path: Path) -> None:
    folder = begun(tmp_path / "0", checkpoints=(2,))
    (folder / "tokens").mkdir()
    (folder / "tokens" / "step_000001.safetensors").touch()
    (folder / "run.log").write_text("why it failed\n")
    with claim(folder, *config(), None, again=True):
        assert sorted(p.name for p in folder.iterdir()) == [".hydra", "run.log", "status.json"]
        assert (folder / "run.log").read_text() == "why it failed\n"


def test_a_folder_whose_run_was_killed_while_it_claimed_it_can_be_had(tmp_path: Path) -> None:
    """It holds no settings to go on with, and nothing else."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "running"}\n')
    with claim(tmp_path / "run", *config(), None, again=False):
        pass
    with pytest.raises(ValueError, match="holds a run already"), claim(tmp_path / "run", *config(), None, again=False):
        pytest.fail("it was claimed")


def test_an_end_before_there_is_a_record_is_noted(tmp_path: Path) -> None:
    note_end(tmp_path, Interrupted(signal.SIGINT))
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["error"]["message"]) == ("interrupted", "ended by SIGINT")


def test_differences_are_of_what_is_computed(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    assert differences(folder, config("rollout.port=8000", "rollout.urls=['http://a:1']", "resume=/x")[0]) == {}
    assert differences(folder, config("model.lr=0.1", "+data.extra=1")[0]) == {
        "model.lr": (0.0002, 0.1),
        "data.extra": (None, 1),
    }
    assert set(differences(folder, config("loss=gspo")[0])) >= {"loss._target_", "loss.clip_low", "loss.aggregation"}
    (folder / ".hydra" / "config.yaml").write_text("{")
    with pytest.raises(ValueError, match=r"config.yaml: cannot be read \(\w+Error\), so what was run there is unknown"):
        differences(folder, config()[0])


def test_overrides_keep_their_references() -> None:
    _, hydra = config("train.steps=${seed}", "resume=null", "dry_run=true")
    assert task_overrides(hydra) == ["train.steps=${seed}"]


def test_a_folder_that_holds_nothing_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "day" / "run"
    folder.mkdir(parents=True)
    (folder / "run.log").touch()
    discard(folder)
    assert list(tmp_path.iterdir()) == []  # and the working directory itself stays
    other = tmp_path / "outputs" / "other"
    folder.mkdir(parents=True)
    other.mkdir()
    discard(folder)
    assert [p.name for p in (tmp_path / "outputs").iterdir()] == ["other"]


def test_a_folder_that_holds_anything_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = begun(tmp_path / "run")
    (folder / "run.log").write_text("something\n")
    before = contents(folder)
    discard(folder)
    assert contents(folder) == before
    outside = tmp_path / "below"
    outside.mkdir()
    monkeypatch.chdir(outside)
    empty = tmp_path / "parent" / "empty"
    empty.mkdir(parents=True)
    discard(empty)
    assert list((tmp_path / "parent").iterdir()) == []  # whose the parent is we do not know
