"""The end of a run in numbers: summary.json, and the short table that a person sees."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.evaluate import Evaluation
    from grpo.record import Recorder
    from grpo.trainer import Trainer


def summarize(
    recorder: "Recorder", trainer: "Trainer | Evaluation | None", *, state: str, reason: str, seconds: float
) -> dict[str, Any]:
    """`objective` is the last evaluation's mean reward (of the first set); None without an evaluation.

    seconds: of this command. resumed_at: the step that it began with, None for a run that was not resumed."""
    from grpo.evaluate import Evaluation

    summary: dict[str, Any] = {
        "state": state,
        "reason": reason,
        "step": recorder.status["step"],
        "steps": recorder.status["steps"],
        "resumed_at": recorder.resumed_at,
        "seconds": seconds,
        "time": dict(recorder.times),
        "eval": {},
        "objective": None,
    }
    if trainer is None:
        return summary
    summary["time"] |= {name.removeprefix("time/").removesuffix("_s"): s for name, s in trainer.totals.items()}
    summary["time"]["other"] = max(0.0, seconds - _accounted(summary["time"]))
    client = trainer.loader.client
    summary["servers"] = {"restarts": client.roster.returns, "out": client.roster.out, "retries": client.retried}
    summary["eval"] = trainer.evals
    if trainer.evals:
        summary["objective"] = next(iter(trainer.evals.values()))["after"]["reward"]
    if isinstance(trainer, Evaluation):
        summary["mode"] = "eval"
        return summary
    totals = trainer.ledger.totals()
    training = sum(trainer.totals.get(f"time/{part}_s", 0.0) for part in ("wait_rollouts", "train", "sync"))
    wall = max(trainer.recorded_at - trainer.training_since, 1e-9)  # evaluations in between included
    saves = trainer.checkpoints
    summary["checkpoints"] = {
        "written": saves.written,
        "failed": trainer.saves_failed,
        "seconds": saves.seconds,
        "bytes": saves.bytes,
    }
    summary["tokens"] = totals
    summary["outcomes"] = trainer.ledger.accounts()
    if training > 0:
        waited = trainer.totals.get("time/wait_rollouts_s", 0.0)
        summary["idle"] = {"trainer": waited / training, "sampler": trainer.sampler_idle_s / wall}
        summary["throughput"] = {
            f"{kind}_tokens_per_s": (totals[kind] - trainer.tokens_at_start[kind]) / training
            for kind in ("generated", "trained")
        }
    summary["trained_fraction"] = totals["trained"] / totals["generated"] if totals["generated"] else None
    return summary


def _accounted(times: dict[str, float]) -> float:
    # loading the model goes on while the server starts, so only the longer of the two is on the clock
    return sum(s for name, s in times.items() if name not in ("load_model", "other"))


def print_table(summary: dict[str, Any], folder: Path, page: Path | None) -> None:
    """The run in a few lines, on stdout."""
    reason = summary["reason"].splitlines()[0] if summary["reason"] else ""
    rows = [("state", f"{summary['state']} ({reason})")]
    if summary.get("mode") == "eval":
        print("\n" + "\n".join(evaluation_table([line["after"] for line in summary["eval"].values()])))
        rows.append(("seconds", f"{summary['seconds']:.1f}"))
    else:
        rows.append(("steps", _steps(summary)))
        for name, line in summary["eval"].items():
            once = line["after"]["step"] == line["before"]["step"]
            rows.append(
                (name, _rate(line["before"]) + (" (one evaluation)" if once else f" -> {_rate(line['after'])}"))
            )
    if summary.get("throughput"):
        tokens, idle = summary["tokens"], summary["idle"]
        rows.append(
            ("tokens", f"{tokens['trained']:,} trained of {tokens['generated']:,} generated ({_percent(summary)})")
        )
        rows.append(("speed", f"{summary['throughput']['trained_tokens_per_s']:,.0f} trained tokens/s"))
        rows.append(("idle", f"trainer {idle['trainer']:.0%}, sampler {idle['sampler']:.0%}"))
    parts = sorted(((s, n) for n, s in summary["time"].items() if n != "load_model"), reverse=True)
    rows.append(("time", ", ".join(f"{name.replace('_', ' ')} {s:.1f} s" for s, name in parts if s >= 0.05)))
    rows.append(("folder", str(folder)))
    if page is not None:
        rows.append(("report", str(page)))
    width = max(len(name) for name, _ in rows) + 2
    print("\n" + "\n".join(f"{name:{width}}{text}" for name, text in rows))


def evaluation_table(lines: list[dict[str, Any]]) -> list[str]:
    """One line per held-out set under a head: mean with its 95 % interval, pass@k, lengths."""
    table = [["set", "prompts", "samples", "temperature", "mean [95 %]", "pass@k", "tokens", "truncated"]]
    for line in lines:
        passes = ", ".join(f"{k}: {share:.3f}" for k, share in line.get("pass", {}).items())
        table.append(
            [
                line["name"],
                str(line["n"]),
                str(line["samples"]),
                f"{line['temperature']:g}",
                _rate(line),
                passes or "-",
                f"{line['length_mean']:.1f}",
                f"{line['truncated_fraction']:.1%}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]


def _steps(summary: dict[str, Any]) -> str:
    """`seconds` are those of this command: of a resumed run only the steps since then were made in them."""
    step, seconds = summary["step"], f"{summary['seconds']:.1f} s"
    if (before := summary["resumed_at"]) is None:
        return f"{step} of {summary['steps']} in {seconds}"
    return f"{step} of {summary['steps']}, {step - before} of them in the {seconds} since step {before} was resumed"


def _rate(line: dict[str, Any]) -> str:
    if line["reward"] is None:
        return "not scored"
    return f"{line['reward']:.3f} [{line['low']:.3f}, {line['high']:.3f}]"


def _percent(summary: dict[str, Any]) -> str:
    share = summary["trained_fraction"]
    return "-" if share is None else f"{share:.1%}"
