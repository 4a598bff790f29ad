"""Draw a run's curve.png, and what every figure shares. Figures are drawn to files only, so no display is needed."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ycore.run.metrics import EVALUATION, REWARD, Row, number
from ycore.run.text import printable

BLUE, GREY, GREEN = "#2456a6", "#8a8f98", "#3f8f5f"


# -- for every figure --------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure; sizes are in inches of 100 dots."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def save_png(figure: Any, path: Path) -> None:
    """Save a picture that is whole or not there."""
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def style(axes: Any) -> None:
    """Remove the frame, and put whole steps on the x axis."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_xlabel("step", fontsize=10)
    axes.margins(x=0.01)


def literal(text: str) -> str:
    """Escape text for matplotlib: a pair of dollars would be a formula, and `_x` is left out of legends."""
    text = printable(text, one_line=True).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def points(metrics: Sequence[Row], *names: str) -> tuple[list[float], list[float]]:
    """Return the steps at which one of `names` is a finite number, and its values."""
    steps = []
    values = []
    for row in metrics:
        step = number(row, "step")
        value = number(row, *names)
        if step is not None and value is not None:
            steps.append(step)
            values.append(value)
    return steps, values


def smooth(values: Sequence[float]) -> list[float]:
    """Average within a twentieth of all on either side; shorter at the ends: never shifted."""
    half = max(3, len(values) // 10) // 2
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        total = sums[index + reach + 1] - sums[index - reach]
        means.append(total / (2 * reach + 1))
    return means


# -- curve.png ---------------------------------------------------------------------------------------------------------


def draw_curve(metrics: Sequence[Row], path: Path, title: str) -> bool:
    """Draw a run's reward, or its loss, to a PNG of 1200 x 700 pixels; False, and no file, where no step has either.

    Every step is in grey, and smoothed in blue; a reward within 0 and 1 is on an axis from 0 to 1.
    """
    name = "reward"
    steps, values = points(metrics, *REWARD)
    if not steps:
        name = "loss"
        steps, values = points(metrics, name)
    if not steps:
        return False
    figure = new_figure(12, 7)
    axes = figure.add_subplot()
    evaluated, held_out = points(metrics, f"{EVALUATION}{name}")
    if evaluated:
        axes.plot(evaluated, held_out, color=GREEN, marker="s", linewidth=1.8, label="held out")
    marker = "o" if len(values) <= 60 else None
    axes.plot(steps, values, color=GREY, linewidth=1, alpha=0.7, label="each step", marker=marker,
              markersize=3)  # fmt: skip
    axes.plot(steps, smooth(values), color=BLUE, linewidth=2.6, label="smoothed")
    axes.set_ylabel(name)
    if name == "reward" and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="best", frameon=False, fontsize=10)
    style(axes)
    figure.suptitle(literal(title), fontsize=14, fontweight="bold", x=0.01, ha="left")
    save_png(figure, path)
    return True
