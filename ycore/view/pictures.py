"""timeline.png: one lane a slot, a colour a role, swaps hatched; the last rounds of a run, or simulated ones.

curve.png: reward, completion length and time of every step, in one picture.

curve.png of a run without rollouts: its loss, and what its trainer counts as right, step by step.

Not here: the spans (`trace`). Uses matplotlib's file backend only, so it needs no display.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.run.trace import ROUND, SWAP, Span, busy_stretches, finish_trace, read_trace

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


_SHARES = (
    ("rewards/accuracies", "pairs in the right order"),
    ("accuracy", "pairs in the right order"),
    ("mean_token_accuracy", "tokens predicted"),
)
_MARGINS = (
    ("rewards/margins", "margin of the implicit rewards"),
    ("margin", "margin of the rewards"),
    ("learning_rate", "learning rate"),
)


def draw_loss_curve(metrics: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draw 1200 x 700 pixels to `path`; False, and no file, when no step has a loss yet."""
    loss = points(metrics, "loss")
    if not loss[0]:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    draw_series(figure.add_subplot(grid[0, :]), loss, "loss")
    for place, names in enumerate((_SHARES, _MARGINS)):
        _draw_first(figure.add_subplot(grid[1, place]), metrics, names)
    for axes in figure.axes:
        style(axes)
    save(figure, path, title)
    return True


def _draw_first(axes: Any, metrics: Sequence[Mapping[str, Any]], names: Sequence[tuple[str, str]]) -> None:
    """The first of the series that this run has."""
    for name, said in names:
        series = points(metrics, name)
        if series[0]:
            axes.plot(*series, color="#8a8f98", linewidth=1.5)
            axes.set_title(said, fontsize=11, loc="left")
            return
    axes.set_visible(False)


COLOURS: Mapping[str, str] = {"rollout": "#2456a6", "judge": "#d9822b", "reward_model": "#3f8f5f", SWAP: "#c9342f"}
_OTHER = "#8a8f98"
_MOST_ROUNDS = 4
_MOST_LANES = 64


def draw_timeline(spans: Sequence[Span], path: Path, title: str) -> bool:
    """Draw the last rounds of a trace to `path`; False, and no file, where there are none."""
    shown = last_rounds(spans)
    if not shown:
        return False
    draw_panels([(title, shown)], path)
    return True


def finish_trace_and_draw(folder: Path, title: str) -> None:
    """Close the run's trace.json and draw timeline.png beside it; a picture that fails is not worth a run's result."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        finish_trace(folder / "trace.json")
        draw_timeline(read_trace(folder / "trace.json"), folder / "timeline.png", title)


def draw_panels(panels: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """One panel of lanes under the other, on one scale of seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [sorted({(span.rank, span.slot) for span in spans})[:_MOST_LANES] for _, spans in panels]
    height = sum(0.9 + 0.28 * max(1, len(own)) for own in lanes)
    figure = Figure(figsize=(12, max(2.5, height)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [0.9 + 0.28 * max(1, len(own)) for own in lanes]
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)
    for axes, (title, spans), own in zip(grid[:, 0], panels, lanes, strict=True):
        _draw_lanes(axes, spans, own)
        axes.set_title(title, loc="left", fontsize=11)
    grid[-1, 0].set_xlabel("seconds", fontsize=10)
    _add_legend(figure, {span.name for _, spans in panels for span in spans})
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def last_rounds(spans: Sequence[Span], most: int = _MOST_ROUNDS) -> list[Span]:
    """What happened on slots since the beginning of the last rounds, without the rounds themselves."""
    begins = sorted({span.details.get("step", 0): span.began for span in spans if span.name == ROUND}.values())
    since = begins[-most:][0] if begins else 0.0
    return [span for span in spans if span.name != ROUND and span.began >= since]


def _draw_lanes(axes: Any, spans: Sequence[Span], lanes: Sequence[tuple[int, int]]) -> None:
    start = min((span.began for span in spans), default=0.0)
    ranks = {rank for rank, _ in lanes}
    for row, (rank, slot) in enumerate(lanes):
        own = [span for span in spans if (span.rank, span.slot) == (rank, slot)]
        # Backwards, so that rollouts come first: where roles share a slot, the others lie over them; swaps over all.
        for name in sorted({span.name for span in own}, key=lambda name: (name != SWAP, name), reverse=True):
            stretches = busy_stretches(span for span in own if span.name == name)
            bars = [(began - start, seconds) for began, seconds in stretches]
            colour = COLOURS.get(name, _OTHER)
            if name == SWAP:
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor="white", edgecolor=colour, hatch="////", linewidth=1)
                axes.vlines([began for began, _ in bars], row - 0.45, row + 0.45, color=colour, linewidth=1)
            else:
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, alpha=0.8)
    names = [f"slot {slot}" if len(ranks) < 2 else f"rank {rank}, slot {slot}" for rank, slot in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _add_legend(figure: Any, names: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [name for name in (*COLOURS, *sorted(names - COLOURS.keys())) if name in names]
    patches = [
        Patch(facecolor="white", edgecolor=COLOURS[SWAP], hatch="////", label="swap")
        if name == SWAP
        else Patch(color=COLOURS.get(name, _OTHER), label=name.replace("_", " "))
        for name in known
    ]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=10)
