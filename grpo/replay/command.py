"""The command line: which run, checkpoint and steps, and the losses to compare, each with overrides of its own.

A loss is composed by Hydra from conf/loss/ and takes its references (`${data.max_tokens}`) from the run's
configuration. Nothing of the run's own loss is carried over to another.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

CONF = Path(__file__).resolve().parents[2] / "conf"
OWN = "own"  # loss=own: the run's own


@dataclass(slots=True, frozen=True)
class Request:
    """What was asked for. `losses`: the overrides of each, of which the first is loss=NAME."""

    run: Path
    checkpoint: str | None
    steps: list[int] | None
    out: Path | None
    device: str | None
    losses: list[list[str]]


def parse(arguments: list[str]) -> Request:
    """Raises ValueError for what cannot be meant."""
    folders = [a for a in arguments if "=" not in a]
    if len(folders) != 1:
        raise ValueError(f"{' '.join(folders) or 'no run folder'}: give one run folder, then keys (--help shows them)")
    options: dict[str, str] = {}
    segments: list[list[str]] = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key == "loss":
            segments.append([argument])
        elif key.lstrip("+~").startswith("loss."):
            if not segments:
                segments.append([f"loss={OWN}"])
            segments[-1].append(argument)
        elif key in ("checkpoint", "steps", "out", "device"):
            options[key] = value
        elif equals:
            raise ValueError(f"{argument}: a replay takes checkpoint, steps, out, device, loss=NAME and loss.KEY=VALUE")
    losses = [loss for segment in segments for loss in _expand(segment)]
    for loss in losses:
        if losses.count(loss) > 1:
            raise ValueError(f"{' '.join(loss)}: asked for twice")
    return Request(
        run=Path(folders[0]),
        checkpoint=options.get("checkpoint"),
        steps=_steps(options["steps"]) if "steps" in options else None,
        out=Path(options["out"]) if "out" in options else None,
        device=options.get("device"),
        losses=losses,
    )


def name_of(overrides: list[str]) -> str:
    """`tis cap=2` for loss=tis loss.cap=2."""
    return " ".join(re.sub(r"^(\+{0,2}|~)loss[.=]", r"\1", override) for override in overrides)


def loss_keys(overrides: list[str], run: DictConfig, own: dict[str, Any]) -> dict[str, Any]:
    """The resolved keys of a loss: `run` is the run's configuration, `own` its own loss's resolved keys.

    Raises ValueError, Hydra's and OmegaConf's errors.
    """
    if overrides[0] == f"loss={OWN}":
        return _changed(own, overrides[1:])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=overrides)
    config = OmegaConf.create(OmegaConf.to_container(run, resolve=False))
    assert isinstance(config, DictConfig)
    config.loss = OmegaConf.to_container(composed.loss, resolve=False)
    return OmegaConf.to_container(config.loss, resolve=True)  # type: ignore[return-value]


def _changed(own: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    keys = OmegaConf.create({"loss": own})
    for override in OverridesParser.create().parse_overrides(overrides):
        key = str(override.key_or_group)
        if override.is_delete():
            raise ValueError(f"{override.input_line}: give the key another value instead")
        if not override.is_add() and OmegaConf.select(keys, key, default=keys) is keys:
            raise ValueError(f"{key}: the run's loss has no such key; +{key} adds one")
        OmegaConf.update(keys, key, override.value(), force_add=True)
    return OmegaConf.to_container(keys.loss, resolve=True)  # type: ignore[return-value]


def _expand(segment: list[str]) -> list[list[str]]:
    """Every combination, where overrides have several values (`loss.cap=1,2`), as a sweep of Hydra's has them."""
    choices = []
    for override in OverridesParser.create().parse_overrides(segment):
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise ValueError(f"{override.input_line}: write the values, with commas between them")
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([str(override.input_line)])
    return [list(chosen) for chosen in itertools.product(*choices)]


def _steps(text: str) -> list[int]:
    """21, 18-21 or 18,20,21."""
    steps: list[int] = []
    for part in text.strip("[]").split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not found:
            raise ValueError(f"steps={text}: write 21, 18-21 or 18,20,21")
        steps += range(int(found[1]), int(found[2] or found[1]) + 1)
    if not steps:
        raise ValueError(f"steps={text}: there is none in it")
    return sorted(set(steps))
