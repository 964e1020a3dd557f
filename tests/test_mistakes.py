"""Every shipped configuration composes and is accepted; every mistake is one line, before a model is loaded."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from grpo import objects, preflight

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"


def composed(*overrides: str, name: str = "config", folder: Path = CONF) -> DictConfig:
    extra = [] if folder == CONF else [f"hydra.searchpath=[file://{CONF}]"]
    with initialize_config_dir(str(folder), version_base="1.3"):
        return compose(name, overrides=[*overrides, *extra])


def choices(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml") if not p.stem.startswith("_"))


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json of hub models, as the hub would give it: there is no network in a test."""
    real = preflight.read_config

    def read_config(path: str) -> dict[str, object]:
        known = path.startswith(("Qwen/", "HuggingFaceTB/"))
        return {"model_type": "qwen3", "max_position_embeddings": 40960} if known else real(path)

    monkeypatch.setattr(preflight, "read_config", read_config)


def accepted(*overrides: str) -> preflight.Plan:
    return preflight.check(composed(*overrides), ROOT)


@pytest.mark.parametrize("loss", choices("loss"))
@pytest.mark.parametrize("model", choices("model"))
def test_every_loss_goes_with_every_model(model: str, loss: str) -> None:
    plan = accepted(f"model={model}", f"loss={loss}", "data=arithmetic")
    assert plan.loss.advantage
    assert plan.train.batch_size % plan.rollout.group_size == 0


@pytest.mark.parametrize("data", choices("data"))
def test_every_data_set_composes_and_its_object_is_made(data: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    overrides = [f"data={data}", "model=qwen3_0_6b"]
    overrides += [f"data.path={tmp_path / 'rows.jsonl'}"] if data == "jsonl" else []
    overrides += ["data.path=somebody/something"] if data == "hub" else []
    cfg = composed(*overrides)
    made = objects.build(cfg.data, "data", object)
    assert made.max_tokens > 0  # type: ignore[attr-defined]


def test_the_large_models_train_on_math_unless_told_otherwise() -> None:
    for model in ("qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"):
        assert "arithmetic" not in str(composed(f"model={model}").data).lower()
        assert "Arithmetic" in composed(f"model={model}", "data=arithmetic").data._target_


@pytest.mark.parametrize("sweep", sorted(p.stem for p in (ROOT / "sweeps").glob("*.yaml")))
def test_every_sweep_composes_and_each_of_its_values_is_accepted(sweep: str) -> None:
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        cfg = compose(sweep, overrides=[f"hydra.searchpath=[file://{CONF}]"], return_hydra_config=True)
    params = dict(cfg.hydra.sweeper.params)
    assert cfg.hydra.mode.name == "MULTIRUN"
    values = [[f"{key}={value}" for value in str(choice).split(",")] for key, choice in params.items()]
    for job in itertools.islice(itertools.product(*values), 0, None, 3):
        accepted(*job)
    text = (ROOT / "sweeps" / f"{sweep}.yaml").read_text()
    assert text.startswith("# Question:")
    assert "# Cost:" in text


MISTAKES = {
    "train.batch_size=100": r"train.batch_size=100 .*rollout.group_size=16.*",
    "rollout.group_size=1": r"rollout.group_size=1.*2 or more",
    "rollout.max_staleness=-1": r"rollout.max_staleness=-1",
    "rollout.temperature=0": r"rollout.temperature=0",
    "rollout.top_p=0.9": r"rollout.top_p=0.9",
    "rollout.top_k=20": r"rollout.top_k=20",
    "rollout.min_p=0.1": r"rollout.min_p=0.1",
    "rollout.repetition_penalty=1.1": r"rollout.repetition_penalty=1.1",
    "rollout.presence_penalty=0.5": r"rollout.presence_penalty=0.5",
    "rollout.zero_variance=maybe": r"rollout.zero_variance='maybe'.*discard",
    "rollout.urls=[localhost:8000]": r"rollout.urls",
    "model.lr=abc": r"model.lr='abc'.*number",
    "model.dtype=float16": r"model.dtype='float16'.*bfloat16",
    "model.path=/no/such/model": r"model.path=/no/such/model",
    "model.path=null": r"model.path",
    "model.device=cuda": r"model.device=cuda",
    "sync=ipc": r"sync=ipc.*disk",
    "sync.pause=maybe": r"sync.pause='maybe'.*keep",
    "loss.advantage=best": r"loss.advantage='best'.*mean_std",
    "loss._target_=os.system": r"loss._target_=os.system.*subclass of grpo.losses.Loss",
    "loss._target_=torch.nn.Linear": r"loss._target_=torch.nn.Linear.*subclass of grpo.losses.Loss",
    "data.digits=40": r"data.digits=40.*1 to 18",
    "data.digits=1": r"data.eval_rows=256.*data.digits=1, 1 to 5",
    "loss.aggregation=sum": r"loss.aggregation='sum'.*token_mean",
    "data.max_tokens=600": r"600.*512",
    "train.steps=0": r"train.steps=0",
    "train.steps=1.5": r"train.steps=1.5.*whole number",
    "seed=abc": r"seed='?abc'?.*whole number",
    "name=${nothing.there}": r"nothing",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_and_value(override: str) -> None:
    with pytest.raises(ValueError, match=MISTAKES[override]) as caught:
        preflight.check(composed(override), ROOT)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"{port}"):
            accepted(f"rollout.port={port}")


def test_a_missing_file_and_a_missing_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.jsonl"):
        accepted("data=jsonl", f"data.path={tmp_path / 'nowhere.jsonl'}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    with pytest.raises(ValueError, match=r"prompt"):
        accepted("data=jsonl", f"data.path={rows}", "data.max_prompt_tokens=16", "data.max_tokens=16")


def test_no_vllm_says_which_command_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vLLM is not installed.*pip install"):
        accepted()


def command(*overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "run.py", *overrides], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.batch_size=100", "train.batch_size=100"),
        ("model.pth=x", "model.pth"),
        ("loss=nonsense", "loss=nonsense"),
        ("loss._target_=nowhere.Mine", "nowhere.Mine"),  # Hydra has a log line of its own for it
        ("hydra.run.dir=/dev/null/run", "hydra.run.dir"),
        ("model.lr=abc", "model.lr='abc'"),
        ("resume=/no/such/run", "resume"),
    ],
)
def test_the_command_answers_a_mistake_in_one_line_and_leaves_nothing(
    override: str, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = command(f"hydra.run.dir={folder}", override)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert words in done.stderr
    assert not folder.exists() or not any(folder.iterdir())


def test_a_dry_run_prints_the_plan_and_makes_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = command("dry_run=true", "loss=gspo", f"hydra.run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert "GSPO" in done.stdout
    assert "disk" in done.stdout
    assert not (folder / "status.json").exists()
