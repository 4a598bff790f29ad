"""What a person sees while a run goes on: the live view in a terminal, else one plain line a step.

Looking at a run from another terminal, while it goes on or once it has ended.

Not here: the numbers themselves (`metrics`), the view (`live`) and the picture at the end (`curve`).
"""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from ycore.errors import RunFolderError
from ycore.run.claim import is_held
from ycore.run.files import read_json
from ycore.run.metrics import MetricsFollower
from ycore.run.paths import RunFolder
from ycore.run.text import printable
from ycore.view.activity import RunActivity
from ycore.view.lanes import TimeLeft, as_duration
from ycore.view.live import Look, RunView, restarted_workers, reward_problems

__all__ = ["BarProgress", "PlainProgress", "RunProgress", "as_duration", "describe_step", "open_progress"]


class RunProgress(Protocol):
    """Shows a run."""

    def say(self, line: str) -> None:
        """A line about the run as a whole: engines starting, a model being fetched."""

    def step(self, row: Mapping[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def open_progress(
    num_steps: int | None, *, unit: str = "step", stream: TextIO | None = None, look: Look | None = None
) -> RunProgress:
    """The bar where `stream` (standard output unless told) is a terminal, plain lines where it is not.

    `num_steps` is None where nobody knows the end; `unit` is what the rows count; `look` tells what the run is at.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return PlainProgress(num_steps, unit, stream)
    return BarProgress(num_steps, unit, stream, look)


class PlainProgress:
    """One line a step, for logs and pipes."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO) -> None:
        self._total = "" if num_steps is None else f"/{num_steps}"
        self._unit = unit
        self._stream = stream
        self._clock = TimeLeft(num_steps)

    def say(self, line: str) -> None:
        print(printable(line), file=self._stream, flush=True)

    def step(self, row: Mapping[str, Any]) -> None:
        if "step" in row:
            head = f"{self._unit} {row['step']}{self._total}"
            self.say("  ".join([head, *describe_step(row), self._clock.after(row)]).rstrip())

    def close(self) -> None:
        self._stream.flush()


class BarProgress:
    """The live view, redrawn twice a second beneath the lines about the run as a whole."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO, look: Look | None = None) -> None:
        self._view = RunView(num_steps, unit=unit, look=look)
        self._live = Live(console=Console(file=stream), refresh_per_second=2, get_renderable=self._drawn)
        self._live.start()

    def _drawn(self) -> RenderableType:
        return self._view if self._view.has_begun else ""

    def say(self, line: str) -> None:
        self._live.console.print(Text(printable(line)), soft_wrap=True)

    def step(self, row: Mapping[str, Any]) -> None:
        self._view.add(row)

    def close(self) -> None:
        self._live.stop()


def describe_step(row: Mapping[str, Any]) -> list[str]:
    """The numbers of one step that a person watches; a number that the row has not is left out."""
    parts = [
        _part(row, "ycore/reward" if "ycore/reward" in row else "reward", "reward {:.3f}"),
        *_learned(row),
        _part(row, "completions/mean_length", "length {:.0f}"),
        _part(row, "frac_reward_zero_std", "zero-variance {:.0%}"),
        _part(row, "ycore/sampling/yield", "yield {:.0%}"),
        _part(row, "ycore/time/sync", "sync {:.1f} s"),
        _part(row, "ycore/time/round", "round {:.1f} s"),
        _part(row, "ycore/time/train", "train {:.1f} s"),
        _part(row, "ycore/tokens_per_s", "{:.0f} tok/s"),
        _part(row, "ycore/logprob_gap", "gap {:.4f}"),
        *reward_problems(row),
        restarted_workers(row),
    ]
    return [part for part in parts if part]


def _learned(row: Mapping[str, Any]) -> list[str]:
    """What a run without rollouts tells: there is no reward to watch."""
    if "reward" in row or "ycore/reward" in row:
        return []
    shares = ("accuracy", "rewards/accuracies")
    return [
        _part(row, "loss", "loss {:.4f}"),
        *(_part(row, name, "accuracy {:.0%}") for name in shares),
        _part(row, "mean_token_accuracy", "token accuracy {:.0%}") if not any(name in row for name in shares) else "",
        _part(row, "rewards/margins", "margin {:.3f}"),
        _part(row, "margin", "margin {:.3f}"),
        _part(row, "learning_rate", "rate {:.1e}"),
    ]


def _part(row: Mapping[str, Any], name: str, form: str) -> str:
    value = row.get(name)
    return form.format(value) if isinstance(value, int | float) else ""


_LOOK_EVERY_S = 0.5


def watch(root: Path, *, stream: TextIO | None = None, once: bool = False) -> None:
    """Show every step of the run in `root`, those that were taken already first, until it has ended.

    `once` shows what there is and returns. A run whose launcher is gone without a summary is said to be so.
    """
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(f"{root} has no run.json, so it is no run's folder; name the folder that --output named")
    config = read_json(folder.config).get("config", {})
    activity = RunActivity(root, goes_on=lambda: is_held(folder))
    look = None if config.get("algorithm") == "eval" else activity.look  # an evaluation has no steps to be in
    progress = open_progress(config.get("steps"), stream=stream, look=look)
    try:
        progress.say(f"{root}: {config.get('algorithm')} of {config.get('model')} on {config.get('dataset')}")
        for row in _rows(folder, progress, once=once):
            progress.step(row)
        progress.say(_ending(folder))
    finally:
        progress.close()


def _rows(folder: RunFolder, progress: RunProgress, *, once: bool) -> Iterator[Mapping[str, Any]]:
    """Rows as they come; the end of the run ends them, after its last one."""
    follower = MetricsFollower(folder.metrics, from_the_start=True, say=progress.say)
    while True:
        over = once or not is_held(folder)  # before reading: what it wrote last is then read too
        yield from follower.read()
        if over:
            return
        time.sleep(_LOOK_EVERY_S)


def _ending(folder: RunFolder) -> str:
    if is_held(folder):
        return "the run goes on"
    if not folder.summary.is_file():
        return f"over without a summary, as after a kill; `ycore resume {folder.root}` goes on"
    summary = read_json(folder.summary)
    told = f"{summary.get('status', 'ended')} after {summary.get('steps', 0)} steps"
    seconds = summary.get("wall_s")
    why = f": {summary['error']}" if summary.get("error") else ""
    return told + ("" if seconds is None else f", {as_duration(seconds)}") + why
