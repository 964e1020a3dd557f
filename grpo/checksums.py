"""A folder's record of its own bytes: SHA256SUMS, as `sha256sum` writes it and `sha256sum --check` reads it.

A disk can change what was once written whole, in the middle of a tensor, where no format would show it: weights that
have changed are still weights. So a checkpoint is compared with its record before a run goes on from it.
"""

import hashlib
import re
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

NAME = "SHA256SUMS"
READ = (".safetensors", ".pt", ".bin", ".json")  # what a loader may read; other files beside them do not matter


class Sums:
    """Computes the checksums of files in the background (hashing lets go of the interpreter), then writes them down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="checksums")
        self._sums: dict[str, Future[str]] = {}

    def add(self, file: Path) -> None:
        """Begin with one file of the folder, which must not change any more."""
        self._sums[file.relative_to(self.folder).as_posix()] = self._pool.submit(_sha256, file)

    def write(self) -> Path:
        """Wait for all of them and write SHA256SUMS. OSError if a file cannot be read back."""
        try:
            lines = [f"{future.result()}  {name}\n" for name, future in self._sums.items()]
        finally:
            self._pool.shutdown(cancel_futures=True)
        target = self.folder / NAME
        target.write_text("".join(lines), encoding="utf-8")
        return target


def check(folder: Path, *, but: Collection[str] = ()) -> bool:
    """Compare every file of a folder with its record, `but` these. False where there is none, as of earlier versions.

    Raises ValueError that names the first file that has changed or is not recorded, or a record that is not whole;
    OSError for a file that is not there or cannot be read.
    """
    try:
        lines = (folder / NAME).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return False
    recorded: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not (match := re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)):
            raise ValueError(f"line {number} of {NAME} cannot be read")
        recorded[match[2]] = match[1]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix in READ}
    for name in sorted(there - recorded.keys() - set(but)):
        if not name.startswith("."):
            raise ValueError(f"{name} is not in {NAME}")
    recorded = {name: value for name, value in recorded.items() if name not in but}
    with ThreadPoolExecutor(4, thread_name_prefix="checksums") as pool:
        sums = pool.map(_sha256, (folder / name for name in recorded))
        for (name, value), found in zip(recorded.items(), sums, strict=True):
            if found != value:
                raise ValueError(f"{name} is not what was written (its checksum in {NAME} is another)")
    return True


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
