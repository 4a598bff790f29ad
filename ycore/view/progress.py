"""Show a run while it goes on: a live view in a terminal, else one line a step.

The live view has the run's reward, its groups, where its step's time goes, and its slots. It never shrinks while the run
goes on. It fits 40 columns and more: what does not fit ends in an ellipsis. A plain line fits 80.

`follow_run` shows the same of a run from another terminal, while it goes on or once it has ended.
"""

import math
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from ycore.run.claim import is_held
from ycore.run.files import RunFolder
from ycore.run.metrics import REWARD, STEP_SECONDS, MetricsFollower, Row, is_evaluation, number
from ycore.run.text import as_duration, printable, topic
from ycore.run.work import Pulse, progress_bar, quiet, spinning_row
from ycore.view.activity import Activity, RunActivity, Scene, slot_names
from ycore.view.report import read_description, read_summary

MAX_SLOTS = 8

# The numbers of a step, line by line: how each is written, and its names in a row of metrics.jsonl.
_NUMBERS = {
    "groups": (
        ("zero-variance {:.0%}", "frac_reward_zero_std"),
        ("yield {:.0%}", "ycore/sampling/yield"),
        ("idle {:.0%}", "ycore/idle_share"),
    ),
    "tokens": (
        ("{:.0f} a second", "ycore/tokens_per_s"),
        ("length {:.0f}", "completions/mean_length"),
        ("cut off {:.0%}", "completions/clipped_ratio"),
        ("gap {:.4f}", "ycore/logprob_gap"),
    ),
    "time": (
        ("step {:.1f} s:", "ycore/time/step"),
        ("sync {:.1f}", "ycore/time/sync"),
        ("round {:.1f}", "ycore/time/round"),
        ("train {:.1f}", "ycore/time/train"),
    ),
}

# The most useful first: a line has as many as fit. The names are those of metrics.jsonl, without `ycore/`.
EVALUATED = (
    ("eval/reward {:.3f}", "ycore/eval/reward"),
    ("({:.3f}", "ycore/eval/reward/low"),
    ("to {:.3f})", "ycore/eval/reward/high"),
    ("eval/pass@1 {:.3f}", "ycore/eval/pass@1"),
    ("eval/loss {:.4f}", "ycore/eval/loss"),
    ("eval/accuracy {:.0%}", "ycore/eval/accuracy", "ycore/eval/rewards/accuracies"),
    ("eval/mean_token_accuracy {:.0%}", "ycore/eval/mean_token_accuracy"),
)
_STEP = (
    ("kl {:.4f}", "kl"),
    ("time/step {:.1f}", *STEP_SECONDS),
    ("tokens_per_s {:.0f}", "ycore/tokens_per_s"),
    ("mean_length {:.0f}", "completions/mean_length"),
    ("frac_reward_zero_std {:.2f}", "frac_reward_zero_std"),
)
_LINE_COLUMNS = 80
_MAX_BAR = 40
_WORK_BAR = 16

Look = Callable[[], Scene]
"""Returns what the run does now, such as `RunActivity.look`."""
Line = tuple[str, Text | str]


def look_at_nothing() -> Scene:
    """Return the scene of a run whose rows alone are shown."""
    return Scene(Activity(), 0.0, is_over=True, step_began=None, step_ended=None)


@dataclass(eq=False)
class RunView:
    """A renderable of rich; its arguments are those of `open_progress`: `view.add(row); console.print(view)`."""

    num_steps: int | None
    _: KW_ONLY
    unit: str = "step"
    look: Look = look_at_nothing
    first_step: int = 0

    def __post_init__(self) -> None:
        self._clock = TimeLeft(self.num_steps)
        self._time_left = ""
        self._last: Row = {}
        self._evaluated: Row = {}
        self._watched = "reward"
        self._values: list[float] = []  # of the reward, or of the loss where there is no reward
        self._has_masked = False

    def add(self, row: Row) -> None:
        """Add one row of metrics.jsonl."""
        if "step" not in row:
            return
        self._last = row
        self._time_left = self._clock.after(row)
        if is_evaluation(row):
            self._evaluated = row
        self._has_masked |= bool(row.get("ycore/reward_problems"))
        for label, names in (("reward", REWARD), ("loss", ("loss",))):
            if (value := number(row, *names)) is not None:
                self._watched = label
                self._values.append(value)
                return

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show: a row, or a first step under way."""
        return bool(self._last) or self.look().has_begun

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        width = options.max_width
        yield self._head(width)
        yield _block(self._lines() + self._scene_lines(self.look()), width)

    def _head(self, width: int) -> Text:
        """Return `step 3/10  ━━━━━━────────  1 min 10 s left`."""
        step = int(number(self._last, "step") or self.first_step)
        head = f"{self.unit} {step}{total_of(self.num_steps)}"
        columns = min(_MAX_BAR, width - len(head) - len(self._time_left) - 4)
        bar = ""
        if self.num_steps and columns > 0:
            bar = progress_bar(min(1.0, step / self.num_steps), columns)
        return Text("  ").join(
            part for part in (Text(head), Text(bar, "green"), Text(self._time_left)) if part
        )

    def _lines(self) -> list[Line]:
        row = self._last
        lines: list[Line] = []
        if self._values:
            spread = number(row, "reward_std")
            last = f"{self._values[-1]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
            lines.append((self._watched, f"{last}  first {self._values[0]:.3f}"))
        lines += [(name, "  ".join(parts(row, formats))) for name, formats in _NUMBERS.items()]
        if self._evaluated:
            figures = _evaluation_words(self._evaluated).replace("eval/", "")
            lines.append(("held out", f"{figures}  at step {self._evaluated['step']}"))
        if self._has_masked:
            lines.append(("masked", reward_problems(row) or "none"))
        lines.append(("workers", restarted_workers(row)))
        return [(name, text) for name, text in lines if text]

    def _scene_lines(self, scene: Scene) -> list[Line]:
        """Return what the run does, its queues, and a line a slot."""
        if scene.is_over:
            return []
        now = Text(scene.now())
        if scene.work is not None and (share := scene.work.share()) is not None:
            now = Text.assemble((progress_bar(share, _WORK_BAR), "green"), "  ", now)
        lines: list[Line] = [("now", now)]
        if queues := scene.queue_words():
            lines.append(("queues", "   ".join(queues)))
        slots = scene.slots()
        places = sorted(slots)[:MAX_SLOTS]
        for name, place in zip(slot_names(places), places, strict=True):
            lines.append((name, "   ".join(slots[place]) or "idle"))
        num_more = len(slots) - len(places)
        return [*lines, ("", f"and {num_more} more")] if num_more else lines


def total_of(num_steps: int | None) -> str:
    """Return what follows the number of a step, such as `/10`; nothing where nobody knows how many there will be."""
    return "" if num_steps is None else f"/{num_steps}"


def _block(lines: Sequence[Line], width: int) -> Table:
    """Put lines beneath each other, their names in full, of their texts as much as fits."""
    table = Table.grid(padding=(0, 2, 0, 0))
    label_columns = max((len(name) for name, _ in lines), default=0)
    columns = max(1, width - label_columns - 2)
    table.add_column(style="dim", no_wrap=True, width=label_columns)
    table.add_column(no_wrap=True, overflow="ellipsis", width=columns)
    for name, text in lines:
        table.add_row(name, text if isinstance(text, Text) else Text(text))
    return table


class TimeLeft:
    """An estimate of the time left, from the last steps' own times."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def after(self, row: Row) -> str:
        """Return `3 min 20 s left`; nothing while no step has had a time, and after the last."""
        if (seconds := number(row, "ycore/time/step")) is not None:
            self._seconds.append(seconds)
        num_left = (self._num_steps or 0) - int(number(row, "step") or 0)
        if not self._seconds or num_left <= 0:
            return ""
        return f"{as_duration(num_left * sum(self._seconds) / len(self._seconds))} left"


def parts(row: Row, formats: Sequence[Sequence[str]]) -> list[str]:
    """Write the numbers of a row; of each `(form, name, ...)` the first name that the row has."""
    words = []
    for form, *names in formats:
        if (value := number(row, *names)) is not None:
            words.append(form.format(value))
    return words


def reward_problems(row: Row) -> str:
    """Return `3 x raised KeyError: 'answer', 1 x ...`: a reward's own words, safe to print, on one line."""
    problems = row.get("ycore/reward_problems")
    counts = problems.items() if isinstance(problems, Mapping) else ()
    return ", ".join(
        f"{count} x {printable(problem, one_line=True)}"
        for problem, count in counts
        if isinstance(count, int)
    )


def restarted_workers(row: Row) -> str:
    """Tell whether a reward hung or ended its process; its items were scored again, so they need not be masked."""
    # The mean, where a row is of several steps.
    count = math.ceil(number(row, "ycore/reward_restarts") or 0)
    return f"{count} reward worker{'s' * (count > 1)} started again" if count else ""


# -- where a run is shown ------------------------------------------------------------------------------------------------


def open_progress(
    num_steps: int | None,
    *,
    unit: str = "step",
    look: Look = look_at_nothing,
    first_step: int = 0,
) -> "RunProgress":
    """Open the live view where standard output is a terminal, plain lines elsewhere.

    Args:
        num_steps: how many rows there will be; None where nobody knows.
        look: returns what the run does now; without it, the rows alone are shown.
        first_step: the last step of an earlier start, which the live view shows until it gets a row.
    """
    if not sys.stdout.isatty():
        return PlainProgress(num_steps, unit, sys.stdout, look)
    view = RunView(num_steps, unit=unit, look=look, first_step=first_step)
    return LiveProgress(view)


@dataclass(eq=False)
class PlainProgress:
    """One line a step, for logs and pipes. Whatever a model, a dataset or a reward wrote is shown as data.

    With `look`, a line that begins with `now` says what goes on where nothing was printed for 5 s.
    """

    num_steps: int | None
    unit: str
    stream: TextIO
    look: Look = look_at_nothing

    def __post_init__(self) -> None:
        self._clock = TimeLeft(self.num_steps)
        self._step = 0
        self._pulse: Pulse | None = None
        if self.look is not look_at_nothing:
            self._pulse = Pulse(self.stream, self.now).__enter__()

    def say(self, line: str) -> None:
        """Print a line about the run as a whole: engines starting, a model being fetched."""
        print(printable(line), file=self.stream, flush=True)
        if self._pulse is not None:
            self._pulse.end_silence(time.monotonic())

    def step(self, row: Row) -> None:
        """Print one row of metrics.jsonl."""
        if "step" in row:
            self._step = int(number(row, "step") or 0)
            for line in step_lines(self._head(), row, self._clock.after(row)):
                self.say(line)

    def now(self) -> str:
        """Return what goes on; nothing once the run is over."""
        scene = self.look()
        is_in_step = scene.step_began is not None and scene.work is None and not scene.is_over
        head = f"after {self._head()}, " if self._step and is_in_step else ""
        return head + scene.now()

    def _head(self) -> str:
        return f"{self.unit} {self._step}{total_of(self.num_steps)}"

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.__exit__()
            self._pulse = None
        self.stream.flush()


class LiveProgress:
    """The live view, redrawn twice a second beneath the lines about the run as a whole."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._quiet = quiet().__enter__()
        self._spinner = Spinner("dots")
        self._console = Console()
        self._live = Live(
            console=self._console,
            refresh_per_second=4,
            get_renderable=self._renderable,
        )
        self._live.start()

    def _renderable(self) -> RenderableType:
        """Return the view; before, a row on what starts."""
        if self._view.has_begun or not (words := self._view.look().now()):
            return self._view
        row: RenderableType = spinning_row(self._spinner, words, columns=self._console.width)
        return row

    def say(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def step(self, row: Row) -> None:
        self._view.add(row)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()
        self._quiet.__exit__()


RunProgress = PlainProgress | LiveProgress


def step_lines(head: str, row: Row, time_left: str = "") -> list[str]:
    """Write a step on a line of 80 columns, the most useful numbers first; an evaluation and problems on their own."""
    figures = ""
    room = _LINE_COLUMNS - len(f"{head}  {time_left}".rstrip())
    for word in parts(row, _formats(row)):
        if len(figures) + len(word) + 2 > room:
            break
        figures += f"  {word}"
    lines = []
    evaluation = _evaluation_words(row)
    problems = reward_problems(row)
    if figures or not evaluation:
        lines.append(f"{head}{figures}  {time_left}".rstrip())
    if evaluation:
        lines.append(f"{head}  {evaluation}")
    if problems:
        lines.append(f"{head}  masked {problems}")
    if restarts := restarted_workers(row):
        lines.append(f"{head}  {restarts}")
    return lines


def _evaluation_words(row: Row) -> str:
    """Return `eval/reward 0.512 (0.470 to 0.553)  eval/pass@1 0.500`; nothing for a row without an evaluation."""
    words = "  ".join(parts(row, EVALUATED))
    return words.replace("  (", " (").replace("  to ", " to ")


def _formats(row: Row) -> list[tuple[str, ...]]:
    """Return how each number of a step is written, and its names; the loss only where there is no reward."""
    if any(name in row for name in REWARD):
        return [("reward {:.3f}", *REWARD), *_STEP]
    return [
        ("loss {:.4f}", "loss"),
        ("accuracy {:.0%}", "accuracy", "rewards/accuracies"),
        ("mean_token_accuracy {:.0%}", "mean_token_accuracy"),
        ("margin {:.3f}", "rewards/margins", "margin"),
        ("learning_rate {:.1e}", "learning_rate"),
        *_STEP,
    ]


def follow_run(root: Path, *, once: bool = False) -> None:
    """Show every step of the run in `root`, from its first, until it has ended, or `once` those that are there."""
    folder = RunFolder(root)
    config = read_description(folder).config
    activity = RunActivity(root, goes_on=lambda: is_held(folder))
    evaluates = config.algorithm == "eval"
    progress = open_progress(
        None if evaluates else config.steps,
        unit="prompts" if evaluates else "step",
        look=activity.look,
    )
    try:
        progress.say(f"{root}: {config.algorithm} of {config.model} on {topic(vars(config))}")
        follower = MetricsFollower(folder.metrics, from_the_start=True, say=progress.say)
        while True:
            # Before reading: what the run wrote last is then read too.
            is_over = once or not is_held(folder)
            for row in follower.read():
                progress.step(row)
            if is_over:
                break
            time.sleep(0.5)
        progress.say(_ending(folder, evaluates=evaluates))
    finally:
        progress.close()


def _ending(folder: RunFolder, *, evaluates: bool) -> str:
    if is_held(folder):
        return "the run goes on"
    if not folder.summary.is_file():
        way_out = f"`ycore resume {shlex.quote(str(folder.root))}` goes on"
        if evaluates:
            way_out = "start it again"
        return f"over without a summary, as after a kill; {way_out}"
    summary = read_summary(folder)
    steps = summary.status or "ended"
    if not evaluates:
        steps += f" after {summary.steps} step{'s' * (summary.steps != 1)}"
    duration = f", {as_duration(summary.wall_s)}" if summary.wall_s else ""
    return steps + duration + (f": {summary.error}" if summary.error else "")
