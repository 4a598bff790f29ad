"""Draw a run's pictures: curve.png, and timeline.png with a lane a slot.

Figures are drawn to files only, so no display is needed.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ycore.run.metrics import REWARD, Row, number
from ycore.run.paths import RunFolder
from ycore.run.text import printable
from ycore.run.trace import ROUND, SWAP, Span, busy_intervals, finish_trace, read_trace
from ycore.view.activity import slot_names

Points = tuple[list[float], list[float]]
"""Steps, and the values at them."""

BLUE, GREY, GREEN = "#2456a6", "#8a8f98", "#3f8f5f"
ROLE_COLOURS: Mapping[str, str] = {
    "rollout": BLUE, "judge": "#d9822b", "reward_model": GREEN, "teacher": "#8a4fa3", SWAP: "#c9342f",
}  # fmt: skip
HELD_OUT, HELD_OUT_LOSS = "ycore/eval/reward", "ycore/eval/loss"

_PHASES = (
    ("ycore/time/sync", "sync", "#d9a441"),
    ("ycore/time/round", "generate and score", BLUE),
    ("ycore/time/train", "train", GREEN),
)
# Beneath a loss, left and right: of each panel the first series that the run has, and its title.
_BENEATH_A_LOSS = (
    {
        "rewards/accuracies": "pairs in the right order",
        "accuracy": "pairs in the right order",
        "mean_token_accuracy": "tokens predicted",
    },
    {
        "rewards/margins": "margin of the implicit rewards",
        "margin": "margin of the rewards",
        "learning_rate": "learning rate",
    },
)
_MAX_LANES = 64
_SWAP_LOOK: Mapping[str, Any] = {
    "facecolor": "white", "edgecolor": ROLE_COLOURS[SWAP], "hatch": "////", "linewidth": 1,
}  # fmt: skip


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


def style(axes: Any, *, below: str = "step") -> None:
    """Remove the frame, and put whole numbers on the x axis, which is named `below`."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_xlabel(below, fontsize=10)
    axes.margins(x=0.01)


def literal(text: str) -> str:
    """Escape text for matplotlib: a pair of dollars would be a formula, and `_x` is left out of legends."""
    text = printable(text, one_line=True).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def points(metrics: Sequence[Row], *names: str) -> Points:
    """Return the steps at which one of `names` is a finite number, and its values."""
    steps, values = [], []
    for row in metrics:
        step, value = number(row, "step"), number(row, *names)
        if step is not None and value is not None:
            steps.append(step)
            values.append(value)
    return steps, values


def smooth(values: Sequence[float], *, window: int | None = None) -> list[float]:
    """Average within half a window (by default a tenth of all) on either side; shorter at the ends: never shifted."""
    half = (max(3, len(values) // 10) if window is None else window) // 2
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        means.append(fmean(values[index - reach : index + reach + 1]))
    return means


# -- curve.png ---------------------------------------------------------------------------------------------------------


def draw_curve(metrics: Sequence[Row], path: Path, title: str) -> bool:
    """Draw a run's reward, or its loss, to a PNG of 1200 x 700 pixels; False, and no file, where no step has either."""
    has_reward = bool(points(metrics, *REWARD)[0])
    if not has_reward and not points(metrics, "loss")[0]:
        return False
    figure = new_figure(12, 7)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    main = figure.add_subplot(grid[0, :])
    left = figure.add_subplot(grid[1, 0])
    right = figure.add_subplot(grid[1, 1])
    if has_reward:
        _draw_held_out(main, metrics, HELD_OUT)
        _draw_main(main, points(metrics, *REWARD), "reward")
        _draw_series(
            left, points(metrics, "completions/mean_length"), "completion length (tokens)"
        )
        left.set_ylim(bottom=0)
        _draw_time(right, metrics)
    else:
        _draw_held_out(main, metrics, HELD_OUT_LOSS)
        _draw_main(main, points(metrics, "loss"), "loss")
        for axes, titles in zip((left, right), _BENEATH_A_LOSS, strict=True):
            name = next((name for name in titles if points(metrics, name)[0]), None)
            axes.set_visible(name is not None)
            if name is not None:
                _draw_series(axes, points(metrics, name), titles[name])
    for axes in figure.axes:
        style(axes)
    figure.suptitle(literal(title), fontsize=14, fontweight="bold", x=0.01, ha="left")
    save_png(figure, path)
    return True


def _draw_series(axes: Any, series: Points, title: str) -> None:
    axes.plot(*series, color=GREY, linewidth=1.5)
    axes.set_title(title, fontsize=11, loc="left")


def _draw_main(axes: Any, series: Points, name: str) -> None:
    """Draw every step in grey, and smoothed in blue; a reward within 0 and 1 on an axis from 0 to 1."""
    steps, values = series
    marker = "o" if len(values) <= 60 else None
    axes.plot(steps, values, color=GREY, linewidth=1, alpha=0.7, label="each step", marker=marker,
              markersize=3)  # fmt: skip
    axes.plot(steps, smooth(values), color=BLUE, linewidth=2.6, label="smoothed")
    axes.set_ylabel(name)
    if name == "reward" and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="best", frameon=False, fontsize=10)


def _draw_held_out(axes: Any, metrics: Sequence[Row], name: str) -> None:
    """Draw what evaluations measured, with their intervals where they have some."""
    steps, values = points(metrics, name)
    if not steps:
        return
    spread = []
    for end in ("low", "high"):
        bounds = dict(zip(*points(metrics, f"{name}/{end}"), strict=True))
        spread.append(
            [
                abs(bounds.get(step, value) - value)
                for step, value in zip(steps, values, strict=True)
            ]
        )
    axes.errorbar(steps, values, yerr=spread, color=GREEN, capsize=4, marker="s", linewidth=1.8,
                  label="held out")  # fmt: skip


def _draw_time(axes: Any, metrics: Sequence[Row]) -> None:
    for name, label, colour in _PHASES:
        axes.plot(*points(metrics, name), color=colour, linewidth=1.5, label=label)
    axes.set_title("seconds a step", fontsize=11, loc="left")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)


# -- timeline.png ------------------------------------------------------------------------------------------------------


def finish_trace_and_draw(folder: RunFolder, title: str) -> None:
    """Close the run's trace.json and draw its last rounds beside it; a picture is not worth a run's result."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        finish_trace(folder.trace)
        if spans := last_rounds(read_trace(folder.trace)):
            draw_panels([(title, spans)], folder.timeline)


def last_rounds(spans: Sequence[Span], num_rounds: int = 4) -> list[Span]:
    """Return the spans since the beginning of the last rounds, without the rounds themselves."""
    began = {span.details.get("step", 0): span.began for span in spans if span.name == ROUND}
    since = sorted(began.values())[-num_rounds:][0] if began else 0.0
    return [span for span in spans if span.name != ROUND and span.began >= since]


def draw_panels(panels: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """Draw panels of lanes, each `(title, spans)`, one under the other on one scale of seconds; `path` is a PNG."""
    lanes = [
        sorted({(span.rank, span.slot) for span in spans})[:_MAX_LANES] for _, spans in panels
    ]
    heights = [0.9 + 0.28 * max(1, len(slots)) for slots in lanes]
    figure = new_figure(12, max(2.5, sum(heights)))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, spans), slots in zip(grid[:, 0], panels, lanes, strict=True):
        _draw_lanes(axes, spans, slots)
        axes.set_title(literal(title), loc="left", fontsize=11)
    grid[-1, 0].set_xlabel("seconds", fontsize=10)
    _add_legend(figure, {span.name for _, spans in panels for span in spans})
    save_png(figure, path)


def _draw_lanes(axes: Any, spans: Sequence[Span], slots: Sequence[tuple[int, int]]) -> None:
    start = min((span.began for span in spans), default=0.0)
    for row, (rank, slot) in enumerate(slots):
        lane = [span for span in spans if (span.rank, span.slot) == (rank, slot)]
        # Backwards, so that rollouts come first: where roles share a slot, the others lie over them; swaps over all.
        names = sorted({span.name for span in lane} - {SWAP}, reverse=True)
        for name in names:
            bars = _bars(lane, name, start)
            colour = ROLE_COLOURS.get(name, GREY)
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, alpha=0.8)
        if bars := _bars(lane, SWAP, start):
            axes.broken_barh(bars, (row - 0.4, 0.8), **_SWAP_LOOK)
            begins = [began for began, _ in bars]
            axes.vlines(begins, row - 0.45, row + 0.45, color=ROLE_COLOURS[SWAP], linewidth=1)
    axes.set_yticks(range(len(slots)), slot_names(slots), fontsize=9)
    axes.set_ylim(len(slots) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _bars(lane: Sequence[Span], name: str, start: float) -> list[tuple[float, float]]:
    intervals = busy_intervals(span for span in lane if span.name == name)
    return [(began - start, seconds) for began, seconds in intervals]


def _add_legend(figure: Any, names: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = []
    for name in (*ROLE_COLOURS, *sorted(names - ROLE_COLOURS.keys())):
        if name in names:
            look = _SWAP_LOOK if name == SWAP else {"color": ROLE_COLOURS.get(name, GREY)}
            patches.append(Patch(**look, label=name.replace("_", " ")))
    figure.legend(
        handles=patches,
        loc="outside upper right",
        ncols=len(patches),
        frameon=False,
        fontsize=10,
    )
