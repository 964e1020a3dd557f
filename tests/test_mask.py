"""Secrets in what is written, and a run that is resumed without them."""

from pathlib import Path

import pytest
from command import run, small
from composed import composed
from fake_server import FakeServer
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from grpo.claim import claim, task_overrides
from grpo.mask import masked, masked_text

KEY = "s3cr3t-k3y"


def config(*overrides: str) -> tuple[DictConfig, HydraConf]:
    whole = composed(*overrides, hydra=True)
    return OmegaConf.masked_copy(whole, [key for key in whole if key != "hydra"]), whole.hydra


def test_values_of_secret_keys_are_masked_wherever_they_stand() -> None:
    node = {
        "rollout": {"api_key": KEY, "max_tokens": 7, "api_keys": 1},
        "data": {"reward": [{"kind": "http", "auth_token": KEY, "password": None}]},
        "overrides": [f"rollout.api_key={KEY}", "seed=1"],
        "name": f"seed=1,rollout.api_key={KEY},x=2",
    }
    hidden = masked(node)
    assert KEY not in str(hidden)
    assert hidden["rollout"] == {"api_key": "***", "max_tokens": 7, "api_keys": 1}
    assert hidden["data"]["reward"][0] == {"kind": "http", "auth_token": "***", "password": None}
    assert hidden["overrides"] == ["rollout.api_key=***", "seed=1"]
    assert hidden["name"] == "seed=1,rollout.api_key=***,x=2"


@pytest.mark.parametrize(
    "text",
    ["rollout.api_key=null", "rollout.api_key=${oc.env:KEY}", "rollout.api_key='${oc.env:KEY}'", "data.max_tokens=6"],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked_text(text) == text


@pytest.mark.parametrize("quoted", [f"'{KEY} x'", f'"{KEY}"', KEY])
def test_a_quoted_value_is_masked_as_a_whole(quoted: str) -> None:
    assert masked_text(f"run.py ++rollout.api_key={quoted} seed=1") == "run.py ++rollout.api_key=*** seed=1"


def test_a_key_that_was_not_written_down_must_be_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPO_API_KEY", raising=False)
    cfg, hydra = config(f"rollout.api_key={KEY}")
    assert task_overrides(hydra) == []
    with claim(tmp_path, cfg, hydra, None, again=False):
        pass
    assert not [file for file in (tmp_path / ".hydra").iterdir() if KEY in file.read_text()]
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"rollout.api_key=null: the run had a key.*GRPO_API_KEY"):
        claim(tmp_path, *config(), checkpoint, again=False).__enter__()
    with claim(tmp_path, *config(f"rollout.api_key={KEY}"), checkpoint, again=False):
        pass
    monkeypatch.setenv("GRPO_API_KEY", KEY)
    with claim(tmp_path, *config(), checkpoint, again=False):
        pass


@pytest.mark.slow
def test_no_file_of_a_run_or_a_sweep_holds_the_key_and_a_resume_finds_it(tiny_dir: Path, tmp_path: Path) -> None:
    with FakeServer(tiny_dir) as server:
        sweep = [f"hydra.sweep.dir={tmp_path}/sweep", "train.steps=1", "seed=0,1", "-m"]
        swept = run(*small(server), *sweep, f"rollout.api_key={KEY}", folder=tmp_path)
        assert swept.returncode == 0, swept.stderr
        job = tmp_path / "sweep" / "0"
        again = run(f"resume={job}", "train.steps=2", folder=tmp_path, GRPO_API_KEY=KEY)
        assert again.returncode == 0, again.stderr
        assert {call.headers["Authorization"] for call in server.requests()} == {f"Bearer {KEY}"}
    written = [file for file in tmp_path.rglob("*") if file.is_file() and KEY.encode() in file.read_bytes()]
    assert written == []
