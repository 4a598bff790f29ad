"""Show a run while it goes on: the live view in a terminal, a table in a notebook, else one line a step.

`follow_run` shows the same of a run from another terminal, while it goes on or once it has ended.
"""

import importlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ycore.errors import RunFolderError
from ycore.run.claim import is_held
from ycore.run.files import read_json
from ycore.run.metrics import REWARD, MetricsFollower, Row, number
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration, printable, topic
from ycore.view.activity import RunActivity
from ycore.view.live import (
    EVALUATED,
    Look,
    RunView,
    TimeLeft,
    parts,
    restarted_workers,
    reward_problems,
)

_STEP = (
    ("length {:.0f}", "completions/mean_length"),
    ("zero-variance {:.0%}", "frac_reward_zero_std"),
    ("yield {:.0%}", "ycore/sampling/yield"),
    ("sync {:.1f} s", "ycore/time/sync"),
    ("round {:.1f} s", "ycore/time/round"),
    ("train {:.1f} s", "ycore/time/train"),
    ("{:.0f} tok/s", "ycore/tokens_per_s"),
    ("gap {:.4f}", "ycore/logprob_gap"),
)
_EVALUATED = (EVALUATED[0], EVALUATED[3])  # without the interval
_MAX_ROWS = 10  # of a table


def open_progress(
    num_steps: int | None,
    *,
    unit: str = "step",
    stream: TextIO | None = None,
    look: Look | None = None,
) -> "RunProgress":
    """Open the live view where `stream` is a terminal, a table in a notebook, plain lines elsewhere.

    Args:
        num_steps: how many rows there will be; None where nobody knows.
        stream: standard output, or a notebook's cell, where it is None.
        look: returns what the run does now (`RunActivity.look`); None shows the rows alone.
    """
    if stream is None and (display := _display_of_notebook()) is not None:
        return TableProgress(num_steps, unit, sys.stdout, display)
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return PlainProgress(num_steps, unit, stream)
    return LiveProgress(num_steps, unit, stream, look)


class PlainProgress:
    """One line a step, for logs and pipes. Whatever a model, a dataset or a reward wrote is shown as data."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO) -> None:
        self._unit = unit
        self._total = "" if num_steps is None else f"/{num_steps}"
        self._stream = stream
        self._clock = TimeLeft(num_steps)

    def say(self, line: str) -> None:
        """Print a line about the run as a whole: engines starting, a model being fetched."""
        print(printable(line), file=self._stream, flush=True)

    def step(self, row: Row) -> None:
        """Print one row of metrics.jsonl."""
        if "step" in row:
            head = f"{self._unit} {row['step']}{self._total}"
            self.say("  ".join([head, *describe_step(row), self._clock.after(row)]).rstrip())

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """The live view, redrawn twice a second beneath the lines about the run as a whole."""

    def __init__(
        self, num_steps: int | None, unit: str, stream: TextIO, look: Look | None = None
    ) -> None:
        self._view = RunView(num_steps, unit=unit, look=look)
        self._live = Live(
            console=Console(file=stream),
            refresh_per_second=2,
            get_renderable=lambda: self._view if self._view.has_begun else "",
        )
        self._live.start()

    def say(self, line: str) -> None:
        self._live.console.print(Text(printable(line)), soft_wrap=True)

    def step(self, row: Row) -> None:
        self._view.add(row)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()


class TableProgress(PlainProgress):
    """In a notebook's cell: a table of the last steps, which every step updates in place."""

    def __init__(
        self, num_steps: int | None, unit: str, stream: TextIO, display: Callable[..., Any]
    ) -> None:
        super().__init__(num_steps, unit, stream)
        self._display = display
        self._handle: Any = None
        self._rows = deque[Row](maxlen=_MAX_ROWS)

    def step(self, row: Row) -> None:
        if "step" not in row:
            return
        self._rows.append(row)
        head = f"{self._unit} {row['step']}{self._total}  {self._clock.after(row)}".rstrip()
        html = steps_as_html(head, self._rows, unit=self._unit)
        data = {"text/html": html, "text/plain": head}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


RunProgress = PlainProgress | LiveProgress


def _display_of_notebook() -> Callable[..., Any] | None:
    """Return IPython's `display` in a notebook's kernel, where IPython is imported; else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is None:
        return None
    display: Callable[..., Any] = importlib.import_module("IPython.display").display
    return display


def describe_step(row: Row) -> list[str]:
    """Write the numbers of one step that a person watches."""
    words = [
        *parts(row, [*_formats(row), *EVALUATED]),
        *reward_problems(row),
        restarted_workers(row),
    ]
    return [word for word in words if word]


def _formats(row: Row) -> list[tuple[str, ...]]:
    """Return how each number of a step is written, and its names; the loss only where there is no reward."""
    if any(name in row for name in REWARD):
        return [("reward {:.3f}", *REWARD), *_STEP]
    accuracy = ("accuracy {:.0%}", "accuracy", "rewards/accuracies")
    return [
        ("loss {:.4f}", "loss"),
        accuracy
        if parts(row, [accuracy])
        else ("token accuracy {:.0%}", "mean_token_accuracy"),
        ("margin {:.3f}", "rewards/margins", "margin"),
        ("rate {:.1e}", "learning_rate"),
        *_STEP,
    ]


def steps_as_html(head: str, rows: Iterable[Row], *, unit: str = "step") -> str:
    """Write the last of these steps as a table, a row each: the numbers of `describe_step` that any of them has."""
    rows = [row for row in rows if "step" in row][-_MAX_ROWS:]
    columns = {unit: [str(row["step"]) for row in rows]}
    formats = dict.fromkeys(form for row in rows for form in (*_formats(row), *_EVALUATED))
    for form, *names in formats:
        title, place, rest = re.split(r"(\{.*?\})", form)
        values = [number(row, *names) for row in rows]
        cells = ["" if value is None else place.format(value) for value in values]
        columns[" ".join(f"{title}{rest}".split())] = cells
    columns["problems"] = [
        ", ".join(filter(None, [*reward_problems(row), restarted_workers(row)])) for row in rows
    ]
    filled = {title: cells for title, cells in columns.items() if any(cells)}
    return as_html(head, [list(filled), *map(list, zip(*filled.values(), strict=True))])


def as_html(head: str, rows: Sequence[Sequence[str]]) -> str:
    """Write a line and a table beneath it, whose first row has the titles."""
    lines = []
    for index, row in enumerate(rows):
        kind = "td" if index else "th"
        lines.append("".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in row))
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<p>{escape(head)}</p><table>{table}</table>"


def follow_run(root: Path, *, stream: TextIO | None = None, once: bool = False) -> None:
    """Show every step of the run in `root`, from its first, until it has ended, or `once` those that are there."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(
            f"{root} has no run.json, so it is no run's folder; name the folder that --output named"
        )
    config = read_json(folder.config).get("config", {})
    activity = RunActivity(root, goes_on=lambda: is_held(folder))
    has_steps = config.get("algorithm") != "eval"
    progress = open_progress(
        config.get("steps"), stream=stream, look=activity.look if has_steps else None
    )
    try:
        progress.say(
            f"{root}: {config.get('algorithm')} of {config.get('model')} on {topic(config)}"
        )
        follower = MetricsFollower(folder.metrics, from_the_start=True, say=progress.say)
        while True:
            # Before reading: what the run wrote last is then read too.
            is_over = once or not is_held(folder)
            for row in follower.read():
                progress.step(row)
            if is_over:
                break
            time.sleep(0.5)
        progress.say(_ending(folder))
    finally:
        progress.close()


def _ending(folder: RunFolder) -> str:
    if is_held(folder):
        return "the run goes on"
    if not folder.summary.is_file():
        return f"over without a summary, as after a kill; `ycore resume {folder.root}` goes on"
    summary = read_json(folder.summary)
    steps = f"{summary.get('status', 'ended')} after {summary.get('steps', 0)} steps"
    duration = f", {as_duration(summary['wall_s'])}" if "wall_s" in summary else ""
    return steps + duration + (f": {summary['error']}" if summary.get("error") else "")
