"""Files that are whole whenever we are killed, and on the disk when that matters."""

import contextlib
import os
import shutil
from pathlib import Path


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Write aside and rename: a reader sees the old file or the new one, never a half.

    durable: also wait for the disk, so that it outlives the machine; without, it outlives the process.
    """
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # half of it is of no use, and has taken room
            aside.unlink()
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_atomic(folder: Path) -> None:
    """Rename aside (to `.<name>.tmp`) and delete: a reader sees a whole folder or none, whenever we are killed."""
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)
