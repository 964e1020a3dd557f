"""What each step consumed, token by token, so that it can be computed again (`grpo.replay`): train.record_tokens=true.

    tokens/step_000021.safetensors      one file a step, written aside and renamed: a file that is there is whole
    tokens/tokenizer.json               of the `tokenizers` package, so that ids are texts wherever the folder goes

Arrays in stream order; a prompt is there once for its group (G groups, C completions, P prompt, T completion tokens):

    prompt_ids [P], prompt_lengths [G], places [G] (in the stream), group_sizes [G] (completions), discarded [G]
    completion_ids [T], completion_lengths, indices, finish_reasons, outcomes [C]
    logprobs float32 (the sampler's), lags (the step's version - the token's) [sampled tokens, T without observations]
    policy_logprobs float32 (the trainer's before the batch's first update; NaN: not trained) [sampled tokens]
    turns [C] (how many; 0 without an environment), turn_tokens, turn_by_policy [all turns]
    rewards, advantages, rewards/<name> [C] float64 (NaN: not scored)

discarded, finish_reasons and outcomes are codes into lists of words in the header.

Whole numbers have the narrowest type that holds them: with a vocabulary up to 65,536 a token takes 11 bytes, else 13.
The header holds the step, the version it trained at, and the facts that belong to the numbers (loss, temperature, ...),
as JSON. safetensors is a table of offsets and raw bytes: reading runs no code.

Left out: texts and columns, which rollouts.jsonl and the data have.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from grpo.durable import flush
from grpo.types import Completion, Group, Prompt, Turn

FOLDER = "tokens"
TOKENIZER = "tokenizer.json"
FORMAT = "1"


@dataclass(slots=True, frozen=True)
class TokenRecord:
    """One step's record. `version` is the trainer's when it trained; `facts` are what the run said of its settings.

    `groups` are as the step got them, in flight and without text; the rewards are those that advantages were computed
    from. `advantages` and `outcomes` are what the step made of their completions, in order.
    """

    step: int
    version: int
    facts: dict[str, Any]
    groups: list[Group]
    advantages: list[float | None]
    outcomes: list[str]


@dataclass(slots=True, frozen=True)
class TokenRecorder:
    """Writes the records of one run. facts: JSON values that say how the steps are trained, part of every record."""

    folder: Path
    facts: dict[str, Any] = field(default_factory=dict)
    _unsynced: list[Path] = field(default_factory=list)

    def write(self, step: int, version: int, groups: Sequence[Group]) -> Path:
        """The record of one step, after its completions have their outcome. OSError when the disk is full."""
        target = file_of(self.folder, step)
        target.parent.mkdir(exist_ok=True)
        arrays, words = _arrays(version, groups)
        header = {"format": FORMAT, "step": step, "version": version, "facts": self.facts, **words}
        aside = target.with_name(target.name + ".tmp")
        # save_file would hide a full disk in an error of its own, and keep other users from reading
        aside.write_bytes(save(arrays, {key: json.dumps(value) for key, value in header.items()}))
        self._unsynced.append(aside.replace(target))
        return target

    def sync(self) -> None:
        """Wait until every record so far is on the disk, its name too."""
        for path in self._unsynced:
            flush(path)
        if self._unsynced:
            flush(self.folder / FOLDER)
        self._unsynced.clear()


def recorder_of(folder: Path, facts: dict[str, Any], tokenizer: Any) -> TokenRecorder:
    """The recorder of a run, with its tokenizer (a transformers one) beside the records, if that has a Rust half."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        target = folder / FOLDER / TOKENIZER
        target.parent.mkdir(exist_ok=True)
        target.write_text(backend.to_str(), encoding="utf-8")
    return TokenRecorder(folder, facts)


def replay_facts(config: dict[str, Any], model: str, reward_weights: dict[str, float]) -> dict[str, Any]:
    """What `grpo.replay` needs to know of a run: `config` is resolved, `model` where the initial weights are."""
    return {
        "model": model,
        "loss": config["loss"],
        "temperature": config["rollout"]["temperature"],
        "minibatches": config["train"]["minibatches"],
        "reward_weights": reward_weights,
    }


def file_of(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step_{step:06d}.safetensors"


def recorded_steps(folder: Path) -> list[int]:
    """The steps of a run folder that have a record."""
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / FOLDER).glob("step_*.safetensors"))


def cut_back(folder: Path, step: int) -> None:
    """Remove what a killed run has written after `step`, as the line files lose their later lines."""
    for path in (folder / FOLDER).glob("step_*"):
        number = path.name.removeprefix("step_").partition(".")[0]
        if path.suffix == ".tmp" or int(number) > step:
            path.unlink()


def read(folder: Path, step: int, places: Collection[int] | None = None) -> TokenRecord:
    """The record of a step, or of its groups at these places of the stream.

    Raises ValueError for one that is not there or damaged.
    """
    path = file_of(folder, step)
    try:
        with safe_open(path, "np") as file:
            header = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}, this version reads {FORMAT!r}")
        groups, chosen = _groups(arrays, header, places)
        advantages = _optional(arrays["advantages"][chosen])
        outcomes = [header["outcomes"][code] for code in arrays["outcomes"][chosen]]
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no record of step {step} (train.record_tokens=true makes them)") from None
    except (SafetensorError, OSError, ValueError, KeyError, IndexError, AssertionError) as error:
        raise ValueError(f"{path}: damaged ({type(error).__name__}: {error})") from error
    return TokenRecord(header["step"], header["version"], header["facts"], groups, advantages, outcomes)


# ---- groups to arrays and back ----


def _arrays(version: int, groups: Sequence[Group]) -> tuple[dict[str, NDArray[Any]], dict[str, list[str]]]:
    completions = [c for g in groups for c in g.completions]
    for c in completions:
        assert sum(c.mask) == len(c.logprobs) == len(c.versions), f"{c.group}/{c.index}: one entry per sampled token"
    texts = {
        "discarded": [g.discarded or "" for g in groups],
        "finish_reasons": [c.finish_reason for c in completions],
        "outcomes": [c.outcome for c in completions],
    }
    words = {name: sorted(set(values)) for name, values in texts.items()}
    names = sorted({name for c in completions for name in c.rewards})
    arrays = {
        "prompt_ids": _whole([x for g in groups for x in g.prompt.token_ids]),
        "prompt_lengths": _whole([len(g.prompt.token_ids) for g in groups]),
        "places": np.array([g.index for g in groups], np.int64),
        "group_sizes": _whole([len(g.completions) for g in groups]),
        "completion_ids": _whole([x for c in completions for x in c.token_ids]),
        "completion_lengths": _whole([len(c.token_ids) for c in completions]),
        "logprobs": np.array([x for c in completions for x in c.logprobs], np.float32),
        "lags": _whole([version - x for c in completions for x in c.versions]),
        "policy_logprobs": np.array(
            [x for c in completions for x in c.policy_logprobs or [np.nan] * len(c.logprobs)], np.float32
        ),
        "turns": _whole([len(c.turns) for c in completions]),
        "turn_tokens": _whole([turn.tokens for c in completions for turn in c.turns]),
        "turn_by_policy": _whole([turn.by_policy for c in completions for turn in c.turns]),
        "indices": _whole([c.index for c in completions]),
        "rewards": _numbers([c.reward for c in completions]),
        "advantages": _numbers([c.advantage for c in completions]),
        **{f"rewards/{name}": _numbers([c.rewards.get(name) for c in completions]) for name in names},
        **{name: _whole([words[name].index(value) for value in values]) for name, values in texts.items()},
    }
    return arrays, words


def _groups(
    arrays: dict[str, NDArray[Any]], header: dict[str, Any], places: Collection[int] | None
) -> tuple[list[Group], list[int]]:
    """The groups, and which of the record's completions are theirs."""
    version = header["version"]
    prompts = _split(arrays["prompt_ids"], arrays["prompt_lengths"])
    ids = _split(arrays["completion_ids"], arrays["completion_lengths"])
    tokens, by_policy = (_split(arrays[name], arrays["turns"]) for name in ("turn_tokens", "turn_by_policy"))
    counts = [
        int(own[sampled.astype(bool)].sum()) if len(own) else len(row)
        for own, sampled, row in zip(tokens, by_policy, ids, strict=True)
    ]
    logprobs, lags = (_split(arrays[name], np.array(counts, np.int64)) for name in ("logprobs", "lags"))
    policy = _split(arrays["policy_logprobs"], np.array(counts, np.int64)) if "policy_logprobs" in arrays else None
    rewards = _optional(arrays["rewards"])
    by_name = {name.removeprefix("rewards/"): _optional(x) for name, x in arrays.items() if name.startswith("rewards/")}
    discarded = [header["discarded"][code] or None for code in arrays["discarded"]]
    assert int(arrays["group_sizes"].sum()) == len(ids) == len(rewards), "as many completions as the groups say"
    groups = []
    chosen: list[int] = []
    at = 0
    for number, (place, size) in enumerate(zip(arrays["places"].tolist(), arrays["group_sizes"].tolist(), strict=True)):
        own = range(at, at + size)
        at += size
        if places is not None and place not in places:
            continue
        chosen += own
        completions = [
            Completion(
                group=place,
                index=int(arrays["indices"][i]),
                token_ids=ids[i].tolist(),
                logprobs=logprobs[i].tolist(),
                versions=[version - lag for lag in lags[i].tolist()],
                finish_reason=header["finish_reasons"][arrays["finish_reasons"][i]],
                reward=rewards[i],
                rewards={name: values[i] for name, values in by_name.items()},
                turns=[
                    Turn(bool(sampled), count, "")
                    for sampled, count in zip(by_policy[i].tolist(), tokens[i].tolist(), strict=True)
                ],
                policy_logprobs=[] if policy is None or np.isnan(policy[i]).any() else policy[i].tolist(),
            )
            for i in own
        ]
        prompt = Prompt(place, "", "", prompts[number].tolist(), {})
        groups.append(Group(place, prompt, completions, discarded[number]))
    return groups, chosen


def _whole(values: list[int]) -> NDArray[Any]:
    """The narrowest type that holds all of them."""
    low, high = (min(values), max(values)) if values else (0, 0)
    kind: Any = np.int64
    for narrower in (np.int32, np.uint16, np.uint8):
        if np.iinfo(narrower).min <= low and high <= np.iinfo(narrower).max:
            kind = narrower
    return np.array(values, kind)


def _numbers(values: list[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _optional(values: NDArray[Any]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]


def _split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    borders = np.cumsum(lengths.astype(np.int64))
    assert borders[-1:].sum() == len(flat), "the lengths add up to the tokens"
    return np.split(flat, borders[:-1]) if len(lengths) else []
