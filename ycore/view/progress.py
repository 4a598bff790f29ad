"""What a person sees while a run goes on: the live view in a terminal, else one plain line a step.

`watch` shows the same of a run from another terminal, while it goes on or once it has ended.
"""

import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ycore.errors import RunFolderError
from ycore.run.claim import is_held
from ycore.run.files import read_json
from ycore.run.metrics import REWARD, MetricsFollower, Row
from ycore.run.paths import RunFolder
from ycore.run.text import as_duration, printable, topic
from ycore.view.activity import RunActivity
from ycore.view.live import EVALUATED, Look, RunView, TimeLeft, parts, restarted_workers, reward_problems

_STEP = (
    ("length {:.0f}", "completions/mean_length"),
    ("zero-variance {:.0%}", "frac_reward_zero_std"),
    ("yield {:.0%}", "ycore/sampling/yield"),
    ("sync {:.1f} s", "ycore/time/sync"),
    ("round {:.1f} s", "ycore/time/round"),
    ("train {:.1f} s", "ycore/time/train"),
    ("{:.0f} tok/s", "ycore/tokens_per_s"),
    ("gap {:.4f}", "ycore/logprob_gap"),
    *EVALUATED,
)


def open_progress(
    num_steps: int | None, *, unit: str = "step", stream: TextIO | None = None, look: Look | None = None
) -> "RunProgress":
    """The live view where `stream` is a terminal, plain lines where it is not.

    Args:
        num_steps: How many rows there will be; None where nobody knows.
        look: Returns what the run does now (`RunActivity.look`); None shows the rows alone.
    """
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return PlainProgress(num_steps, unit, stream)
    return LiveProgress(num_steps, unit, stream, look)


class PlainProgress:
    """One line a step, for logs and pipes. Whatever a model, a dataset or a reward wrote is shown as data."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO) -> None:
        self._unit, self._total = unit, "" if num_steps is None else f"/{num_steps}"
        self._stream, self._clock = stream, TimeLeft(num_steps)

    def say(self, line: str) -> None:
        """A line about the run as a whole: engines starting, a model being fetched."""
        print(printable(line), file=self._stream, flush=True)

    def step(self, row: Row) -> None:
        """One row of metrics.jsonl."""
        if "step" in row:
            head = f"{self._unit} {row['step']}{self._total}"
            self.say("  ".join([head, *describe_step(row), self._clock.after(row)]).rstrip())

    def close(self) -> None:
        self._stream.flush()


class LiveProgress:
    """The live view, redrawn twice a second beneath the lines about the run as a whole."""

    def __init__(self, num_steps: int | None, unit: str, stream: TextIO, look: Look | None = None) -> None:
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


RunProgress = PlainProgress | LiveProgress


def describe_step(row: Row) -> list[str]:
    """The numbers of one step that a person watches; the loss is one of them only where there is no reward."""
    first: list[tuple[str, ...]] = [("reward {:.3f}", *REWARD)]
    if not any(name in row for name in REWARD):
        accuracy = ("accuracy {:.0%}", "accuracy", "rewards/accuracies")
        first = [
            ("loss {:.4f}", "loss"),
            accuracy if parts(row, [accuracy]) else ("token accuracy {:.0%}", "mean_token_accuracy"),
            ("margin {:.3f}", "rewards/margins", "margin"),
            ("rate {:.1e}", "learning_rate"),
        ]
    words = [*parts(row, [*first, *_STEP]), *reward_problems(row), restarted_workers(row)]
    return [word for word in words if word]


def watch(root: Path, *, stream: TextIO | None = None, once: bool = False) -> None:
    """Show every step of the run in `root`, from its first, until it has ended, or `once` those that are there."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise RunFolderError(f"{root} has no run.json, so it is no run's folder; name the folder that --output named")
    config = read_json(folder.config).get("config", {})
    activity = RunActivity(root, goes_on=lambda: is_held(folder))
    look = None if config.get("algorithm") == "eval" else activity.look  # an evaluation has no steps to be in
    progress = open_progress(config.get("steps"), stream=stream, look=look)
    try:
        progress.say(f"{root}: {config.get('algorithm')} of {config.get('model')} on {topic(config)}")
        follower = MetricsFollower(folder.metrics, from_the_start=True, say=progress.say)
        while True:
            is_over = once or not is_held(folder)  # before reading: what it wrote last is then read too
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
