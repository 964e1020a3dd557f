"""The names in a run's folder of checkpoints. No torch here: sweeps and the checks before a run read them too.

step_000100             a complete one
step_000120.damaged     could not be read when the run was resumed; put aside, never counted, read or deleted
"""

import contextlib
import re
import shutil
from pathlib import Path


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    return sorted(p for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name) and p.is_dir())


def clear(folder: Path) -> None:
    """Remove everything of a run that begins anew; what was put aside stays."""
    for path in list(folder.glob("*")):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif ".damaged" not in path.name:
            shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        folder.rmdir()


def put_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is none any more; returns where it is now. OSError if it cannot be."""
    aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
    number = 2
    while aside.exists() or aside.is_symlink():  # a rename would replace an empty folder
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged.{number}")
        number += 1
    checkpoint.rename(aside)
    return aside
