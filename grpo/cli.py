"""The command line around Hydra: a resumed run gets the configuration that it had, and a mistake one line.

    python run.py resume=outputs/<run or checkpoint> [key=value ...]

runs in that run's folder, with that run's configuration file and overrides; what is given besides wins. Left out:
resuming a whole sweep (ask again for the same sweep folder: `hydra.sweep.dir=<sweep>`; what is finished is skipped).

Exit status: 0 done, 1 a run failed, 2 a mistake in the command or the configuration, 128 + n ended by signal n.
"""

import difflib
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo import distributed, sweep
from grpo.rollout import kept

FULL_ERROR = "HYDRA_FULL_ERROR"
# What Hydra raises over a command, a configuration or a folder that cannot be made. Failures of a run do not get here.
MISTAKES = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)
# Hydra's flags, and those that take the next argument as their value.
FLAGS = [
    "-h",
    "--help",
    "--hydra-help",
    "--version",
    "--resolve",
    "-r",
    "--run",
    "-m",
    "--multirun",
    "-sc",
    "--shell-completion",
    "-i",
    "--info",
]
VALUE_FLAGS = [
    "-cn",
    "--config-name",
    "-cd",
    "--config-dir",
    "-cp",
    "--config-path",
    "-c",
    "--cfg",
    "-p",
    "--package",
    "--experimental-rerun",
]
QUOTES = """'key="a value"'"""
# Mappings that are the user's to fill. Hydra takes a new key in them only as `++key=value`, which nobody would guess.
OPEN = re.compile(r"data(\.parts\.[^.=]+)?\.(evals|weights|chat_template_kwargs|environment)[.=]")


def start(main: Callable[[], Any], argv: list[str]) -> None:
    """Run Hydra's `main` on `argv`. A mistake is one line on stderr and exit status 2."""
    traceback = os.environ.get(FULL_ERROR) == "1"
    if isinstance(sys.stdout, io.TextIOWrapper):  # a result or a reason is printed whatever characters it holds
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ[FULL_ERROR] = "1"  # Hydra then hands over its errors, which it would print over many lines
    ending: BaseException | None = None
    try:
        prepare(argv)
        main()
    except BaseException as error:
        ending = error
    finally:
        kept.servers.close()
    status = sweep.finish(ending)
    if ending is None or isinstance(ending, sweep.JobFailed | sweep.Stopped):
        sys.exit(status or 0)
    if isinstance(ending, KeyboardInterrupt):  # before or after training, which has its own handlers
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    if isinstance(ending, MISTAKES) and not traceback:
        print(f"error: {explain(ending)}", file=sys.stderr)
        sys.exit(2)
    raise ending


def explain(error: Exception) -> str:
    """One line that names what the user wrote and what would be right."""
    lines: list[str] = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = ", ".join(o for o in error.options or () if not o.startswith("_"))
        if group:
            return (
                f"{group}={choice}: there is no such choice; {f'choose one of {options}' if options else 'none at all'}"
            )
        return f"--config-name {choice}: there is no such file; for those of sweeps/ add --config-dir sweeps"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read ({lines[0]}); write key=value, special characters in quotes: {QUOTES}"
    if isinstance(cause, OmegaConfBaseException) and lines[0].startswith("Could not override"):
        return f"{cause.full_key}: no such key{_similar(cause)}; --help shows all keys"
    if lines[0].startswith("Ambiguous value"):
        override = re.search(r"'(.*)'", lines[0])
        key, _, values = (override[1] if override else "").partition("=")
        return f"{key}={values}: several values; add -m for a sweep over them, or write a list: '{key}=[{values}]'"
    if isinstance(error, OSError) and error.filename:
        where = "runs are written to hydra.run.dir=<folder>, sweeps to hydra.sweep.dir=<folder>"
        return f"{error.filename}: {error.strerror}; {where}"
    if isinstance(error, OmegaConfBaseException):
        return f"{error.full_key}: {lines[0]}" if error.full_key else lines[0]
    return " ".join(lines)


def _similar(error: OmegaConfBaseException) -> str:
    """`; did you mean ...`: keys beside the missing one, or that name anywhere else."""
    node = error.parent_node
    if not isinstance(node, DictConfig) or not isinstance(error.key, str):
        return ""
    prefix = error.full_key[: -len(error.key)] if error.full_key else ""
    near = [prefix + str(k) for k in difflib.get_close_matches(error.key, [str(k) for k in node], n=2)]
    root = node._get_root()
    if isinstance(root, DictConfig):
        groups = [str(g) for g in root if g != "hydra" and isinstance(root[g], DictConfig)]
        near += [f"{group}.{error.key}" for group in groups if error.key in root[group]]
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def prepare(argv: list[str]) -> None:
    """Edit `argv` in place: flags first, new keys where they are allowed, and `resume` brings the saved configuration.
    Raises ValueError."""
    flags, overrides = _split(argv[1:])
    distributed.check_command(multirun=bool({"-m", "--multirun"} & set(flags)))
    overrides = opened(overrides)
    argv[1:] = [*flags, *overrides]
    given = [a for a in overrides if _key(a) == "resume"]
    if not given or given[-1] in ("resume=null", "resume="):
        return
    if {"-m", "--multirun"} & set(flags):
        raise ValueError(f"{given[-1]}: goes on with one run, -m starts several")
    path = Path(given[-1].partition("=")[2].strip("'\"")).expanduser().resolve()
    run = run_folder(path)
    saved = [str(o) for o in _yaml(run / ".hydra" / "overrides.yaml")]
    named = {_key(a) for a in overrides}
    kept = [o for o in saved if _key(o) not in named and _key(o) not in ("resume", "dry_run", "resume_force")]
    rest = [a for a in overrides if a not in given]
    argv[1:] = [
        *flags,
        *_config_flags(run, flags),
        *rest,
        *kept,
        f"resume={_quoted(path)}",
        f"hydra.run.dir={_quoted(run)}",
        "hydra.mode=RUN",  # a job of a sweep goes on alone
    ]


def opened(overrides: list[str]) -> list[str]:
    """Overrides as Hydra wants them: new keys are allowed in the mappings of OPEN."""
    return [f"++{override}" if OPEN.match(override) else override for override in overrides]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(Hydra's flags with their values, overrides). Hydra's parser refuses a flag between overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    for argument in arguments:
        name = argument.partition("=")[0]
        if flags and flags[-1] in VALUE_FLAGS:
            flags.append(argument)
        elif not argument.startswith("-"):
            overrides.append(argument)
        elif name in (*FLAGS, *VALUE_FLAGS):
            flags.append(argument)
        else:
            key = argument.lstrip("-").replace("-", "_")
            right = key if "=" in key else f"{key}=<value>"
            raise ValueError(f"{argument}: no such flag; keys are written without dashes: {right}")
    return flags, overrides


def run_folder(path: Path) -> Path:
    """The run folder that a path to resume from belongs to. Raises ValueError."""
    if not path.exists():
        raise ValueError(f"resume={path}: there is no such folder")
    for folder in (path, path.parent.parent):
        if (folder / ".hydra" / "overrides.yaml").is_file():
            return folder
    if (path / "multirun.yaml").is_file():
        raise ValueError(
            f"resume={path}: this is a sweep; ask for it again with hydra.sweep.dir={path}, or resume one of its jobs"
        )
    raise ValueError(f"resume={path}: neither a run folder (no .hydra/overrides.yaml) nor a checkpoint in one")


def checkpoint_of(value: str | None, steps: int) -> Path | None:
    """The checkpoint that `resume` means. Raises ValueError when there is none, or none of `steps` is left to make."""
    if value is None:
        return None
    from grpo.checkpoint import find_whole

    checkpoint, progress = find_whole(Path(value))
    made = progress["step"]
    state = sweep.read_json(checkpoint.parent.parent / "status.json").get("state")
    if made > steps or (made == steps and state == "finished"):
        raise ValueError(
            f"resume={value}: has made {made} of train.steps={steps}; to go on, give more: train.steps=<n>"
        )
    return checkpoint


def last_checkpoint(folder: Path, steps: int) -> Path | None:
    """Where a begun job of a sweep goes on. Raises ValueError; where no checkpoint can be read, with how to begin anew.

    That is the user's to decide: a disk that cannot be read now may be readable later, and beginning anew deletes.
    """
    from grpo.checkpoint import Damaged

    try:
        return checkpoint_of(str(folder), steps)
    except Damaged as damage:
        what = str(damage).rpartition("; ")[0]
        raise ValueError(
            f"{what}; no checkpoint of this job can be read: delete {folder / 'checkpoints'}, and the same command "
            "begins the job anew"
        ) from damage


def _config_flags(run: Path, given: list[str]) -> list[str]:
    """The primary configuration of a run, where it is not the usual one: a sweep's file, or the user's own."""
    saved = OmegaConf.create(_yaml(run / ".hydra" / "hydra.yaml"))
    flags = []
    name = OmegaConf.select(saved, "hydra.job.config_name")
    if name and name != "config" and not any(a.startswith(("-cn", "--config-name")) for a in given):
        flags += ["--config-name", name]
    sources = OmegaConf.select(saved, "hydra.runtime.config_sources") or []
    folders = [source.path for source in sources if source.provider == "command-line"]
    if folders and not any(a.startswith(("-cd", "--config-dir")) for a in given):
        flags += ["--config-dir", folders[0]]
    return flags


def _yaml(file: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{file}: cannot be read ({type(error).__name__})") from error


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "\\'") + "'"
