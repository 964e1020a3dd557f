"""Every shipped configuration: it composes, passes the preflight and becomes objects. Nothing is downloaded."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composed import ROOT, choices, composed, composed_sweep, conf
from hydra import compose
from omegaconf import OmegaConf

from grpo import preflight
from grpo.losses.base import Loss
from grpo.settings import Model, Rollout, Sync, Train

GROUPS = ("model", "data", "loss", "sync", "track")
QWEN3 = {"model_type": "qwen3", "max_position_embeddings": 40960}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine on which everything can be had: a hub that has every set and model, two GPUs, wandb.

    Returns what the user of a choice has to give besides.
    """
    from grpo.data import hub

    read, find_spec = preflight.read_config, preflight.find_spec
    monkeypatch.setattr(hub, "_ask_hub", lambda path: None)
    monkeypatch.setattr(preflight, "read_config", lambda path: read(path) if Path(path).is_dir() else QWEN3)
    monkeypatch.setattr(preflight, "find_spec", lambda name: True if name == "wandb" else find_spec(name))
    monkeypatch.setattr(preflight, "resolve_device", lambda device: "cuda" if device == "cuda" else "cpu")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=150.8e9))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": 2}\n')
    return [str(rows)]


def with_needs(chosen: dict[str, str], rows: str) -> list[str]:
    """Overrides for one choice of each group, with what the choice cannot know."""
    overrides = [f"{group}={choice}" for group, choice in chosen.items()]
    if chosen["data"] in ("jsonl", "hub"):
        overrides.append(f"data.path={rows if chosen['data'] == 'jsonl' else 'owner/set'}")
    if chosen["sync"] in ("ipc", "nccl"):
        overrides.append("model.device=cuda")
    if chosen["model"] == "tiny":  # its context is 512 tokens
        overrides += ["data.max_prompt_tokens=256", "data.max_tokens=256"]
        if chosen["data"] == "mixture":
            parts = ("data.parts.gsm8k", "data.parts.puzzles")
            overrides += [f"{part}.max_{what}tokens=256" for part in parts for what in ("", "prompt_")]
    return overrides


def covering() -> list[dict[str, str]]:
    """Rows, one choice of each group in each, so that every two choices of two groups meet in one of them."""
    offers = {group: [(group, choice) for choice in choices(group)] for group in GROUPS}
    apart = {
        frozenset(pair)
        for a, b in itertools.combinations(GROUPS, 2)
        for pair in itertools.product(offers[a], offers[b])
    }
    rows = []
    while apart:
        row = sorted(min(apart, key=sorted))
        for group in GROUPS:
            if group not in dict(row):
                row.append(max(offers[group], key=lambda offer: sum(frozenset((offer, old)) in apart for old in row)))
        apart -= {frozenset(pair) for pair in itertools.combinations(row, 2)}
        rows.append(dict(row))
    return rows


def test_every_two_choices_make_a_run_together(machine: list[str]) -> None:
    rows = covering()
    assert {group: {row[group] for row in rows} for group in GROUPS} == {g: set(choices(g)) for g in GROUPS}
    with conf():
        for row in rows:
            cfg = compose("config", overrides=with_needs(row, machine[0]))
            plan = preflight.check(cfg, ROOT)
            types = (type(plan.train), type(plan.model), type(plan.rollout), type(plan.sync))
            assert types == (Train, Model, Rollout, Sync), row
            assert isinstance(plan.loss, Loss), row
            assert plan.data.max_tokens == cfg.data.max_tokens, row
            assert plan.sync_backend == {"auto": "disk"}.get(row["sync"], row["sync"]), row
            assert all(math.isfinite(x) for x in (plan.model.lr, plan.rollout.temperature))
            assert len("\n".join(plan.lines()).splitlines()) == 6 + (plan.memory is not None), row


@pytest.mark.parametrize("model", [m for m in choices("model") if m.startswith("qwen3")])
def test_a_larger_model_brings_its_own_data_and_sizes_and_the_command_line_wins(model: str) -> None:
    cfg = composed(f"model={model}", "loss=ppo_clip")
    assert cfg.data._target_ == "grpo.data.Hub"
    assert cfg.data.reward == "math_verify"
    assert cfg.model.dtype == "bfloat16"
    assert cfg.model.lr < 1e-5
    assert cfg.rollout.group_size == 8
    assert cfg.train.batch_size == 64
    other = composed(f"model={model}", "data=arithmetic", "rollout.group_size=4", "train.batch_size=32")
    assert other.data._target_ == "grpo.data.Arithmetic"
    assert (other.rollout.group_size, other.train.batch_size) == (4, 32)


def test_the_default_is_the_tiny_model_on_arithmetic() -> None:
    plan = preflight.check(composed(), ROOT)
    assert Path(plan.model_path) == ROOT / "models" / "tiny"
    assert (plan.device, plan.sync_backend, plan.rollout.max_staleness) == ("cpu", "disk", 1)
    assert type(plan.data).__name__ == "Arithmetic"
    assert type(plan.loss).__name__ == "PPOClip"
    assert plan.groups_per_step == 8  # 128 completions in groups of 16


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_experiment_makes_a_run(machine: list[str], name: str) -> None:
    plan = preflight.check(composed(f"experiment={name}"), ROOT)
    cfg = composed(f"experiment={name}")
    assert cfg.name == name
    assert plan.train.steps * plan.groups_per_step > 0
    assert (plan.data.max_prompt_tokens, plan.data.max_tokens) == (cfg.data.max_prompt_tokens, cfg.data.max_tokens)


def values(params: Any) -> dict[str, list[str]]:
    return {key: str(text).split(",") for key, text in params.items()}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml")))
def test_every_value_of_a_sweep_makes_a_run(name: str) -> None:
    cfg = composed_sweep(name)
    assert cfg.hydra.mode.name == "MULTIRUN"
    assert cfg.name == name
    params = values(cfg.hydra.sweeper.params)
    assert "seed" in params
    for key, texts in params.items():
        assert len(set(texts)) == len(texts) > 1, key
        for text in texts if key != "seed" else texts[-1:]:
            job = composed_sweep(name, f"{key}={text}")
            plan = preflight.check(OmegaConf.masked_copy(job, [key for key in job if key != "hydra"]), ROOT)
            group, _, member = key.partition(".")
            assert not member or str(getattr(getattr(plan, group), member)) == text


def test_a_sweep_says_what_it_costs() -> None:
    for path in (ROOT / "sweeps").glob("*.yaml"):
        jobs = math.prod(len(v) for v in values(composed_sweep(path.stem).hydra.sweeper.params).values())
        told = re.search(r"# Cost: .*?(\d+) jobs", path.read_text())
        assert told, path
        assert int(told[1]) == jobs, path
