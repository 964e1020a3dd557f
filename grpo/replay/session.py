"""A replay from a run folder: which checkpoint and steps, the losses, the models, and the proof beside the figures.

The checkpoint of step s holds the weights of version s, and the batch of step s + 1 was trained at version s. So there
the run's own loss must come out as metrics.jsonl has it; that comparison is the proof. An older batch at a newer
checkpoint is data of a larger lag; a batch with tokens of weights that came after the checkpoint is refused.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers.utils import logging as transformers_logging

from grpo import checkpoint as checkpoints
from grpo import objects, preflight, token_record
from grpo.build import make_optimizer, make_policy, make_reference
from grpo.checkpoint_folder import complete
from grpo.durable import write_atomic
from grpo.model import Policy
from grpo.record import jsonable
from grpo.replay.command import OWN, Request, loss_keys, name_of
from grpo.replay.compare import Contender, compare
from grpo.settings import Model, Train
from grpo.token_record import TokenRecord

ROOT = Path(__file__).resolve().parents[2]
# How far a figure may be from the recorded one: (absolute, relative). On the same machine they are equal as a rule;
# other kernels add up in another order, and bfloat16 has 8 bits.
BOUNDS = {"float32": (1e-6, 1e-5), "bfloat16": (1e-3, 1e-2)}
SPARE = 0.9  # of the free memory that gradients may fill


def run(request: Request) -> dict[str, Any]:
    """What replay.json holds. Raises ValueError for a mistake, with one line."""
    folder = request.run
    config = _config(folder)
    recorded = token_record.recorded_steps(folder)
    if not recorded:
        raise ValueError(f"{folder}: no tokens are recorded there; train.record_tokens=true records them")
    path = _checkpoint(folder, request.checkpoint, recorded)
    position = _position(path)
    version = position["version"]
    steps = request.steps or [position["step"] + 1]
    for step in steps:
        if step not in recorded:
            raise ValueError(f"steps={step}: not recorded in {folder}; there are {_ranges(recorded)}")
    records = [token_record.read(folder, step) for step in steps]
    facts = records[0].facts
    for record in records:
        _check_record(record, version, path)
        if record.facts != facts:
            raise ValueError(
                f"steps={steps[0]},{record.step}: trained with different settings; replay them one after the other"
            )
    minibatches = facts["minibatches"]
    if minibatches > 1 and len(records) > 1:
        raise ValueError(
            f"steps={_ranges(steps)}: with train.minibatches={minibatches} a replay follows the updates of one batch; "
            "give one step"
        )
    losses = [_contender(OWN, [f"loss={OWN}"], config, facts["loss"])]
    losses += [_contender(name_of(asked), asked, config, facts["loss"]) for asked in request.losses]
    model, train = objects.build(config.model, "model", Model), objects.build(config.train, "train", Train)
    device = preflight.resolve_device(request.device or model.device)
    if device == "cpu" and train.threads:
        torch.set_num_threads(train.threads)
    transformers_logging.disable_progress_bar()
    needs_reference = any(each.loss.needs_reference for each in losses)
    initial = preflight.resolve_model(facts["model"], ROOT) if needs_reference or model.lora_rank else path
    policy = make_policy(initial, model, device, checkpoint=path)
    _check_memory(policy, len(losses))
    reference = make_reference(initial, model, device, policy) if needs_reference else None
    optimizer = make_optimizer(policy, model, train)
    if minibatches > 1:
        optimizer.load_state_dict(checkpoints.load(path)["optimizer"])
    lines = _metrics(folder)
    compared = []
    for record in records:
        found = compare(
            record,
            losses,
            version=version,
            policy=policy,
            reference=reference,
            optimizer=optimizer,
            tokens_per_microbatch=train.tokens_per_microbatch,
            share_prompts=train.share_prompts,
        )
        at_its_weights = record.version == version
        compared.append(
            {
                "step": record.step,
                "trained_at_version": record.version,
                "completions": len(record.outcomes),
                "losses": [
                    {"name": each.name, "metrics": metrics} for each, metrics in zip(losses, found.metrics, strict=True)
                ],
                "cosine": found.cosines,
                "proof": _proof(lines.get(record.step), found.metrics[0], model.dtype) if at_its_weights else None,
            }
        )
    result = {
        "run": str(folder),
        "checkpoint": path.name,
        "version": version,
        "minibatches": minibatches,
        "temperature": facts["temperature"],
        "dtype": model.dtype,
        "device": device,
        "losses": [{"name": each.name, "keys": each.keys} for each in losses],
        "steps": compared,
    }
    out = request.out or folder / "replay.json"
    write_atomic(out, json.dumps(jsonable(result), indent=1) + "\n")
    return result | {"out": str(out)}


def _config(folder: Path) -> DictConfig:
    file = folder / ".hydra" / "config.yaml"
    try:
        config = OmegaConf.load(file)
    except Exception as error:  # YAML's and OmegaConf's kinds; no such file
        raise ValueError(f"{folder}: no run folder, {file} cannot be read ({type(error).__name__})") from error
    assert isinstance(config, DictConfig)
    return config


def _checkpoint(folder: Path, asked: str | None, recorded: list[int]) -> Path:
    there = complete(folder / "checkpoints")
    names = ", ".join(path.name for path in there) or "none"
    if asked is None:
        usable = [path for path in there if _step(path) + 1 in recorded]
        if not usable:
            raise ValueError(
                f"{folder}: no checkpoint with a recorded step after it (checkpoints: {names}; recorded steps: "
                f"{_ranges(recorded)}); choose with checkpoint= and steps="
            )
        return usable[-1]
    if asked.isdigit():
        for path in there:
            if _step(path) == int(asked):
                return path
    elif (Path(asked) / "trainer.pt").is_file():
        return Path(asked)
    raise ValueError(f"checkpoint={asked}: no such checkpoint in {folder}; there are {names}")


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _position(path: Path) -> dict[str, Any]:
    try:
        position = checkpoints.inspect(path)
        checkpoints.compare(path)
    except checkpoints.Damaged as damage:
        raise ValueError(f"checkpoint={path}: {damage.reason}; choose another") from damage
    return position


def _check_record(record: TokenRecord, version: int, path: Path) -> None:
    newest = max((c.version_last for g in record.groups if g.discarded is None for c in g.completions), default=0)
    if newest > version:
        raise ValueError(
            f"steps={record.step}: its tokens were sampled by weights up to version {newest}, {path.name} holds "
            f"version {version}; choose a later checkpoint or an earlier step"
        )


def _contender(name: str, overrides: list[str], config: DictConfig, own: dict[str, Any]) -> Contender:
    keys = loss_keys(overrides, config, own)
    try:
        loss = objects.build_loss(OmegaConf.create(keys))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return Contender(name, keys, loss)


def _check_memory(policy: Policy, losses: int) -> None:
    each = sum(4 * p.numel() for p in policy.parameters())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if losses * each > SPARE * free:
        raise ValueError(
            f"{losses} losses keep a gradient of {each / 1e9:.1f} GB each in memory, {free / 1e9:.1f} GB are free; "
            "compare fewer at a time"
        )


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines of metrics.jsonl by step; a cut last line is left out."""
    lines = {}
    try:
        for raw in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            lines[line["step"]] = line
    except OSError as error:
        raise ValueError(f"{folder}: metrics.jsonl cannot be read ({type(error).__name__})") from error
    return lines


def _proof(line: dict[str, Any] | None, metrics: dict[str, float], dtype: str) -> dict[str, Any] | None:
    """Every figure of the run's own loss beside the one that training recorded; None where it recorded none."""
    if line is None:
        return None
    absolute, relative = BOUNDS[dtype]
    figures = {
        key: {"metrics.jsonl": line[key], "replay": value, "difference": abs(value - line[key])}
        for key, value in metrics.items()
        if isinstance(line.get(key), int | float)
    }
    off = [key for key, x in figures.items() if not x["difference"] <= absolute + relative * abs(x["metrics.jsonl"])]
    return {"reproduced": not off, "off": off, "absolute": absolute, "relative": relative, "figures": figures}


def _ranges(steps: list[int]) -> str:
    """1-20, 22"""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)
