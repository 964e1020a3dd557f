"""`python run.py` in a process of its own, as a user starts it, and what must hold of its folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo.rollout.guard import descendants, title

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.05
OUTLIVED = 20.0  # seconds in which every process of an ended run must be gone (a guard grants its server 5 s)


class Run:
    """One run, under torchrun where it has several ranks.

    Every process that was ever seen below it is remembered, to be looked for afterwards. environment: besides ours.
    """

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        resume: bool = False,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.resumed_after = len(self.lines("metrics")) if resume else 0  # steps
        self._output = folder.parent / f"{folder.name}.output"
        where = f"resume={folder}" if resume else f"hydra.run.dir={folder}"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "run.py", *overrides, where],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
        self._below: dict[int, int] = {}  # pid -> when it started, since pids come again

    @property
    def output(self) -> str:
        return self._output.read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Of a .jsonl file; a last line that is being written is left out."""
        path = self.folder / f"{name}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads((self.folder / "status.json").read_text())
        return status

    def until_steps(self, count: int, timeout: float = 240.0) -> None:
        """Wait until metrics.jsonl has so many lines."""
        deadline = time.monotonic() + timeout
        while len(self.lines("metrics")) < count:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            self._look()
            time.sleep(POLL)
        self._look()

    def below(self, part: str) -> list[int]:
        """Processes of the run whose command line holds `part`."""
        self._look()
        return [pid for pid in self._below if part in title(pid)]

    def end(self, timeout: float = 240.0) -> int:
        """Wait for the exit status."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {timeout:g} s: {self.output}"
            self._look()
            time.sleep(POLL)
        return self.process.returncode

    def survivors(self) -> list[str]:
        """Command lines of the run's processes that outlive it for OUTLIVED seconds."""
        assert self.process.poll() is not None
        deadline = time.monotonic() + OUTLIVED
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(POLL)
        return [title(pid) for pid in left]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _look(self) -> None:
        for pid in descendants(self.process.pid):
            self._below.setdefault(pid, started(pid))

    def _alive(self) -> list[int]:
        """Of those seen below the run; and whoever else holds a file of its folder open (a server: its log)."""
        seen = {pid for pid, start in self._below.items() if start and started(pid) == start and title(pid)}
        return sorted(seen | {pid for pid in everyone() if pid != os.getpid() and holds(pid, self.folder)})


def started(pid: int) -> int:
    """Clock ticks from boot to the process's start; 0 when it is gone."""
    try:
        return int(Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def everyone() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def holds(pid: int, folder: Path) -> bool:
    try:
        return any(str(file.readlink()).startswith(f"{folder}/") for file in Path("/proc", str(pid), "fd").iterdir())
    except OSError:  # gone meanwhile
        return False


def check_laws(run: Run, *, steps: int, max_staleness: int) -> None:
    """What holds of every run of `steps` steps, broken off and resumed or not."""
    metrics, rollouts = run.lines("metrics"), run.lines("rollouts")
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    assert [line["version"] for line in metrics] == list(range(steps))
    check_lag(metrics, rollouts, max_staleness)
    check_order(rollouts)
    check_ledger(metrics, rollouts)
    every = OmegaConf.load(run.folder / ".hydra" / "config.yaml").sync.verify_every
    check_proofs(metrics, every, resumed_after=run.resumed_after)


def check_proofs(metrics: list[dict[str, Any]], verify_every: int, *, resumed_after: int = 0) -> None:
    """Law 8: every sync that is due is proven. The step of a line sends the version of its own number.

    resumed_after: the step at which a run ended that this one resumes. It may have ended within that step's sync; the
    resumed run then sends the version with its first sync, which has no line.
    """
    for line in metrics:
        if "sync/total_s" not in line:
            ended = line is metrics[-1] or line["step"] == resumed_after
            assert ended, f"step {line['step']}: without a sync the run went on"
        elif verify_every and line["step"] % verify_every == 0:
            assert line["sync/probe_max"] < 1e-4


def check_lag(metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]], max_staleness: int) -> None:
    """Laws 1 and 4: no trained completion is too old, and tokens of lag 0 have the ratio 1 in float32."""
    for row in rollouts:
        if row["outcome"] == "trained":
            assert row["version_first"] <= row["version_last"] <= row["step"] - 1
            assert row["lag"] == row["step"] - 1 - row["version_first"] <= max_staleness
    for line in metrics:
        trained = [r["tokens"] for r in rollouts if r["step"] == line["step"] and r["outcome"] == "trained"]
        by_lag = [line.get(f"lag_{k}/tokens", 0) for k in range(max_staleness + 1)]
        assert sum(by_lag) == sum(trained)
        assert line["lag/max"] <= max_staleness
        if by_lag[0]:
            assert 1 - 1e-4 < line["lag_0/ratio_min"] <= line["lag_0/ratio_max"] < 1 + 1e-4


def check_order(rollouts: list[dict[str, Any]]) -> None:
    """Law 2: groups are consumed in stream order, each completion of them once."""
    groups = [row["group"] for row in rollouts]
    assert groups == sorted(groups)
    assert set(groups) == set(range(groups[-1] + 1))
    assert max(Counter((row["group"], row["index"]) for row in rollouts).values()) == 1


def check_ledger(metrics: list[dict[str, Any]], rollouts: list[dict[str, Any]]) -> None:
    """Law 6: the accounts of every line add up, and are those of rollouts.jsonl."""
    accounts = ("trained", "masked", "discarded")
    for line in metrics:
        settled = {account: line[f"tokens/{account}"] for account in accounts}
        assert line["tokens/generated"] == sum(settled.values()) + line["tokens/in_flight"]
        written = Counter(dict.fromkeys(accounts, 0))
        for row in rollouts:
            if row["step"] <= line["step"]:
                written[row["outcome"].partition(":")[0]] += row["tokens"]
        assert settled == written
