"""(Re)build report.html of run or sweep folders: `python -m grpo.report FOLDER...`."""

import argparse
import sys
from pathlib import Path

from grpo.report import build, build_run
from grpo.report.overview import is_run
from grpo.report.sweep import find_jobs


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo.report", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run's folder or a sweep's")
    parser.add_argument("--jobs", action="store_true", help="for a sweep: also rebuild the report of every job")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        try:
            if options.jobs and not is_run(folder):
                for job in find_jobs(folder):
                    print(build_run(job))
            print(build(folder))
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
