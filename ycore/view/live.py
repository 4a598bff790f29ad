"""The live view of a run: its reward, its groups, where its step's time goes, and its slots, a lane each.

The run's own terminal and `ycore report --live` show it. It never shrinks while the run goes on, and it fits 80 columns.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ycore.run.metrics import REWARD, STEP_SECONDS, Row, is_evaluation, number
from ycore.run.text import as_duration, printable
from ycore.view.activity import PHASES, Scene
from ycore.view.lanes import (
    MAX_CELLS,
    MAX_LANES,
    Window,
    cell_seconds,
    draw_lane,
    draw_legend,
    lane_names,
)

_BARS = "▁▂▃▄▅▆▇█"

# The numbers of a step, line by line: how each is written, and its names in a row of metrics.jsonl.
_NUMBERS = {
    "groups": (
        ("zero-variance {:.0%}", "frac_reward_zero_std"),
        ("drawn {:.0f}", "ycore/sampling/drawn"),
        ("yield {:.0%}", "ycore/sampling/yield"),
        ("left over {:.0f}", "ycore/sampling/surplus"),
        ("swaps {:.0f}", "ycore/swaps"),
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

EVALUATED = (
    ("held-out reward {:.3f}", "ycore/eval/reward"),
    ("({:.3f}", "ycore/eval/reward/low"),
    ("to {:.3f})", "ycore/eval/reward/high"),
    ("pass@1 {:.3f}", "ycore/eval/pass@1"),
    ("held-out loss {:.4f}", "ycore/eval/loss"),
    ("accuracy {:.0%}", "ycore/eval/accuracy", "ycore/eval/rewards/accuracies"),
    ("token accuracy {:.0%}", "ycore/eval/mean_token_accuracy"),
    ("over-optimised: the judge fell by {:.3f}", "ycore/eval/judge_fell"),
)

_STEP = "ycore/time/step"

Look = Callable[[], Scene]
Line = tuple[str, Text | str]


class RunView:
    """A renderable of rich; its arguments are those of `open_progress`: `view.add(row); console.print(view)`."""

    def __init__(
        self, num_steps: int | None, *, unit: str = "step", look: Look | None = None
    ) -> None:
        self._num_steps = num_steps
        self._unit = unit
        self._look = look
        self._clock = TimeLeft(num_steps)
        self._time_left = ""
        self._last: Row = {}
        self._evaluated: Row = {}
        self._watched = "reward"
        self._values: list[float] = []  # of the reward, or of the loss where there is no reward
        self._longest_s = 0.0
        self._has_masked = False

    def add(self, row: Row) -> None:
        """Add one row of metrics.jsonl."""
        if "step" not in row:
            return
        self._last = row
        self._time_left = self._clock.after(row)
        if is_evaluation(row):
            self._evaluated = row
        self._longest_s = max(self._longest_s, number(row, *STEP_SECONDS) or 0.0)
        self._has_masked = self._has_masked or bool(row.get("ycore/reward_problems"))
        value = number(row, *REWARD)
        if value is None and "loss" in row:
            self._watched = "loss"
            value = number(row, "loss")
        elif value is not None:
            self._watched = "reward"
        if value is not None:
            self._values.append(value)

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show: a row, or a first step under way."""
        return bool(self._last) or (self._look is not None and self._look().has_begun)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        step = int(number(self._last, "step") or 0)
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        bar: RenderableType = ""
        if self._num_steps:
            bar = ProgressBar(total=self._num_steps, completed=step, width=24)
        head = Table.grid(padding=(0, 2))
        head.add_row(f"{self._unit} {step}{total}", bar, self._time_left)
        yield head
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        lines = self._lines()
        if self._look is not None:
            lines += self._scene_lines(self._look(), options.max_width)
        for name, text in lines:
            table.add_row(name, text if isinstance(text, Text) else Text(text))
        yield table

    def _lines(self) -> list[Line]:
        row = self._last
        lines: list[Line] = []
        if self._values:
            spread = number(row, "reward_std")
            last = f"{self._values[-1]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
            bars = sparkline(self._values, width=32)
            lines.append((self._watched, Text.assemble(f"{last}  ", (bars, "green"))))
        lines += [(name, "  ".join(parts(row, formats))) for name, formats in _NUMBERS.items()]
        if self._evaluated:
            figures = " ".join(parts(self._evaluated, EVALUATED)).removeprefix("held-out ")
            lines.append(("held out", f"{figures} at step {self._evaluated['step']}"))
        lines.append(("slowest", slowest_part(row)))
        if self._has_masked:
            lines.append(("masked", ", ".join(reward_problems(row)) or "none"))
        lines.append(("workers", restarted_workers(row)))
        return [(name, text) for name, text in lines if text]

    def _scene_lines(self, scene: Scene, width: int) -> list[Line]:
        """Return what the run does, its queues, and a lane a slot."""
        lines: list[Line] = []
        if not scene.is_over:
            lines.append(("now", scene.now()))
            if queues := scene.queue_words():
                lines.append(("queues", "   ".join(queues)))
        return lines + (self._lanes(scene, width) if scene.shows_lanes else [])

    def _lanes(self, scene: Scene, width: int) -> list[Line]:
        lanes = scene.activity.lanes
        places = sorted(lanes)[:MAX_LANES]
        names = lane_names(places)
        # Columns beside the cells: the name, two gaps, and the number in flight.
        num_beside = max(map(len, ["slowest", *names])) + 7
        num_cells = min(MAX_CELLS, max(10, width - num_beside))
        window = Window(scene.until, cell_seconds(self._longest_s), num_cells)
        roles = {role for lane in lanes.values() for role in lane.busy} | set(scene.queues())
        has_swaps = any(lane.swaps for lane in lanes.values())
        lines: list[Line] = [("slots", draw_legend(roles, window, swaps=has_swaps))]
        for name, place in zip(names, places, strict=True):
            cells = draw_lane(lanes[place], window, open_since=scene.open_since(place))
            if not scene.is_over:
                cells.append(f"  {scene.num_in_flight(place)}", "dim")
            lines.append((name, cells))
        num_more = len(lanes) - len(places)
        return [*lines, ("", f"and {num_more} more")] if num_more else lines


class TimeLeft:
    """An estimate of the time left, from the last steps' own times."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def after(self, row: Row) -> str:
        """Return `3 min 20 s left`; nothing while no step has had a time, and after the last."""
        if (seconds := number(row, _STEP)) is not None:
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


def sparkline(values: Sequence[float], *, width: int) -> str:
    """Draw the values as bars of eight heights; where there are more than `width`, means of neighbours."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    scale = (len(_BARS) - 1) / (high - low)
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def reward_problems(row: Row) -> list[str]:
    """Return `3 x raised KeyError: 'answer'`, by problem: a reward's own words, safe to print, each on one line."""
    problems = row.get("ycore/reward_problems")
    counts = problems.items() if isinstance(problems, Mapping) else ()
    return [
        f"{count} x {printable(problem, one_line=True)}"
        for problem, count in counts
        if isinstance(count, int)
    ]


def restarted_workers(row: Row) -> str:
    """Tell whether a reward hung or ended its process; its items were scored again, so they need not be masked."""
    # The mean, where a row is of several steps.
    count = math.ceil(number(row, "ycore/reward_restarts") or 0)
    return f"{count} reward worker{'s' * (count > 1)} started again" if count else ""


def slowest_part(row: Row) -> str:
    """Return `training, 62 % of the step`: what to look at first; nothing where a row has no times of its parts."""
    seconds: dict[str, float] = {}
    for name, words in PHASES.items():
        if (value := number(row, f"ycore/time/{name}")) is not None:
            seconds[words] = value
    whole = number(row, *STEP_SECONDS) or math.fsum(seconds.values())
    if not seconds or whole <= 0:
        return ""
    words = max(seconds, key=lambda phase: seconds[phase])
    return f"{words}, {min(1.0, seconds[words] / whole):.0%} of the step"
