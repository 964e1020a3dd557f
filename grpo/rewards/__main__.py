"""python -m grpo.rewards audit data=gsm8k [data.KEY=VALUE ...] [--rows N] [--run outputs/<run> | --column NAME]
[--reward NAME]

Compares the verifier of a data set with a strict text or number comparison and lists each disagreement (audit.py).
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from grpo.cli import explain, opened
from grpo.data.base import Data
from grpo.objects import build
from grpo.rewards import audit
from grpo.rewards.combined import Rewards

CONF = Path(__file__).resolve().parents[2] / "conf"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.rewards", description=__doc__)
    parser.add_argument("command", choices=["audit"])
    parser.add_argument("overrides", nargs="*", help="as for run.py: data=gsm8k data.reward=math_verify ...")
    parser.add_argument("--rows", type=int, default=200, help="golds, or completions of the run (200)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run", type=Path, help="a run folder: judge its completions instead of the golds")
    source.add_argument("--column", help="judge the texts of this column (worked solutions) instead of the golds")
    parser.add_argument("--reward", help="which of several rewards")
    options = parser.parse_intermixed_args(arguments)
    try:
        for line in run(options.overrides, options.rows, options.run, options.reward, options.column):
            print(line)
    except (ValueError, HydraException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    return 0


def run(overrides: list[str], rows: int, folder: Path | None, name: str | None, column: str | None = None) -> list[str]:
    """The report. Raises ValueError for a mistake in the command line."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=opened(overrides))
    data: Any = build(config.data, "data", object)
    if not isinstance(data, Data):
        raise ValueError("a mixture is audited part by part: data=<the part's name>")
    if rows < 1:
        raise ValueError(f"--rows {rows}: must be at least 1")
    data.check()
    reward = audit.verifier(data.rewards(), name)
    with Rewards([(reward, 1.0)]) as rewards:
        rewards.wait_ready()
        if folder is not None:
            files = [f for f in (folder / "rollouts.jsonl", folder / "eval_rollouts.jsonl") if f.is_file()]
            if not files:
                raise ValueError(f"--run {folder}: no rollouts.jsonl in it")
            cases = audit.cases_from_rollouts(data, reward, files, rows)
        elif column is not None:
            cases = audit.cases_from_column(data, reward, rows, column)
        else:
            cases = audit.cases_from_golds(data, reward, rows)
        unreadable = rewards.unreadable(sorted({case.gold for case in cases}))
        cases = [case for case in cases if case.gold not in unreadable]
        audit.judge(rewards, reward, cases)
    return list(audit.report(reward, cases, unreadable))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
