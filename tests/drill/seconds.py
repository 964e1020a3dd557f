"""How long a run takes from a fault to its exit: the default model with a vLLM of its own, one fault each.

    python -m tests.drill.seconds [--only NAME ...]

`rollout.restarts=0` where a server's process is killed: with restarts (the default) the run would go on, which the last
row shows: there the seconds are those from the kill to the next step.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from real_run import Run

HERE = Path(__file__).resolve().parent

STEPS = 3  # before the fault


@dataclass(frozen=True)
class Fault:
    """kills: part of the command line of the process that gets a SIGKILL; None: `faulty.py` strikes by itself."""

    name: str
    overrides: list[str] = field(default_factory=list)
    kills: str | None = None


ENGINE, API = "VLLM::EngineCore", "grpo.rollout.vllm_main"
FAULTS = [
    Fault("reward raises", [f"data.reward={HERE / 'faulty.py'}:raises"]),
    Fault("API server killed", ["rollout.restarts=0"], API),
    Fault("NaN in logits", ["loss._target_=faulty.NaN"]),
    Fault("engine killed", ["rollout.restarts=0"], ENGINE),
    Fault("sync refused", ["loss._target_=faulty.RefusedSync"]),
]
RESTARTED = Fault("engine killed, restarted", [], ENGINE)


def measure(fault: Fault, folder: Path) -> str:
    """One line of the table."""
    told = folder / "told"
    told.mkdir(parents=True)
    run = Run(
        folder / "run",
        "train.steps=100000",
        "train.eval_every=0",
        *fault.overrides,
        environment={
            "GRPO_DRILL": str(told),
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        },
    )
    try:
        run.until_steps(STEPS)
        if fault.kills is None:
            (told / "go").touch()
        else:
            struck = time.time()
            os.kill(run.below(fault.kills)[-1], signal.SIGKILL)
        if fault is RESTARTED:
            steps = len(run.lines("metrics"))
            run.until_steps(steps + 2)  # one may be under way
            return f"{fault.name:26}{'goes on':>10}{'':10}{time.time() - struck:10.1f}"
        run.end()
        ended = time.time()
    finally:
        if run.process.poll() is None:
            run.kill()
    if fault.kills is None:
        struck = float((told / "struck").read_text())
    line = next(line for line in (run.folder / "run.log").read_text().splitlines() if "the run failed" in line)
    noticed = datetime.strptime(line[1:24], "%Y-%m-%d %H:%M:%S,%f").timestamp()  # in local time, as logging writes it
    left = run.survivors()
    status = run.status()
    return (
        f"{fault.name:26}{f'exit {run.process.returncode}':>10}{noticed - struck:10.1f}{ended - struck:10.1f}"
        f"  {len(left)} orphans; {status['state']}: {(status['error'] or {}).get('message', '').splitlines()[0][:90]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drill.seconds")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults; all if none")
    only = parser.parse_args().only
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; seconds from the fault")
    print(f"{'fault':26}{'':10}{'noticed':>10}{'exit':>10}")
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        for number, fault in enumerate([*FAULTS, RESTARTED]):
            if not only or fault.name in only:
                print(measure(fault, Path(folder, str(number))), flush=True)


if __name__ == "__main__":
    main()
