"""What a multirun needs around its jobs: skip what is finished, each failure in its own folder, a table at the end.

Hydra runs the jobs in one process and raises the first failure after the last job; `on_multirun_end` is not called
then. So the sweep's folder is noted at its start, and `finish()` reads the job folders when everything is over.

Asked for again with the same folder, a job is what its folder holds: finished with these settings, it is skipped;
begun with these settings, it goes on from its last checkpoint, or begins anew without one; of other settings, it is
refused and nothing in the folder changes (unless that job never made a step: then a mistake in it was mended).
"""

import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo import gpu_slots, isolation
from grpo.checkpoint_folder import complete
from grpo.claim import differences, discard, hidden, save_config, task_overrides
from grpo.rollout import kept
from grpo.sweep_progress import SweepProgress, count_jobs

log = logging.getLogger(__name__)

BASIC = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"  # one job after the other, in this process

_folder: list[Path] = []
_failures: dict[str, str] = {}  # job -> why
_jobs: list[SweepProgress] = []


class NoteFolder(Callback):
    """Hydra's callback (conf/config.yaml): what is done around the jobs.

    Under a launcher that gives jobs processes of their own, those see `on_job_*` and no start of a multirun.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _folder.append(Path(config.hydra.sweep.dir).resolve())
        _jobs.append(SweepProgress(count_jobs(config)))
        kept.servers.open(_folder[-1])
        if config.hydra.launcher._target_ != BASIC:
            gpu_slots.announce()

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        if _jobs:
            _jobs[-1].start()
        file = Path(config.hydra.sweep.dir) / "multirun.yaml"
        if config.hydra.mode == RunMode.MULTIRUN and file.exists():  # Hydra has written it, secrets included
            OmegaConf.save(hidden(OmegaConf.load(file)), file)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        failed = job_return.status == JobStatus.FAILED
        if failed:
            isolation.forget_frames(job_return._return_value)
        isolation.clean()
        if not _jobs:
            return
        _jobs[-1].end(failed=failed)
        if config.dry_run is not True and (line := _jobs[-1].line()):
            Console().print(line, highlight=False, soft_wrap=True)


class JobFailed(Exception):  # noqa: N818
    """A job of a sweep failed; its folder has the reason. The sweep goes on with the others."""


class Stopped(BaseException):
    """A job of a sweep failed and `fail_fast` is set. Hydra goes on after an Exception."""


class OtherJob(ValueError):  # noqa: N818
    """The folder holds another job."""


@dataclass(slots=True)
class Before:
    """What an earlier start of this job has left: its summary if it has finished, its last checkpoint if it has one."""

    summary: dict[str, Any] | None = None
    checkpoint: Path | None = None


def before(folder: Path, cfg: DictConfig) -> Before:
    """Raises OtherJob when the folder's numbers would be taken for this job's."""
    if not any((folder / name).exists() for name in ("status.json", "metrics.jsonl", ".hydra")):
        return Before()
    status = read_json(folder / "status.json")
    checkpoints = complete(folder / "checkpoints")
    changed = differences(folder, cfg)
    if changed:
        if not _progress(folder):
            return Before()
        key, (old, new) = next(iter(changed.items()))
        raise OtherJob(f"{folder}: holds a job with {key}={old}, not {new}; choose another hydra.sweep.dir")
    if status.get("state") == "finished":
        return Before(summary=read_json(folder / "summary.json"))
    return Before(checkpoint=checkpoints[-1] if checkpoints else None)


def surroundings(cfg: DictConfig, hydra: HydraConf) -> contextlib.AbstractContextManager[None]:
    """What a job needs around it where jobs run at the same time: GPUs of its own. SLURM gives them itself."""
    if _jobs or hydra.launcher._target_.endswith(".SlurmLauncher"):
        return contextlib.nullcontext()
    return gpu_slots.own_gpus(Path(hydra.sweep.dir).resolve(), hydra.job.num, cfg.gpus_per_job)


def skip(job: int) -> None:
    """This job has finished before."""
    print(f"job {job}: finished before, skipped")
    if _jobs:
        _jobs[-1].skipped = True


def refuse(folder: Path, cfg: DictConfig, hydra: HydraConf, error: ValueError) -> JobFailed | Stopped:
    """Leave a job's mistake in its own folder: run.log, status.json. Returns what is to be raised."""
    log.error("refused: %s", error)
    if cfg.dry_run is not True and not _progress(folder):  # what an earlier start has recorded stays as it is
        from grpo.record import Recorder

        save_config(folder, cfg, hydra)
        recorder = Recorder(folder, steps=0, facts={"overrides": task_overrides(hydra)})
        recorder.finish("failed", {"state": "failed", "reason": str(error), "eval": {}}, error)
    return failed(folder, str(error), cfg)


def failed(folder: Path, why: str, cfg: DictConfig) -> JobFailed | Stopped:
    """Note a failure for the end. Returns what is to be raised, which decides whether the sweep goes on."""
    job = _name(folder)
    _failures[job] = why
    return (Stopped if cfg.fail_fast is True else JobFailed)(f"job {job}: {why}")


def finish(error: BaseException | None) -> int | None:
    """After the jobs: a table of all of them and the sweep's report. Returns the exit status; None: it was no sweep.

    error: what ended Hydra's main, if anything did.
    """
    if not _folder:
        return None
    folder = _folder[-1]
    from grpo.report.jobs import find_jobs

    jobs = find_jobs(folder)
    if not jobs:  # dry runs, or a mistake before the first job
        if [p.name for p in folder.glob("*")] == ["multirun.yaml"]:
            (folder / "multirun.yaml").unlink()
            discard(folder)
        return 1 if _failures else None
    bad = print_table(folder, jobs)
    last = bool(_jobs) and _jobs[-1].started == _jobs[-1].total
    if isinstance(error, SystemExit | KeyboardInterrupt | Stopped) and not last:
        print(f"not all jobs were started; the others run with the same command and hydra.sweep.dir={folder}")
    return 1 if bad or _failures else 0


def print_table(folder: Path, jobs: list[Path]) -> int:
    """One line a job; returns how many did not finish."""
    table = Table(box=None, pad_edge=False)
    for column in ("job", "state", "before", "after", "seconds", "overrides"):
        table.add_column(column)
    reasons = dict(_failures)
    statuses = {job: read_json(job / "status.json") for job in jobs}
    shared = set.intersection(*(set(status.get("overrides", [])) for status in statuses.values()))
    bad = 0
    for job in jobs:
        status, result = statuses[job], read_json(job / "summary.json")
        state = status.get("state", "unknown")
        if state != "finished":
            bad += 1
            reasons.setdefault(_name(job), result.get("reason") or state)
        first: dict[str, Any] = next(iter(result.get("eval", {}).values()), {})
        cells = [
            _name(job),
            state,
            *(_rate(first.get(when, {}).get("reward")) for when in ("before", "after")),
            f"{result['seconds']:.0f}" if "seconds" in result else "-",
            " ".join(o for o in status.get("overrides", []) if len(jobs) == 1 or o not in shared),
        ]
        table.add_row(*map(Text, cells))  # Text: an override may look like rich's markup
    console = Console()
    console.print(table, highlight=False, soft_wrap=True)
    for name, why in reasons.items():
        print(f"job {name}: {why.splitlines()[0]}", file=sys.stderr)
    from grpo import report

    console.print(f"report  {report.build_sweep(folder)}", highlight=False, soft_wrap=True)
    return bad


def _progress(folder: Path) -> bool:
    """Whether a job in this folder has anything to lose."""
    return bool(read_json(folder / "status.json").get("step")) or any((folder / "checkpoints").glob("step_*"))


def _name(job: Path) -> str:
    return job.relative_to(_folder[-1]).as_posix() if _folder and _folder[-1] in job.parents else job.name


def _rate(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def read_json(path: Path) -> dict[str, Any]:
    """What is in a file; nothing where it is absent or unreadable."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content
