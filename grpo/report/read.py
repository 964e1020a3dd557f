"""Reading run folders, also those of runs that were killed, are still running, or were edited by hand.

Nothing here raises for what a file contains. What could not be read becomes a `Note`, and the page shows it: a number
that is missing must not look like a number that is right. A cut last line of a .jsonl file is normal (the run was
writing it); any other unreadable line is damage and is reported as such.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

Level = Literal["error", "warning", "note"]

# libyaml where PyYAML was built with it: 8 times as fast, which is felt over a thousand runs.
_YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(slots=True, frozen=True)
class Note:
    """Something about the folder's data that its reader has to know. "error": a number on the page may be wrong."""

    level: Level
    text: str


def read_json(path: Path, notes: list[Note]) -> dict[str, Any]:
    """The object in a .json file; {} when it is absent (no note: that is for the caller to judge) or unreadable."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(Note("error", f"{path.name} cannot be read ({type(error).__name__})"))
        return {}
    if not isinstance(value, dict):
        notes.append(Note("error", f"{path.name} holds a {type(value).__name__} in place of an object"))
        return {}
    return value


def read_lines(path: Path, notes: list[Note]) -> Iterator[dict[str, Any]]:
    """The objects of a .jsonl file, one line at a time; nothing when the file is absent."""
    damaged = 0
    first = 0
    try:
        with path.open("rb") as file:  # bytes: only \n ends a line, and invalid UTF-8 is replaced, not fatal
            for number_, raw in enumerate(file, start=1):
                if raw.isspace():
                    continue
                try:
                    value = json.loads(raw.decode("utf-8", errors="replace"))
                except (ValueError, RecursionError):
                    value = None
                if isinstance(value, dict):
                    yield value
                elif raw.endswith(b"\n"):
                    damaged += 1
                    first = first or number_
                else:
                    notes.append(Note("note", f"{path.name}: the last line is cut off and left out"))
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(Note("error", f"{path.name} cannot be read to its end ({type(error).__name__})"))
    if damaged:
        lines = "1 line is" if damaged == 1 else f"{damaged:,} lines are"
        notes.append(Note("error", f"{path.name}: {lines} unreadable (the first is line {first}) and missing here"))


def read_yaml(path: Path, notes: list[Note]) -> Any:
    """The value of a YAML file; None when it is absent or unreadable."""
    try:
        return yaml.load(path.read_bytes().decode("utf-8", errors="replace"), Loader=_YAML_LOADER)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(Note("error", f"{path.name} cannot be read ({type(error).__name__})"))
        return None


def read_config(folder: Path, notes: list[Note]) -> dict[str, Any]:
    """The composed config as Hydra saved it (interpolations unresolved)."""
    value = read_yaml(folder / ".hydra" / "config.yaml", notes)
    return value if isinstance(value, dict) else {}


def read_overrides(folder: Path, notes: list[Note]) -> dict[str, str]:
    """The overrides of a job, {"rollout.max_staleness": "4"}; Hydra's + and ~ stay with the key."""
    value = read_yaml(folder / ".hydra" / "overrides.yaml", notes)
    items = [str(item) for item in value] if isinstance(value, list) else []
    return {key: text for key, _, text in (item.partition("=") for item in items)}


def read_choices(folder: Path) -> dict[str, str]:
    """Which file each config group took, {"model": "tiny", "loss": "ppo_clip"}.

    `.hydra/hydra.yaml` is 150 lines of which five matter, so they are cut out in place of parsing it all.
    """
    try:
        text = (folder / ".hydra" / "hydra.yaml").read_text("utf-8", errors="replace")
    except OSError:
        return {}
    block = re.search(r"^    choices:\n((?:      .*\n?)+)", text, re.MULTILINE)
    pairs = re.findall(r"^      ([\w@./-]+): (\S+)$", block[1], re.MULTILINE) if block else []
    return {key: value for key, value in pairs if not key.startswith("hydra/")}


def lookup(config: Mapping[str, Any], key: str, depth: int = 5) -> Any:
    """`config["a"]["b"]` for key "a.b", None when absent; a value that is just "${c.d}" is followed."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str) and depth and (reference := re.fullmatch(r"\$\{([\w.]+)\}", value)):
        return lookup(config, reference[1], depth - 1)
    return value


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss": {"clip": 0.2}} -> {"loss.clip": 0.2}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def number(value: Any) -> float | None:
    """A finite number, else None (NaN, infinities, text, lists, integers beyond a float)."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return value + 0 if math.isfinite(value) else None  # + 0: True becomes 1
    except OverflowError:
        return None


def text(value: Any) -> str:
    """A string for the page out of whatever stands in a field that should hold one."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
