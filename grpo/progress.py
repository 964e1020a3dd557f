"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere. Never the record."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY = 5.0  # seconds between plain lines


class Display:
    """Shows the step, reward, accuracy, lag, tokens/s and the time left. steps: 0 where only an evaluation is made."""

    def __init__(self, steps: int, *, first_step: int = 0, console: Console | None = None) -> None:
        self.steps = steps
        self.accuracy: float | None = None
        self.console = console or Console(file=sys.stdout)
        self._printed = 0.0
        self._live: Progress | None = None
        if self.console.is_terminal:
            self._live = Progress(
                TextColumn("{task.fields[phase]}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._live.add_task("", total=steps or None, completed=first_step, phase="start", figures="")
            self._live.start()

    def phase(self, text: str) -> None:
        """What is going on where there is no step to show."""
        if self._live is not None:
            self._live.update(self._task, phase=text)
        else:
            self.console.print(text, highlight=False)

    def evaluation(self, name: str, line: Mapping[str, Any]) -> None:
        self.accuracy = line["reward"]
        if self._live is None and line["reward"] is not None:
            step = f"step {line['step']}/{self.steps}  " if self.steps else ""
            self.console.print(
                f"{step}{name}: {line['reward']:.3f} [{line['low']:.3f}, {line['high']:.3f}] of {line['n']}",
                highlight=False,
            )

    def step(self, line: Mapping[str, Any]) -> None:
        if self._live is not None:
            self._live.update(self._task, phase="train", completed=line["step"], figures=self._figures(line))
            return
        now = time.monotonic()
        if now - self._printed >= PLAIN_EVERY or line["step"] == self.steps:
            self._printed = now
            self.console.print(f"step {line['step']}/{self.steps}  {self._figures(line)}", highlight=False)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()

    def _figures(self, line: Mapping[str, Any]) -> str:
        parts = []
        if "reward/mean" in line:
            parts.append(f"reward {line['reward/mean']:.3f}")
        if self.accuracy is not None:
            parts.append(f"eval {self.accuracy:.3f}")
        if "lag/mean" in line:
            parts.append(f"lag {line['lag/mean']:.2f} (max {line['lag/max']:.0f})")
        parts.append(f"{line['throughput/trained_tokens_per_s']:,.0f} tokens/s")
        return "  ".join(parts)
