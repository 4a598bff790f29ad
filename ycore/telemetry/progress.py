"""What a person sees while a run goes on: a bar in a terminal, else one plain line a step.

Not here: the numbers themselves (`metrics`) and the picture at the end (`curve`).
"""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class RunProgress(Protocol):
    """Shows a run."""

    def say(self, line: str) -> None:
        """A line about the run as a whole: engines starting, a model being fetched."""

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_progress(num_steps: int, *, stream: TextIO | None = None) -> RunProgress:
    """The bar where `stream` (standard output unless told) is a terminal, plain lines where it is not."""
    stream = sys.stdout if stream is None else stream
    return BarProgress(num_steps, stream) if stream.isatty() else PlainProgress(num_steps, stream)


class PlainProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        self._num_steps = num_steps
        self._stream = stream
        self._clock = TimeLeft(num_steps)

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def step(self, row: Mapping[str, Any]) -> None:
        if "step" in row:
            head = f"step {row['step']}/{self._num_steps}"
            self.say("  ".join([head, *describe_step(row), self._clock.after(row)]).rstrip())

    def close(self) -> None:
        self._stream.flush()


class BarProgress:
    """A bar and, beneath it, the numbers of the last step."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        self._clock = TimeLeft(num_steps)
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=Console(file=stream),
            transient=False,
        )
        self._task: TaskID | None = None
        self._num_steps = num_steps
        self._bar.start()

    def say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)

    def step(self, row: Mapping[str, Any]) -> None:
        if "step" not in row:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=self._num_steps)
        text = "  ".join([*describe_step(row), self._clock.after(row)])
        self._bar.update(self._task, completed=int(row["step"]), description=text.replace("[", r"\["))

    def close(self) -> None:
        self._bar.stop()


class TimeLeft:
    """An estimate from the last steps' own times."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def after(self, row: Mapping[str, Any]) -> str:
        """`3 min 20 s left`, or nothing where no step has told its time, and after the last."""
        seconds, left = row.get("ycore/time/step"), self._num_steps - int(row["step"])
        if isinstance(seconds, int | float):
            self._seconds.append(float(seconds))
        if not self._seconds or left <= 0:
            return ""
        return f"{as_duration(left * sum(self._seconds) / len(self._seconds))} left"


def describe_step(row: Mapping[str, Any]) -> list[str]:
    """The numbers of one step that a person watches; a number that the row has not is left out."""
    parts = [
        _part(row, "reward", "reward {:.3f}"),
        _part(row, "completions/mean_length", "length {:.0f}"),
        _part(row, "frac_reward_zero_std", "zero-variance {:.0%}"),
        _part(row, "ycore/time/sync", "sync {:.1f} s"),
        _part(row, "ycore/time/round", "round {:.1f} s"),
        _part(row, "ycore/time/train", "train {:.1f} s"),
        _part(row, "ycore/tokens_per_s", "{:.0f} tok/s"),
        _part(row, "ycore/logprob_gap", "gap {:.4f}"),
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
