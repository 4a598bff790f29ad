"""The live view of a run: its reward, its groups, where its step's time goes, and its slots, a lane each.

The run's own terminal and `ycore watch` show the same view. It never shrinks while the run goes on, and it fits 80
columns.

Not here: reading the rows (`follow`), what the run is at (`activity`), how a lane is drawn (`lanes`), and plain lines
where there is no terminal (`progress`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ycore.run.text import printable
from ycore.view.activity import PHASES, Scene
from ycore.view.lanes import MOST_CELLS, MOST_LANES, TimeLeft, Window, cell_seconds, draw_lane, draw_legend, lane_names

Row = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32
_FEWEST_CELLS = 10
_BESIDE_CELLS = 7  # columns: two gaps, and the number in flight

Look = Callable[[], Scene]
Line = tuple[str, Text | str]


class RunView:
    """Example: `view = RunView(40); view.add(row); console.print(view)`. `look` tells what the run is at now."""

    def __init__(self, num_steps: int | None, *, unit: str = "step", look: Look | None = None) -> None:
        self._num_steps = num_steps
        self._unit = unit
        self._look = look
        self._clock = TimeLeft(num_steps)
        self._left = ""
        self._last: Row = {}
        self._rewards: list[float] = []
        self._watched = "reward"
        self._longest_s = 0.0
        self._has_masked = False

    def add(self, row: Row) -> None:
        """One row of metrics.jsonl."""
        if "step" not in row:
            return
        self._last, self._left = row, self._clock.after(row)
        self._longest_s = max(self._longest_s, _number(row, "ycore/time/step", "step_time") or 0.0)
        self._has_masked = self._has_masked or bool(row.get("ycore/reward_problems"))
        reward = _number(row, "ycore/reward", "reward")
        self._watched = "loss" if reward is None and "loss" in row else "reward"
        watched = _number(row, "loss") if self._watched == "loss" else reward
        if watched is not None:
            self._rewards.append(watched)

    @property
    def has_begun(self) -> bool:
        """Whether there is anything to show: a row, or a first step under way."""
        return bool(self._last) or (self._look is not None and self._look().has_begun)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        scene = self._look() if self._look is not None else None
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        shown = [*self._lines(), *([] if scene is None else self._scene_lines(scene, options.max_width))]
        for name, text in shown:
            table.add_row(name, text if isinstance(text, Text) else Text(text))
        yield self._head()
        yield table

    def _head(self) -> RenderableType:
        step = int(self._last.get("step", 0))
        head = Table.grid(padding=(0, 2))
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        bar = ProgressBar(total=self._num_steps, completed=step, width=24) if self._num_steps else Text("")
        head.add_row(f"{self._unit} {step}{total}", bar, self._left)
        return head

    def _lines(self) -> list[Line]:
        row = self._last
        lines: list[Line] = [(self._watched, self._reward_line())] if self._rewards else []
        for name, parts in (("groups", _groups(row)), ("tokens", _tokens(row)), ("time", _times(row))):
            if parts:
                lines.append((name, "  ".join(parts)))
        slowest = slowest_part(row)
        if slowest:
            lines.append(("slowest", slowest))
        if self._has_masked:
            lines.append(("masked", ", ".join(reward_problems(row)) or "none"))
        restarted = restarted_workers(row)
        if restarted:
            lines.append(("workers", restarted))
        return lines

    def _scene_lines(self, scene: Scene, width: int) -> list[Line]:
        """What the run is at, its queues, and a lane a slot."""
        lines: list[Line] = [] if scene.is_over else [("now", scene.now())]
        told = scene.queue_words()
        if told and not scene.is_over:
            lines.append(("queues", "   ".join(told)))
        return lines + (self._lanes(scene, width) if scene.shows_lanes else [])

    def _lanes(self, scene: Scene, width: int) -> list[Line]:
        lanes = scene.activity.lanes
        places = sorted(lanes)[:MOST_LANES]
        names = lane_names(places)
        num_cells = min(MOST_CELLS, max(_FEWEST_CELLS, width - max(map(len, ["slowest", *names])) - _BESIDE_CELLS))
        window = Window(scene.until, cell_seconds(self._longest_s), num_cells)
        roles = {role for lane in lanes.values() for role in lane.busy} | set(scene.queues())
        lines: list[Line] = [("slots", draw_legend(roles, window, swaps=any(lane.swaps for lane in lanes.values())))]
        for name, place in zip(names, places, strict=True):
            drawn = draw_lane(lanes[place], window, open_since=scene.open_since(place))
            flying = "" if scene.is_over else f"  {scene.flying(place)}"
            lines.append((name, drawn.append(flying, "dim")))
        more = len(lanes) - len(places)
        return [*lines, ("", f"and {more} more")] if more else lines

    def _reward_line(self) -> Text:
        spread = _number(self._last, "reward_std")
        told = f"{self._rewards[-1]:.3f}" + ("" if spread is None else f" ± {spread:.3f}")
        return Text.assemble(f"{told}  ", (sparkline(self._rewards, width=_CURVE_WIDTH), "green"))


def sparkline(values: Sequence[float], *, width: int) -> str:
    """The values as bars of eight heights; where there are more than `width`, means of neighbours."""
    if len(values) > width:
        edges = [len(values) * place // width for place in range(width + 1)]
        values = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def reward_problems(row: Row) -> list[str]:
    """`3 x raised KeyError: 'answer'`, by problem: a reward's own words, safe to print, each on one line."""
    problems = row.get("ycore/reward_problems", {})
    return [f"{count} x {printable(problem, one_line=True)}" for problem, count in problems.items()]


def restarted_workers(row: Row) -> str:
    """Whether a reward hung or ended its process; its items were asked again, so they need not be masked."""
    count = math.ceil(row.get("ycore/reward_restarts", 0))  # the mean, where a row tells of several steps
    return f"{count} reward worker{'s' * (count > 1)} started again" if count else ""


def slowest_part(row: Row) -> str:
    """`training, 62 % of the step`: what to look at first; nothing where a step does not tell its parts."""
    told = {said: value for name, said in PHASES.items() if (value := _number(row, f"ycore/time/{name}")) is not None}
    whole = _number(row, "ycore/time/step", "step_time") or math.fsum(told.values())
    if not told or whole <= 0:
        return ""
    said, seconds = max(told.items(), key=lambda item: item[1])
    return f"{said}, {min(1.0, seconds / whole):.0%} of the step"


def _groups(row: Row) -> list[str]:
    return _parts(
        row,
        ("frac_reward_zero_std", "zero-variance {:.0%}"),
        ("ycore/sampling/drawn", "drawn {:.0f}"),
        ("ycore/sampling/yield", "yield {:.0%}"),
        ("ycore/sampling/surplus", "left over {:.0f}"),
        ("ycore/swaps", "swaps {:.0f}"),
        ("ycore/idle_share", "idle {:.0%}"),
    )


def _tokens(row: Row) -> list[str]:
    return _parts(
        row,
        ("ycore/tokens_per_s", "{:.0f} a second"),
        ("completions/mean_length", "length {:.0f}"),
        ("completions/clipped_ratio", "cut off {:.0%}"),
        ("ycore/logprob_gap", "gap {:.4f}"),
    )


def _times(row: Row) -> list[str]:
    return _parts(
        row,
        ("ycore/time/step", "step {:.1f} s:"),
        ("ycore/time/sync", "sync {:.1f}"),
        ("ycore/time/round", "round {:.1f}"),
        ("ycore/time/train", "train {:.1f}"),
    )


def _parts(row: Row, *wanted: tuple[str, str]) -> list[str]:
    return [form.format(value) for name, form in wanted if (value := _number(row, name)) is not None]


def _number(row: Row, *names: str) -> float | None:
    """The first of `names` that is a number in this row."""
    return next((float(row[name]) for name in names if isinstance(row.get(name), int | float)), None)
