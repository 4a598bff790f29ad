"""curve.png: reward, completion length and time of every step, in one picture.

Not here: the numbers (`metrics`). Uses matplotlib's file backend only, so it needs no display.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = tuple[list[float], list[float]]

_BLUE, _GREY, _GREEN = "#2456a6", "#8a8f98", "#3f8f5f"
_PHASES = (
    ("ycore/time/sync", "sync", "#d9a441"),
    ("ycore/time/round", "generate and score", _BLUE),
    ("ycore/time/train", "train", _GREEN),
)


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw 1200 x 700 pixels to `path`; False, and no file, when no step has a reward yet."""
    drawn = points(metrics, "ycore/reward")
    reward = drawn if drawn[0] else points(metrics, "reward")
    if not reward[0]:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    draw_series(figure.add_subplot(grid[0, :]), reward, "reward")
    _draw_length(figure.add_subplot(grid[1, 0]), points(metrics, "completions/mean_length"))
    _draw_time(figure.add_subplot(grid[1, 1]), metrics)
    for axes in figure.axes:
        style(axes)
    save(figure, path, title)
    return True


def save(figure: Any, path: Path, title: str) -> None:
    """The picture under its title, whole or not there."""
    figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, ha="left")
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def points(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    """The steps at which `name` is a finite number, and its values."""
    found = [
        (float(row["step"]), float(row[name]))
        for row in metrics
        if isinstance(row.get("step"), int | float)
        and isinstance(row.get(name), int | float)
        and math.isfinite(row[name])
    ]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """The mean of the values within `window // 2` steps on either side; shorter at the ends, so never shifted."""
    half = window // 2
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        means.append(math.fsum(near) / len(near))
    return means


def draw_series(axes: Any, series: Points, name: str) -> None:
    """Every step in grey, and smoothed in blue; shares of one on an axis from 0 to 1."""
    steps, values = series
    window = max(3, len(values) // 10)
    axes.plot(
        steps,
        values,
        color=_GREY,
        linewidth=1,
        alpha=0.7,
        label="each step",
        marker="o" if len(values) <= 60 else None,
        markersize=3,
    )
    axes.plot(steps, smooth(values, window=window), color=_BLUE, linewidth=2.6, label="smoothed")
    axes.set_ylabel(name)
    if name == "reward" and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="best", frameon=False, fontsize=10)


def _draw_length(axes: Any, length: Points) -> None:
    axes.plot(*length, color=_GREY, linewidth=1.5)
    axes.set_title("completion length (tokens)", fontsize=11, loc="left")
    axes.set_ylim(bottom=0)


def _draw_time(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    layers = [(points(metrics, name), label, colour) for name, label, colour in _PHASES]
    steps = sorted({step for (at, _), _, _ in layers for step in at})
    heights = [[dict(zip(*series, strict=True)).get(step, 0.0) for step in steps] for series, _, _ in layers]
    axes.set_title("seconds a step", fontsize=11, loc="left")
    if not steps:
        return
    labels, colours = [label for _, label, _ in layers], [colour for _, _, colour in layers]
    axes.stackplot(steps, heights, labels=labels, colors=colours, alpha=0.85)
    axes.set_ylim(0, max(map(sum, zip(*heights, strict=True))) * 1.35 or 1)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)


def style(axes: Any) -> None:
    """No frame, whole steps."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", fontsize=10)
    axes.margins(x=0.01)
