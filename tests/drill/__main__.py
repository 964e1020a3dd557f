"""See the package."""

import argparse
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny import save_tiny_model
from transformers.utils import logging as transformers_logging

from .fake_runs import Outcome, Unbroken, quick
from .fake_runs import run as fake_run
from .process_runs import kills, real_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.drill")
    parser.add_argument("--runs", type=int, default=0, help="with fake servers, in this process")
    parser.add_argument("--kills", type=int, default=0, help="SIGKILLs of run.py with a fake server, resumed each time")
    parser.add_argument("--real", type=int, default=0, help="with the real vLLM")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="drill-") as name:
        folder = Path(name)
        model = save_tiny_model(folder / "model")
        quick()
        unbroken = Unbroken(model, folder)
        for number in range(arguments.runs):
            outcome = fake_run(number, arguments.seed, model, folder / str(number), unbroken)
            outcomes.append(outcome)
            for violation in outcome.violations:
                print(violation, flush=True)
        if arguments.kills:
            outcomes += kills(arguments.kills, arguments.seed, model, folder / "kills")
        for number in range(arguments.real):
            outcomes.append(real_run(number, arguments.seed, folder / f"real-{number}"))
    table(outcomes)
    return int(any(outcome.violations for outcome in outcomes))


def table(outcomes: list[Outcome]) -> None:
    runs = Counter(outcome.kind for outcome in outcomes)
    finished = Counter(outcome.kind for outcome in outcomes if outcome.ended == "finished")
    violations = Counter(outcome.kind for outcome in outcomes for _ in outcome.violations)
    print(f"{'fault':28}{'runs':>6}{'finished':>10}{'ended':>7}{'violations':>12}")
    for kind, count in runs.items():
        print(f"{kind:28}{count:6}{finished[kind]:10}{count - finished[kind]:7}{violations[kind]:12}")
    total = sum(violations.values())
    print(f"{'all':28}{len(outcomes):6}{finished.total():10}{len(outcomes) - finished.total():7}{total:12}")
    for outcome in outcomes:
        for violation in outcome.violations:
            print(f"  {violation}")


if __name__ == "__main__":
    sys.exit(main())
