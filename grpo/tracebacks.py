"""Tracebacks of a user's own code, called by ours."""

import traceback
from pathlib import Path


def own_traceback(error: BaseException, package: Path) -> str:
    """What happened, in one line, and below it the traceback from where it leaves `package`: the user's own."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == package:
        trace = trace.tb_next
    whole = "".join(traceback.format_exception(type(error), error, trace)).strip()
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    what = next(line for line in lines if not line.startswith(" "))  # behind a SyntaxError's place, before any notes
    return whole if whole == what else f"{what}\n{whole}"
