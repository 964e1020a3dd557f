"""Errors as texts: tracebacks of a user's own code, called by ours, and a reason that a screen can hold."""

import traceback
from pathlib import Path

# Characters. A message may hold whole completions, and it is written into logs, status.json and onto the screen.
LINE, WHOLE = 2_000, 20_000


def in_brief(error: BaseException) -> str:
    """Type and message for a line of the screen and of summary.json; status.json and run.log have all of it."""
    return _cut(f"{type(error).__name__}: {error}", LINE)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"


def own_traceback(error: BaseException, package: Path) -> str:
    """What happened, in one line, and below it the traceback from where it leaves `package`: the user's own."""
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == package:
        trace = trace.tb_next
    whole = "".join(traceback.format_exception(type(error), error, trace)).strip()
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    what = next(line for line in lines if not line.startswith(" "))  # behind a SyntaxError's place, before any notes
    return _cut(whole, WHOLE) if whole == what else f"{_cut(what, LINE)}\n{_cut(whole, WHOLE)}"
