"""The command line as a user meets it: mistakes, help, dry runs, folders, resuming."""

import re
import signal
import socket
from pathlib import Path

import command
import pytest
from composed import ROOT, conf
from data_tools import write_jsonl
from fake_faults import Fault
from fake_server import FakeServer
from hydra import compose
from omegaconf import OmegaConf

from grpo import cli
from grpo.record import FILES

# ---- one line for Hydra's errors ----


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trian.steps=3", "trian: no such key; did you mean train or track?; --help shows all keys"),
        ("train.stepz=3", "train.stepz: no such key; did you mean train.steps?; --help shows all keys"),
        ("lr=3", "lr: no such key; did you mean model.lr?; --help shows all keys"),
        ("group_size=3", "group_size: no such key; did you mean rollout.group_size?; --help shows all keys"),
        ("zzzzz=3", "zzzzz: no such key; --help shows all keys"),
        ("loss=nope", "loss=nope: there is no such choice; choose one of cispo, dapo, decoupled_ppo, dr_grpo, grpo,"),
        (
            "experiment=nope",
            "experiment=nope: there is no such choice; choose one of gsm8k_qwen3_0_6b, smollm2_chain_sum",
        ),
        ("seed=0,1", "seed=0,1: several values; add -m for a sweep over them, or write a list: 'seed=[0,1]'"),
        (
            "data.prompt={a} b",
            "data.prompt={a} b: cannot be read (no viable alternative at input '{a}'); write key=value,",
        ),
        ("seed", "seed: cannot be read (Error parsing override 'seed'); write key=value, special characters in quotes"),
        (
            "+seed=3",
            "Could not append to config. An item is already at 'seed'. Either remove + prefix: 'seed=3' Or add",
        ),
        ("rollout=null", "Config group override must be a string or a list."),
        ("model.betas.x=1", "invalid literal for int()"),
    ],
)
def test_what_hydra_says_over_many_lines_is_one(override: str, line: str) -> None:
    with conf(), pytest.raises(cli.MISTAKES) as caught:
        compose("config", overrides=[override])
    text = cli.explain(caught.value)
    assert text.startswith(line)
    assert "\n" not in text
    assert "_base" not in text


def test_a_sweep_file_is_asked_for_with_its_folder() -> None:
    with conf(), pytest.raises(cli.MISTAKES) as caught:
        compose("staleness")
    text = cli.explain(caught.value)
    assert text == "--config-name staleness: there is no such file; for those of sweeps/ add --config-dir sweeps"


# ---- what is edited before Hydra reads it ----


def prepared(*arguments: str) -> list[str]:
    argv = ["run.py", *arguments]
    cli.prepare(argv)
    return argv[1:]


def run_folder(folder: Path, *, name: str = "config", config_dir: str | None = None, overrides: list[str]) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    sources = [{"provider": "main", "path": "/conf"}]
    if config_dir is not None:
        sources.append({"provider": "command-line", "path": config_dir})
    hydra = {"hydra": {"job": {"config_name": name}, "runtime": {"config_sources": sources}, "x": "${nope}"}}
    OmegaConf.save(OmegaConf.create(hydra), folder / ".hydra" / "hydra.yaml")
    OmegaConf.save(OmegaConf.create(overrides), folder / ".hydra" / "overrides.yaml")
    return folder


@pytest.mark.parametrize(
    "arguments", [[], ["seed=1"], ["-m", "seed=1,2"], ["-cd", "sweeps", "-cn", "seeds"], ["--cfg=job"], ["resume=null"]]
)
def test_other_commands_stay_as_they_are(arguments: list[str]) -> None:
    assert prepared(*arguments) == arguments


def test_flags_may_stand_anywhere() -> None:
    assert prepared("loss=gspo", "-m", "seed=1,2", "-cn", "a=b", "~x", "-i") == [
        "-m", "-cn", "a=b", "-i", "loss=gspo", "seed=1,2", "~x",
    ]  # fmt: skip


def test_a_resumed_run_has_its_overrides_and_those_given_win(tmp_path: Path) -> None:
    saved = ["loss=gspo", "model.lr=0.1", "+loss.x=1", "resume=/old", "dry_run=true"]
    folder = run_folder(tmp_path / "it's", overrides=saved)
    expected = ["loss=gspo", "+loss.x=1", f"resume='{tmp_path}/it\\'s'", f"hydra.run.dir='{tmp_path}/it\\'s'"]
    assert prepared(f"resume={folder}", "model.lr=0.2") == ["model.lr=0.2", *expected, "hydra.mode=RUN"]
    with conf():
        cfg = compose("config", overrides=prepared(f"resume={folder}", "+loss.x=3"), return_hydra_config=True)
    assert (cfg.resume, cfg.hydra.run.dir) == (str(folder), str(folder))
    assert (cfg.loss._target_, cfg.model.lr, cfg.loss.x) == ("grpo.losses.GSPO", 0.1, 3)


def test_a_checkpoint_names_the_run_that_it_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run", overrides=["seed=3"])
    monkeypatch.chdir(tmp_path)  # a relative path is the caller's
    assert prepared("resume=run/checkpoints/step_000002/") == [
        "seed=3",
        f"resume='{folder}/checkpoints/step_000002'",
        f"hydra.run.dir='{folder}'",
        "hydra.mode=RUN",
    ]


def test_a_job_of_a_sweep_goes_on_alone_with_the_sweeps_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "0", name="seeds", config_dir=str(ROOT / "sweeps"), overrides=["seed=3"])
    assert prepared(f"resume={folder}")[:5] == [
        "--config-name",
        "seeds",
        "--config-dir",
        str(ROOT / "sweeps"),
        "seed=3",
    ]
    own = prepared(f"resume={folder}", "-cn", "mine", "-cd", "there")
    assert own[:5] == ["-cn", "mine", "-cd", "there", "seed=3"]


def test_what_cannot_be_resumed(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(ValueError, match=r".") as caught:
            prepared(*arguments)
        return str(caught.value)

    assert refused(f"resume={tmp_path}/no") == f"resume={tmp_path}/no: there is no such folder"
    assert refused(f"resume={tmp_path}").startswith(
        f"resume={tmp_path}: neither a run folder (no .hydra/overrides.yaml)"
    )
    (tmp_path / "multirun.yaml").touch()
    assert refused(f"resume={tmp_path}").startswith(f"resume={tmp_path}: this is a sweep; ask for it again with hydra.")
    folder = run_folder(tmp_path / "run", overrides=[])
    assert refused("-m", f"resume={folder}", "seed=1,2") == f"resume={folder}: goes on with one run, -m starts several"
    assert refused("--seed=3") == "--seed=3: no such flag; keys are written without dashes: seed=3"
    assert refused("--dry-run") == "--dry-run: no such flag; keys are written without dashes: dry_run=<value>"
    (folder / ".hydra" / "overrides.yaml").write_text("[")
    assert refused(f"resume={folder}") == f"{folder}/.hydra/overrides.yaml: cannot be read (ParserError)"


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "trainer.pt").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(
        ValueError, match=rf"^resume={tmp_path}: trainer.pt cannot be read \(\w+\); resume from another"
    ):
        cli.checkpoint_of(str(tmp_path), 10)
    with pytest.raises(ValueError, match="no checkpoint there"):
        cli.checkpoint_of(str(tmp_path / "none"), 10)
    assert cli.checkpoint_of(None, 10) is None


@pytest.mark.parametrize("status", ['{"state": "failed", "error": {"message": "${\\\\frac{1}{2}}$"}}', "", '{"sta'])
def test_a_run_goes_on_whatever_its_error_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    monkeypatch.setattr("grpo.checkpoint.find_whole", lambda path: (checkpoint, {"step": 3}))
    (tmp_path / "status.json").write_text(status)
    assert cli.checkpoint_of(str(tmp_path), 10) == checkpoint
    (tmp_path / "status.json").write_text('{"state": "finished"}')
    with pytest.raises(ValueError, match=r"has made 3 of train\.steps=3; to go on, give more"):
        cli.checkpoint_of(str(tmp_path), 3)


# ---- as processes ----


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["model.lr=abc"], "model.lr='abc': expected a finite number"),
        (["rollout.grup_size=4"], "rollout.grup_size: no such key; did you mean rollout.group_size?"),
        (["loss=nope"], "loss=nope: there is no such choice; choose one of cispo"),
        (["train.steps=${nope}"], "train.steps: Interpolation key 'nope' not found"),
        (["train.batch_size=100"], "train.batch_size=100 is not a multiple of rollout.group_size=16"),
        (["model=qwen3_4b"], "data.path=agentica-org/DeepScaleR-Preview-Dataset: no local folder"),
        (["resume=nonsense"], "resume="),
        (["-m", "seed=0,1", "loss=nope"], "loss=nope: there is no such choice"),
        (["hydra.run.dir=held"], "hydra.run.dir="),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], line: str
) -> None:
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "status.json").write_text("{}")
    before = command.tree(tmp_path)
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path / "cache")}
    ended = command.run(*arguments, folder=tmp_path, **hub)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert re.fullmatch(rf"error: {re.escape(line)}[^\n]*\n", ended.stderr)
    assert command.tree(tmp_path) == before


def test_help_shows_the_groups_and_how_to_start(tmp_path: Path) -> None:
    ended = command.run("--help", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    for text in ("loss: _base, cispo, dapo", "track: none, wandb", "resume=outputs/<run>", "max_staleness: 1"):
        assert text in ended.stdout
    assert command.tree(tmp_path) == []


def test_a_dry_run_prints_the_plan_touches_no_model_and_leaves_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(b"not to be read")
    before = command.tree(tmp_path)
    arguments = ["dry_run=true", f"model.path={model}", "rollout.urls=['http://127.0.0.1:9']"]
    ended = command.run(*arguments, "loss=gspo,tis", "-m", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert [line for line in ended.stdout.splitlines() if line.startswith("loss ")] == [
        "loss      GSPO: advantage mean_std, sequence_mean",
        "loss      PPOClip: advantage mean_std, token_mean",
    ]
    assert ended.stdout.count(str(model)) >= 2
    assert command.tree(tmp_path) == before


@pytest.mark.slow
def test_three_launches_at_once_have_three_folders(tmp_path: Path) -> None:
    """They fail once they have their folders: the tokenizer is none."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 512}')
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(b"{}")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"rollout.urls=['http://127.0.0.1:{listening.getsockname()[1]}']"
        started = [command.start(f"model.path={model}", url, folder=tmp_path) for _ in range(3)]
        ended = [command.finish(process) for process in started]
    assert [e.returncode for e in ended] == [1, 1, 1]
    folders = {Path(found[1]).parent for e in ended if (found := re.search(r"\(the traceback is in (.*)\)", e.stderr))}
    assert folders == set((tmp_path / "outputs").glob("*/*"))
    assert len(folders) == 3
    for folder in folders:
        status = command.load(folder / "status.json")
        assert status["state"] == "failed"
        assert status["error"]["traceback"].startswith("Traceback")
        assert status["error"]["traceback"].splitlines()[-1] in (folder / "run.log").read_text()


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_settings_and_every_completion_once(tmp_path: Path, server: FakeServer) -> None:
    """Killed in the sync after step 3, with a checkpoint of step 2; once more, from a checkpoint before the last."""
    hang = server.add_fault(Fault("update_weights", after=3, hang=True))
    arguments = ["train.steps=5", "train.checkpoint_every=2", "model.lr=3e-3", "hydra.run.dir=run"]
    with command.start(*command.small(server), *arguments, folder=tmp_path) as process:
        server.wait_for(lambda s: hang.hits == 1 or process.poll() is not None, timeout=command.TIMEOUT)
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr and process.stderr.read()
    run = tmp_path / "run"
    assert command.load(run / "status.json")["state"] == "running"
    server.die()
    server.restart()  # it was left in the middle of an update
    server.clear_faults()

    ended = command.run(f"resume={run}", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    check_whole(run, steps=5)
    assert command.load(run / "status.json")["overrides"] == [*command.small(server), *arguments[:-1]]
    assert command.load(run / "summary.json")["eval"]["held_out"]["before"]["step"] == 0
    first = [line["reward/mean"] for line in command.lines(run / "metrics.jsonl")]

    # finished: nothing is left to do
    ended = command.run(f"resume={run}", folder=tmp_path)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "has made 5 of train.steps=5; to go on, give more" in ended.stderr

    ended = command.run("resume=run/checkpoints/step_000004", "train.steps=6", "model.lr=1e-5", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    check_whole(run, steps=6)
    metrics = command.lines(run / "metrics.jsonl")
    assert [line["lr"] for line in metrics] == [3e-3, 3e-3, 3e-3, 3e-3, 1e-5, 1e-5]
    assert [line["reward/mean"] for line in metrics[:4]] == first[:4]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["latest", "step_000004", "step_000006"]


def test_a_server_needs_no_more_room_than_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    """As it is launched: for data.max_prompt_tokens + data.max_tokens. A probe of the sync is no longer than that."""
    with FakeServer(tiny_dir, max_model_len=16 + 6) as server:
        ended = command.run(*command.small(server), "train.steps=1", "hydra.run.dir=run", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_resume_that_other_rows_refuse_loses_nothing_and_keeps_nothing(server: FakeServer, tmp_path: Path) -> None:
    """Neither the steps after the checkpoint nor the state, and the next resume has the run's own settings."""
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "answer": f"{n}"} for n in range(40)])
    arguments = (
        "data=jsonl",
        "data.path=rows.jsonl",
        "data.max_prompt_tokens=16",
        "train.steps=2",
        "train.checkpoint_every=1",
    )
    ended = command.run(*command.small(server), *arguments, "hydra.run.dir=run", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "run.log"}
    write_jsonl(tmp_path / "others.jsonl", [{"prompt": f"{n}", "answer": f"{n}"} for n in range(40, 80)])
    refused = command.run("resume=run/checkpoints/step_000001", "data.path=others.jsonl", folder=tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert "are not those that the run began with" in refused.stderr
    assert {path: path.read_bytes() for path in before} == before
    # Nor does a server that cannot take the weights: by then everything is loaded.
    server.add_fault(Fault("update_weights", status=500))
    failed = command.run("resume=run/checkpoints/step_000001", "model.lr=1e-5", folder=tmp_path)
    assert failed.returncode == 1, failed.stderr
    assert {path: path.read_bytes() for path in before if path.suffix != ".html"} == {
        path: content for path, content in before.items() if path.suffix != ".html"
    }
    server.clear_faults()
    ended = command.run("resume=run", "train.steps=3", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [line["step"] for line in command.lines(run / "metrics.jsonl")] == [1, 2, 3]


def check_whole(run: Path, *, steps: int) -> None:
    """The folder of an unbroken run: steps one by one, each completion of each group once, in order."""
    status = command.load(run / "status.json")
    assert (status["state"], status["step"]) == ("finished", steps)
    assert [line["step"] for line in command.lines(run / "metrics.jsonl")] == list(range(1, steps + 1))
    rollouts = command.lines(run / "rollouts.jsonl")
    assert [(r["group"], r["index"]) for r in rollouts] == [(g, i) for g in range(2 * steps) for i in range(4)]
    assert len({r["row"] for r in rollouts}) == 2 * steps
    for name in FILES[2:]:
        shown = [line["step"] for line in command.lines(run / name)]
        assert shown == sorted(shown)
    assert sum(r["tokens"] for r in rollouts) <= command.lines(run / "metrics.jsonl")[-1]["tokens/generated"]


def test_mappings_that_are_the_users_to_fill_take_new_keys() -> None:
    overrides = [
        "data=jsonl",
        "data.evals={aime: {path: a.jsonl}}",
        "data.evals.test.path=b.jsonl",
        "data.chat_template_kwargs.enable_thinking=false",
        "data.environment={kind: mine.py:Game, size: 3}",
    ]
    argv = ["run.py", *overrides]
    cli.prepare(argv)
    with conf():
        data = compose("config", overrides=argv[1:]).data
    assert data.evals == {"aime": {"path": "a.jsonl"}, "test": {"path": "b.jsonl"}}
    assert data.chat_template_kwargs == {"enable_thinking": False}
    assert data.environment == {"kind": "mine.py:Game", "size": 3}
    for other in ("data.path=x", "+data.evals.x.path=y", "data.evaluation=3", "rollout.urls=[]"):
        assert cli.opened([other]) == [other]
    assert cli.opened(["data.parts.a.evals.x.path=y"]) == ["++data.parts.a.evals.x.path=y"]
