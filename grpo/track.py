"""Mirror of the run folder on Weights & Biases (`track=wandb`). The disk stays the truth: see grpo/record.py.

Offline without a network (`track.mode=offline`, or WANDB_MODE); a resumed run goes on as the same wandb run. The
recorder catches whatever is raised here. wandb is imported only when it is used.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROLLOUTS_SHOWN = 64  # completions of a step that go into wandb's table; rollouts.jsonl has all


def sweep_of(folder: Path) -> str | None:
    """The name of the sweep whose job this folder is: Hydra writes multirun.yaml beside its jobs before the first."""
    return folder.parent.name if (folder.parent / "multirun.yaml").exists() else None


class WandbMirror:
    """One wandb run, started by the first record, finished in every ending."""

    def __init__(self, *, project: str, entity: str | None, group: str | None, mode: str) -> None:
        if mode not in ("online", "offline", "disabled"):
            raise ValueError(f"track.mode={mode!r}: choose online, offline or disabled")
        self.project = project
        self.entity = entity
        self.group = group
        self.mode = mode
        self._run: Any = None

    def start(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        """Called once, before the first record. The run's id follows from its folder, so a resume finds it."""
        import wandb

        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group or sweep_of(folder),
            mode=self.mode,  # type: ignore[arg-type]
            name=name,
            id=hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest(),
            resume="allow",
            dir=str(folder),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")

    def metrics(self, line: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in line.items() if value is not None})

    def evaluation(self, line: Mapping[str, Any]) -> None:
        name = line["name"]
        values = {key: line[key] for key in ("accuracy", "reward", "low", "high") if line.get(key) is not None}
        self._run.log({"step": line["step"], **{f"eval/{name}/{key}": value for key, value in values.items()}})

    def rollouts(self, step: int, lines: list[dict[str, Any]]) -> None:
        import wandb

        columns = ["step", "group", "index", "prompt", "completion", "reward", "advantage", "lag", "outcome"]
        rows = [[line[c] for c in columns] for line in lines[:ROLLOUTS_SHOWN]]
        self._run.log({"step": step, "rollouts": wandb.Table(columns=columns, data=rows)})

    def close(self, state: str, summary: Mapping[str, Any]) -> None:
        self._run.summary["state"] = state
        for name in ("objective", "trained_fraction", "seconds"):
            if summary.get(name) is not None:
                self._run.summary[name] = summary[name]
        self._run.finish(exit_code=0 if state == "finished" else 1)
