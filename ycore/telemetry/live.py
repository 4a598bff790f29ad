"""The live view of a run: its reward, its groups, where its step's time goes; drawn from rows alone.

The run's own terminal and `ycore watch` show the same view. It never shrinks from one row to the next, and it fits 80
columns.

Not here: reading the rows (`follow`), the slots over time (`timeline`), and plain lines where there is no terminal
(`progress`).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ycore.telemetry.clock import TimeLeft

Row = Mapping[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32
_PHASES = {"sync": "sending weights", "round": "generating and scoring", "train": "training"}


class RunView:
    """Example: `view = RunView(40); view.add(row); console.print(view)`."""

    def __init__(self, num_steps: int | None, *, unit: str = "step") -> None:
        self._num_steps = num_steps
        self._unit = unit
        self._clock = TimeLeft(num_steps)
        self._left = ""
        self._last: Row = {}
        self._rewards: list[float] = []
        self._watched = "reward"

    def add(self, row: Row) -> None:
        """One row of metrics.jsonl."""
        if "step" not in row:
            return
        self._last, self._left = row, self._clock.after(row)
        reward = _number(row, "ycore/reward", "reward")
        self._watched = "loss" if reward is None and "loss" in row else "reward"
        watched = _number(row, "loss") if self._watched == "loss" else reward
        if watched is not None:
            self._rewards.append(watched)

    @property
    def has_rows(self) -> bool:
        return bool(self._last)

    def __rich__(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for name, text in self._lines():
            table.add_row(name, text)
        return Group(self._head(), table)

    def _head(self) -> RenderableType:
        step = int(self._last.get("step", 0))
        head = Table.grid(padding=(0, 2))
        total = "" if self._num_steps is None else f"/{self._num_steps}"
        bar = ProgressBar(total=self._num_steps, completed=step, width=24) if self._num_steps else Text("")
        head.add_row(f"{self._unit} {step}{total}", bar, self._left)
        return head

    def _lines(self) -> list[tuple[str, Text | str]]:
        row = self._last
        lines: list[tuple[str, Text | str]] = [(self._watched, self._reward_line())] if self._rewards else []
        for name, parts in (("groups", _groups(row)), ("tokens", _tokens(row)), ("time", _times(row))):
            if parts:
                lines.append((name, "  ".join(parts)))
        slowest = slowest_part(row)
        if slowest:
            lines.append(("slowest", slowest))
        problems = row.get("ycore/reward_problems", {})
        if problems:
            lines.append(("masked", ", ".join(f"{count} x {problem}" for problem, count in problems.items())))
        return lines

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


def slowest_part(row: Row) -> str:
    """`training, 62 % of the step`: what to look at first; nothing where a step does not tell its parts."""
    told = {said: value for name, said in _PHASES.items() if (value := _number(row, f"ycore/time/{name}")) is not None}
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
