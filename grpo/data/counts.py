"""What loading a data set has read, left out and kept, as lines for people; and the same before a run (dry_run=true).

A dry run reads every row and asks the rewards which golds they can read, as the run would: of the model it needs the
tokenizer alone, and not even that where the rows are made by our own code. What would have to be downloaded is not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from grpo.data.base import Data
from grpo.rewards.base import RewardError

TRAIN = "train"  # the name of the rows that are trained on, in a report


def dry_lines(data: Any, model_path: str, seed: int) -> list[str]:
    """The counts of a data set (or mixture) that is not loaded yet. Raises ValueError for what loading would refuse."""
    missing = [part.path for part in parts(data) if not part.at_hand()]
    if missing:
        return [f"rows      not counted: {', '.join(missing)} would have to be downloaded first, which the run does"]
    if isinstance(data, Data) and data.GENERATED:
        train, held_out = data.tables()
        tables = {TRAIN: train, **{name: table for name, (_, table) in held_out.items()}}
        return list(lines({name: {"used": len(table.rows)} for name, table in tables.items()}))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except Exception as error:  # a dozen kinds: not there, no network, not JSON, an unknown class
        why = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise ValueError(f"model.path={model_path}: its tokenizer cannot be read ({why})") from error
    try:
        return list(lines(data.load(tokenizer, seed).report))
    except RewardError as error:
        raise ValueError(str(error)) from error


def parts(data: Any) -> Iterator[Any]:
    """The data sets of a mixture, or the one."""
    yield from data.parts.values() if hasattr(data, "parts") else (data,)


def lines(report: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """`report`: of `LoadedData`. One line for the rows to train on, and one for each held-out set."""
    if TRAIN not in report:  # a mixture: a report of each part
        for name, part in report.items():
            yield from lines(part, f"{name}/")
        return
    elsewhere = report.get("in_held_out_of_another_part", 0)
    for name in (TRAIN, *(n for n in report if n != TRAIN)):
        counts = report[name]
        if not isinstance(counts, Mapping):  # seconds
            continue
        train = name == TRAIN
        words = []
        if "left_out" in counts:  # else they are computed, and right by construction
            reasons = ", ".join(f"{n:,} {reason}" for reason, n in counts["left_out"].items())
            left_out = f"{sum(counts['left_out'].values()):,} left out ({reasons})" if reasons else "none left out"
            words += [f"{counts['rows']:,} read", left_out]
        if train and elsewhere:
            words.append(f"{elsewhere:,} more that another part holds out")
        words.append(f"{counts['used'] - (elsewhere if train else 0):,} to {'train on' if train else 'evaluate'}")
        if "of" in counts:
            words.append(f"taken out of {counts['of']} (data.eval_rows={counts['wanted']})")
        yield f"{'rows':10}{prefix}{name}: {', '.join(words)}"
