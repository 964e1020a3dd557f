"""Whose a run folder is. Taken when every check has passed, held until the run ends, so that:

- a refused command leaves nothing behind, and nothing of an older run is touched before it is sure that it may be;
- a folder holds one run. It is continued only on request (resume, or the same job of a sweep), only with the settings
  that its data depends on, and never by two processes at once;
- what is continued has one timeline: what came after the checkpoint is gone. Not at once: `claim` gives a function that
  does it, and writes the settings down, for when the servers hold the weights and the run does go on. One that is
  refused before, fails or is killed leaves the folder as it was.

So `.hydra/` is written here, in place of by Hydra, which would write it before anything is checked (conf/config.yaml
turns that off).
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from grpo import token_record
from grpo.checkpoint_folder import clear, complete, put_aside
from grpo.durable import remove_atomic, write_atomic
from grpo.mask import MASK, masked, masked_text
from grpo.record import FILES

log = logging.getLogger(__name__)

# Where and how a run is asked for, not what it computes: may differ between the parts of one run.
ELSEWHERE = (
    *("dry_run", "resume", "resume_force", "fail_fast", "gpus_per_job"),
    *("rollout.urls", "rollout.host", "rollout.port", "rollout.api_key", "rollout.keep_server"),
)
# What a checkpoint counts in, so that with another value the run is no longer the one that was begun: the cursor counts
# prompts in this order, taken so many a step. With resume_force it goes on all the same.
COUNTED = ("seed", "train.batch_size", "rollout.group_size")
# What a checkpoint holds, so that another value would not be in force, whatever is asked for.
FIXED = (
    "model.path",
    "model.dtype",
    "model.optimizer",
    "model.betas",
    "model.weight_decay",
    "model.lora_rank",
    "model.lora_alpha",
    "model.lora_targets",
)
# Those that older runs lack, and what they computed.
YOUNGER = {"model.lora_rank": 0, "model.lora_alpha": 32.0, "model.lora_targets": "all-linear"}


@contextlib.contextmanager
def claim(
    folder: Path, cfg: DictConfig, hydra: HydraConf, checkpoint: Path | None, *, again: bool
) -> Iterator[Callable[[], None]]:
    """The folder is ours inside the `with` block. Raises ValueError when it cannot be. Gives what a resume does when it
    goes on.

    checkpoint: one of this folder, to go on from. again: without a checkpoint, begin the folder's job anew (sweeps).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if checkpoint is not None:
            for line in _changes(folder, cfg):
                log.warning("resumed with another setting: %s", line)
        elif again:
            for name in (*FILES, "summary.json"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / token_record.FOLDER, ignore_errors=True)
            clear(folder / "checkpoints")
        else:
            _begin(folder)

        def go_on() -> None:
            if checkpoint is not None:
                forget_after(checkpoint)
                save_config(folder, cfg, hydra)

        if checkpoint is None:
            save_config(folder, cfg, hydra)
        yield go_on


def save_config(folder: Path, cfg: DictConfig, hydra: HydraConf) -> None:
    """`.hydra/` as Hydra writes it, without what belongs to one command (resume, dry_run) in the overrides."""
    aside = folder / ".hydra"
    aside.mkdir(parents=True, exist_ok=True)
    # Each whole or as it was: a resume that is killed here, or finds the disk full, can be asked for again.
    write_atomic(aside / "config.yaml", OmegaConf.to_yaml(hidden(cfg)))
    write_atomic(aside / "hydra.yaml", OmegaConf.to_yaml(hidden(OmegaConf.create({"hydra": hydra}))))
    write_atomic(aside / "overrides.yaml", OmegaConf.to_yaml(OmegaConf.create(task_overrides(hydra))))


def hidden(cfg: Any) -> Any:
    """A configuration with its secrets masked."""
    return OmegaConf.create(masked(OmegaConf.to_container(cfg, resolve=False)))


def task_overrides(hydra: HydraConf) -> list[str]:
    """What the user has changed, as written; secrets are left out, since a mask would be taken for one on resume."""
    overrides: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides = [o for o in overrides if masked_text(o) == o]
    return [o for o in overrides if o.partition("=")[0].lstrip("+~") not in ("resume", "resume_force", "dry_run")]


def differences(folder: Path, cfg: DictConfig) -> dict[str, tuple[Any, Any]]:
    """Keys with (the value of the run in this folder, the value in `cfg`), where they differ. Raises ValueError."""
    file = folder / ".hydra" / "config.yaml"
    try:
        before = _flat(OmegaConf.to_container(OmegaConf.load(file), resolve=False))
    except Exception as error:  # YAML's and OmegaConf's kinds; a folder without the file
        raise ValueError(
            f"{file}: cannot be read ({type(error).__name__}), so what was run there is unknown"
        ) from error
    now = _flat(masked(OmegaConf.to_container(cfg, resolve=False)))
    keys = [key for key in {**before, **now} if key not in ELSEWHERE]
    return {k: (before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)}


def fingerprints(report: Any, path: str = "") -> dict[str, str]:
    """Of every table in a data set's report, by its place there."""
    found: dict[str, str] = {}
    for key, value in report.items():
        if key == "fingerprint":
            found[path] = value
        elif isinstance(value, dict):
            found |= fingerprints(value, f"{path}.{key}" if path else str(key))
    return found


def check_rows(before: dict[str, str] | None, now: dict[str, str], *, forced: bool) -> None:
    """Raises ValueError when the rows are not those that the run began with: its cursor counts in those."""
    if before is None or before == now:
        return
    where = ", ".join(sorted(k for k in {**before, **now} if before.get(k) != now.get(k)))
    if not forced:
        raise ValueError(
            f"data: the rows of {where} are not those that the run began with (other content or order); put them back, "
            "or resume_force=true goes on with these"
        )
    log.warning("resumed with other rows than the run began with: %s", where)


def forget_after(checkpoint: Path) -> None:
    """Remove the checkpoints after the one that is gone on from: their steps will be made again. One that cannot be
    read is put aside instead: it may be why the run goes on from this one, and the disk may be read another day."""
    from grpo.checkpoint import Damaged, compare, inspect

    later = [path for path in complete(checkpoint.parent) if path.name > checkpoint.name]
    if later:  # before they go, so that it names one that is there
        write_atomic(checkpoint.parent / "latest", checkpoint.name + "\n")
    for path in reversed(later):  # so that what a kill leaves is a timeline
        try:
            inspect(path)
            compare(path)
        except Damaged as damage:
            told = "resuming from %s: %s is damaged (%s), and kept as %s"
            log.warning(told, checkpoint.name, path.name, damage.reason, put_aside(path).name)
        else:
            log.warning("resuming from %s: %s, of a later step, is removed", checkpoint.name, path.name)
            remove_atomic(path)


def note_end(folder: Path, ending: BaseException) -> None:
    """The state of a claimed folder whose run ends before it has a record."""
    with contextlib.suppress(OSError):
        text = json.dumps({"state": "interrupted", "error": {"type": type(ending).__name__, "message": str(ending)}})
        write_atomic(folder / "status.json", text + "\n", durable=False)


def discard(folder: Path) -> None:
    """Take back the folder that Hydra has made, where there is nothing in it; then empty ones above it, below here."""
    here = Path.cwd()
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == ["run.log"]:
            (folder / "run.log").unlink()
        folder.rmdir()
        while here in folder.parent.parents:
            folder = folder.parent
            folder.rmdir()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The kernel drops the lock with the process, however it ends; a pid in a file would outlive it.
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: a run is going on there; end it first, or choose another folder") from None
        except OSError:  # a file system without locks
            log.warning("%s: cannot be locked; see to it that only one run writes there", folder)
        yield
    finally:
        os.close(handle)


def _begin(folder: Path) -> None:
    try:
        with (folder / "status.json").open("x", encoding="utf-8") as file:
            file.write('{"state": "running"}\n')  # the recorder's are to come
    except FileExistsError:
        left = (folder / "status.json").read_text(encoding="utf-8")
        ours = '"state"' in left and '"step"' not in left
        if ours and not (folder / ".hydra" / "overrides.yaml").exists():
            return  # claimed by one that was killed there and then
        raise ValueError(
            f"hydra.run.dir={folder}: holds a run already; go on with it (resume={folder}), or choose another folder"
        ) from None


def _changes(folder: Path, cfg: DictConfig) -> list[str]:
    changed = differences(folder, cfg)
    saved = OmegaConf.load(folder / ".hydra" / "config.yaml")
    if OmegaConf.select(saved, "rollout.api_key") == MASK and not cfg.rollout.api_key:
        raise ValueError(
            "rollout.api_key=null: the run had a key, which is not written down; give it again, or in the environment "
            "variable GRPO_API_KEY"
        )
    for key in (*FIXED, *(() if cfg.get("resume_force") else COUNTED)):
        before, now = changed.get(key, (None, None))
        if before is None and key in YOUNGER:
            before = YOUNGER[key]
        if key in changed and before != now:
            forced = "resume_force=true goes on all the same, or " if key in COUNTED else ""
            raise ValueError(
                f"{key}={now}: the run in {folder} has {key}={before}, and cannot go on with another as the same run; "
                f"{forced}start a new run (model.path=<checkpoint> begins with its weights)"
            )
    return [f"{key}: {before} before, {now} now" for key, (before, now) in changed.items()]


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict) or not node:
        return {prefix: node}
    return {k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}.{key}" if prefix else key).items()}
