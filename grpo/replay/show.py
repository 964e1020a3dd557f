"""A comparison as tables for people: the losses, their gradients' cosines, and the figures by lag."""

import re
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Figures = dict[str, Any]
OVER_ALL = {  # heading: (figure, format)
    "value": ("loss", ".6g"),
    "gradient norm": ("grad_norm", ".4g"),
    "ESS": ("ess", ".4f"),
    "weight ESS": ("weight/ess", ".4f"),
    "clipped": ("clip/fraction", ".4f"),
    "A > 0": ("clip/fraction_positive", ".4f"),
    "A < 0": ("clip/fraction_negative", ".4f"),
    "KL": ("kl/sampler", ".3g"),
}
BY_LAG = {
    "tokens": ("tokens", ",.0f"),
    "KL": ("kl", ".3g"),
    "ESS": ("ess", ".4f"),
    "mean weight": ("weight_mean", ".4f"),
    "weight ESS": ("weight_ess", ".4f"),
    "clipped": ("clip_fraction", ".4f"),
}


def show(result: dict[str, Any], console: Console) -> None:
    """Print what `session.run` returns."""
    models = f"temperature {result['temperature']:g}, {result['dtype']} on {result['device']}"
    lines = [f"{result['run']}: {result['checkpoint']} (version {result['version']}), {models}"]
    if result["minibatches"] > 1:
        lines.append(f"the run's path through its {result['minibatches']} minibatches; figures are means over them")
    _print(console, *lines)
    for step in result["steps"]:
        tables = [_losses(step, result["version"]), _lags(step)]
        if len(step["losses"]) > 2:
            tables.insert(1, _cosines(step))
        for table in tables:
            # A number that is cut is worse than a line that the terminal wraps.
            whole = console.measure(table, options=console.options.update(max_width=10**4)).maximum
            console.width = max(console.width, whole)
            console.print(table)
        _print(console, _proof(step))
    _print(console, f"written to {result['out']}")


def _print(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _losses(step: dict[str, Any], version: int) -> Table:
    title = f"step {step['step']}, {step['completions']} completions"
    if step["trained_at_version"] != version:
        title += f", trained at version {step['trained_at_version']}"
    table = _table("loss", *OVER_ALL, "cosine to own", title=title)
    for loss, cosine in zip(step["losses"], step["cosine"][0], strict=True):
        table.add_row(escape(loss["name"]), *_row(loss["metrics"], OVER_ALL), _text(cosine, ".4f"))
    return table


def _cosines(step: dict[str, Any]) -> Table:
    names = [loss["name"] for loss in step["losses"]]
    table = _table("cosine of gradients", *names)
    for name, row in zip(names, step["cosine"], strict=True):
        table.add_row(escape(name), *(_text(value, ".4f") for value in row))
    return table


def _lags(step: dict[str, Any]) -> Table:
    table = _table("lag", "loss", *BY_LAG)
    keys = (re.match(r"lag_(\d+)/", key) for loss in step["losses"] for key in loss["metrics"])
    for lag in sorted({int(match[1]) for match in keys if match}):
        for number, loss in enumerate(step["losses"]):
            own = {key.removeprefix(f"lag_{lag}/"): value for key, value in loss["metrics"].items()}
            table.add_row("" if number else str(lag), escape(loss["name"]), *_row(own, BY_LAG))
        table.add_section()
    return table


def _proof(step: dict[str, Any]) -> str:
    proof = step["proof"]
    if proof is None:
        return f"proof    none: step {step['step']} was not trained at these weights"
    figures = proof["figures"]
    shown = ", ".join(
        f"{key} {figures[key]['replay']:.9g} ({figures[key]['metrics.jsonl']:.9g})" for key in ("loss", "grad_norm")
    )
    largest = max(figure["difference"] for figure in figures.values())
    verdict = "reproduced" if proof["reproduced"] else f"NOT reproduced: {', '.join(proof['off'])}"
    bound = f"{proof['absolute']:g} + {proof['relative']:g} |x|"
    return (
        f"proof    the run's own loss, in brackets metrics.jsonl at step {step['step']}: {shown}; "
        f"{len(figures)} figures, largest difference {largest:.2g} (bound {bound}): {verdict}"
    )


def _table(*headings: str, title: str | None = None) -> Table:
    table = Table(headings[0], title=title, title_justify="left")
    for heading in headings[1:]:
        table.add_column(escape(heading), justify="left" if heading == "loss" else "right")
    return table


def _row(figures: Figures, columns: dict[str, tuple[str, str]]) -> list[str]:
    return [_text(figures.get(key), form) for key, form in columns.values()]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
