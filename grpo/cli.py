"""What must happen to the command line before Hydra reads it: a resumed run gets the configuration that it had.

    python run.py resume=outputs/<run> [key=value ...]

runs in that run's folder with that run's overrides; what is given besides wins. Left out: resuming a whole sweep
(ask again for the same sweep folder: `hydra.sweep.dir=<sweep>`, what is finished is skipped).
"""

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def prepare(argv: list[str], root: Path) -> None:
    """Edit `argv` in place: paths relative to the caller become absolute, resume brings the saved overrides."""
    given = [a for a in argv[1:] if a.startswith("resume=") and a not in ("resume=null", "resume=")]
    if not given:
        return
    path = Path(given[-1].partition("=")[2].strip("'\"")).expanduser().resolve()
    run = run_folder(path)
    if run is None:
        print(f"error: resume={path}: no run folder with checkpoints, and no checkpoint of one", file=sys.stderr)
        sys.exit(2)
    saved = [str(o) for o in OmegaConf.load(run / ".hydra" / "overrides.yaml")]
    named = {_key(a) for a in argv[1:]}
    kept = [o for o in saved if _key(o) not in named and _key(o) not in ("resume", "dry_run")]
    rest = [a for a in argv[1:] if a not in given]
    argv[1:] = [*rest, *kept, f"resume='{path}'", f"hydra.run.dir='{run}'"]


def run_folder(path: Path) -> Path | None:
    """The run folder that a path to resume from belongs to."""
    for folder in (path, path.parent.parent):
        if (folder / ".hydra" / "overrides.yaml").is_file():
            return folder
    return None


def resume_path(value: str | None) -> Path | None:
    """The checkpoint to go on from. Raises ValueError when there is none."""
    if value is None:
        return None
    from grpo.checkpoint import find

    return find(Path(value))


def position(checkpoint: Path | None) -> dict[str, Any] | None:
    if checkpoint is None:
        return None
    from grpo.checkpoint import load

    progress: dict[str, Any] = load(checkpoint)["progress"]
    return progress


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
