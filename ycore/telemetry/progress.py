"""What a person sees while a run goes on: a bar in a terminal, else one plain line a step.

Not here: the numbers themselves (`metrics`) and the picture at the end (`curve`).
"""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text


class RunProgress(Protocol):
    """Shows a run."""

    def say(self, line: str) -> None:
        """A line about the run as a whole: engines starting, a model being fetched."""

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_progress(num_steps: int | None, *, unit: str = "step", stream: TextIO | None = None) -> RunProgress:
    """The bar where `stream` (standard output unless told) is a terminal, plain lines where it is not.

    `num_steps` is None where nobody knows the end; `unit` is what the rows count.
    """
    stream = sys.stdout if stream is None else stream
    return BarProgress(num_steps, unit, stream) if stream.isatty() else PlainProgress(num_steps, unit, stream)


class PlainProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO) -> None:
        self._total = "" if num_steps is None else f"/{num_steps}"
        self._unit = unit
        self._stream = stream
        self._clock = TimeLeft(num_steps)

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def step(self, row: Mapping[str, Any]) -> None:
        if "step" in row:
            head = f"{self._unit} {row['step']}{self._total}"
            self.say("  ".join([head, *describe_step(row), self._clock.after(row)]).rstrip())

    def close(self) -> None:
        self._stream.flush()


class BarProgress:
    """A bar with the reward and the time left; beneath it, what else the last step told. It fits 80 columns."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO) -> None:
        self._clock = TimeLeft(num_steps)
        self._bar = Progress(
            TextColumn(unit + " {task.completed:.0f}" + ("" if num_steps is None else f"/{num_steps}")),
            BarColumn(bar_width=24),
            TextColumn("{task.description}", markup=False),
        )
        self._task = self._bar.add_task("", total=num_steps, visible=False)
        self._details = Text(style="dim", overflow="ellipsis", no_wrap=True)
        self._live = Live(Group(self._bar, self._details), console=Console(file=stream), refresh_per_second=4)
        self._live.start()

    def say(self, line: str) -> None:
        self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def step(self, row: Mapping[str, Any]) -> None:
        if "step" not in row:
            return
        parts, left = describe_step(row), self._clock.after(row)
        head = "  ".join([*(part for part in parts if part.startswith("reward")), left])
        self._bar.update(self._task, completed=int(row["step"]), description=head, visible=True)
        self._details.plain = "  ".join(part for part in parts if not part.startswith("reward"))

    def close(self) -> None:
        self._live.stop()


class TimeLeft:
    """An estimate from the last steps' own times."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def after(self, row: Mapping[str, Any]) -> str:
        """`3 min 20 s left`, or nothing where no step has told its time, and after the last."""
        seconds, left = row.get("ycore/time/step"), (self._num_steps or 0) - int(row["step"])
        if isinstance(seconds, int | float):
            self._seconds.append(float(seconds))
        if not self._seconds or left <= 0:
            return ""
        return f"{as_duration(left * sum(self._seconds) / len(self._seconds))} left"


def describe_step(row: Mapping[str, Any]) -> list[str]:
    """The numbers of one step that a person watches; a number that the row has not is left out."""
    parts = [
        _part(row, "ycore/reward" if "ycore/reward" in row else "reward", "reward {:.3f}"),
        _part(row, "completions/mean_length", "length {:.0f}"),
        _part(row, "frac_reward_zero_std", "zero-variance {:.0%}"),
        _part(row, "ycore/sampling/yield", "yield {:.0%}"),
        _part(row, "ycore/time/sync", "sync {:.1f} s"),
        _part(row, "ycore/time/round", "round {:.1f} s"),
        _part(row, "ycore/time/train", "train {:.1f} s"),
        _part(row, "ycore/tokens_per_s", "{:.0f} tok/s"),
        _part(row, "ycore/logprob_gap", "gap {:.4f}"),
        *(f"{count} x {problem}" for problem, count in row.get("ycore/reward_problems", {}).items()),
    ]
    return [part for part in parts if part]


def as_duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _part(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return form.format(value) if isinstance(value, int | float) else ""
