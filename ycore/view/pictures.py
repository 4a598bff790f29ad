"""A run's pictures: curve.png, timeline.png with a lane a slot, and the report's figures, of one run or of several.

Figures are drawn to files only, so no display is needed.
"""

import contextlib
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ycore.run.metrics import REWARD, STEP_SECONDS, Row, number
from ycore.run.paths import RunFolder
from ycore.run.text import printable
from ycore.run.trace import ROUND, SWAP, Span, busy_intervals, finish_trace, read_trace
from ycore.view.lanes import lane_names
from ycore.view.record import PARTS, RecordedRun

Points = tuple[list[float], list[float]]
"""Steps, and the values at them."""

BLUE, GREY, GREEN = "#2456a6", "#8a8f98", "#3f8f5f"
ROLE_COLOURS: Mapping[str, str] = {
    "rollout": BLUE, "judge": "#d9822b", "reward_model": GREEN, "teacher": "#8a4fa3", SWAP: "#c9342f",
}  # fmt: skip

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
HELD_OUT, HELD_OUT_LOSS = "ycore/eval/reward", "ycore/eval/loss"
_MAX_LANES = 64

RUN_COLOURS = (
    "#2456a6",
    "#c2571a",
    "#3f8f5f",
    "#8a4fa3",
    "#b03a48",
    "#4a9aa8",
    "#77622a",
    "#5c6470",
)
"""Of runs, in their order; more runs begin again."""

_PART_COLOURS = (
    "#2456a6",
    "#7da3d6",
    "#c9d3e0",
    "#8a4fa3",
    "#b03a48",
    "#e4e6ea",
    "#d9a441",
    "#3f8f5f",
    "#9aa0a8",
)
_PANELS = (
    ("reward", REWARD),
    ("reward on held-out prompts", (HELD_OUT,)),
    ("loss on held-out rows", (HELD_OUT_LOSS,)),
    ("completion length, tokens", ("completions/mean_length",)),
    ("share of groups without variance", ("frac_reward_zero_std",)),
    ("share cut off at the limit", ("completions/clipped_ratio",)),
    ("entropy, nats", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
    ("KL to the reference", ("kl",)),
    ("logprob gap, engine to trainer", ("ycore/logprob_gap",)),
    ("tokens per second", ("ycore/tokens_per_s",)),
    ("seconds a step", STEP_SECONDS),
    ("idle share of the slots", ("ycore/idle_share",)),
    ("round over its bound", ("ycore/bound_ratio",)),
)


def draw_curve(metrics: Sequence[Row], path: Path, title: str) -> bool:
    """Draw a run's reward, or its loss, to a PNG of 1200 x 700 pixels; False, and no file, where no step has either."""
    reward, loss = points(metrics, *REWARD), points(metrics, "loss")
    if not (reward[0] or loss[0]):
        return False
    figure = new_figure(12, 7)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.2, 1))
    main = figure.add_subplot(grid[0, :])
    _draw_held_out(main, metrics, HELD_OUT if reward[0] else HELD_OUT_LOSS)
    _draw_main(main, *((reward, "reward") if reward[0] else (loss, "loss")))
    left, right = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    if reward[0]:
        left.plot(*points(metrics, "completions/mean_length"), color=GREY, linewidth=1.5)
        left.set_title("completion length (tokens)", fontsize=11, loc="left")
        left.set_ylim(bottom=0)
        _draw_time(right, metrics)
    else:
        for axes, titles in zip((left, right), _BENEATH_A_LOSS, strict=True):
            drawn = next((name for name in titles if points(metrics, name)[0]), None)
            axes.set_visible(drawn is not None)
            if drawn is not None:
                axes.plot(*points(metrics, drawn), color=GREY, linewidth=1.5)
                axes.set_title(titles[drawn], fontsize=11, loc="left")
    for axes in figure.axes:
        style(axes)
    figure.suptitle(literal(title), fontsize=14, fontweight="bold", x=0.01, ha="left")
    save_png(figure, path)
    return True


def new_figure(width: float, height: float) -> Any:
    """An empty figure; sizes are in inches of 100 dots."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def save_png(figure: Any, path: Path) -> None:
    """The picture as a file that is whole or not there."""
    partial = path.with_name(f".{path.name}")
    figure.savefig(partial, format="png")
    partial.replace(path)


def style(axes: Any, *, below: str = "step") -> None:
    """No frame, whole numbers on the x axis, which is named `below`."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_xlabel(below, fontsize=10)
    axes.margins(x=0.01)


def literal(text: str) -> str:
    """Text that matplotlib draws as it is: a pair of dollars would be a formula, and `_x` is left out of legends."""
    text = printable(text, one_line=True).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def points(metrics: Sequence[Row], *names: str) -> Points:
    """The steps at which one of `names` is a finite number, and its values."""
    found = [(number(row, "step"), number(row, *names)) for row in metrics]
    known = [(step, value) for step, value in found if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def smooth(values: Sequence[float], *, window: int | None = None) -> list[float]:
    """The mean within half a window (by default a tenth of all) on either side; shorter at the ends: never shifted."""
    half = (max(3, len(values) // 10) if window is None else window) // 2
    reaches = [min(half, index, len(values) - 1 - index) for index in range(len(values))]
    return [
        statistics.fmean(values[at - reach : at + reach + 1]) for at, reach in enumerate(reaches)
    ]


def _draw_main(axes: Any, series: Points, name: str) -> None:
    """Every step in grey, and smoothed in blue; a reward within 0 and 1 on an axis from 0 to 1."""
    steps, values = series
    marker = "o" if len(values) <= 60 else None
    axes.plot(
        steps,
        values,
        color=GREY,
        linewidth=1,
        alpha=0.7,
        label="each step",
        marker=marker,
        markersize=3,
    )
    axes.plot(steps, smooth(values), color=BLUE, linewidth=2.6, label="smoothed")
    axes.set_ylabel(name)
    if name == "reward" and min(values) >= 0 and max(values) <= 1:
        axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="best", frameon=False, fontsize=10)


def _draw_held_out(axes: Any, metrics: Sequence[Row], name: str) -> None:
    """What evaluations measured, with their intervals where they have some."""
    steps, values = points(metrics, name)
    if not steps:
        return
    ends = [dict(zip(*points(metrics, f"{name}/{end}"), strict=True)) for end in ("low", "high")]
    spread = [
        [abs(end.get(step, value) - value) for step, value in zip(steps, values, strict=True)]
        for end in ends
    ]
    axes.errorbar(
        steps,
        values,
        yerr=spread,
        color=GREEN,
        capsize=4,
        marker="s",
        linewidth=1.8,
        label="held out",
    )


def _draw_time(axes: Any, metrics: Sequence[Row]) -> None:
    layers = [points(metrics, name) for name, _, _ in _PHASES]
    steps = sorted({step for at, _ in layers for step in at})
    heights = [
        [dict(zip(*series, strict=True)).get(step, 0.0) for step in steps] for series in layers
    ]
    axes.set_title("seconds a step", fontsize=11, loc="left")
    if not steps:
        return
    _, labels, colours = zip(*_PHASES, strict=True)
    axes.stackplot(steps, heights, labels=labels, colors=colours, alpha=0.85)
    axes.set_ylim(0, max(map(sum, zip(*heights, strict=True))) * 1.35 or 1)
    axes.legend(loc="upper right", frameon=False, fontsize=9, ncols=3)


def finish_trace_and_draw(folder: RunFolder, title: str) -> None:
    """Close the run's trace.json and draw its last rounds beside it; a picture is not worth a run's result."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        finish_trace(folder.trace)
        if shown := last_rounds(read_trace(folder.trace)):
            draw_panels([(title, shown)], folder.timeline)


def draw_panels(panels: Sequence[tuple[str, Sequence[Span]]], path: Path) -> None:
    """Draw panels of lanes, each `(title, spans)`, one under the other on one scale of seconds; `path` is a PNG."""
    lanes = [sorted({(span.rank, span.slot) for span in spans})[:_MAX_LANES] for _, spans in panels]
    heights = [0.9 + 0.28 * max(1, len(own)) for own in lanes]
    figure = new_figure(12, max(2.5, sum(heights)))
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (title, spans), own in zip(grid[:, 0], panels, lanes, strict=True):
        _draw_lanes(axes, spans, own)
        axes.set_title(literal(title), loc="left", fontsize=11)
    grid[-1, 0].set_xlabel("seconds", fontsize=10)
    _add_legend(figure, {span.name for _, spans in panels for span in spans})
    save_png(figure, path)


def last_rounds(spans: Sequence[Span], num_rounds: int = 4) -> list[Span]:
    """What happened on slots since the beginning of the last rounds, without the rounds themselves."""
    begins = sorted(
        {span.details.get("step", 0): span.began for span in spans if span.name == ROUND}.values()
    )
    since = begins[-num_rounds:][0] if begins else 0.0
    return [span for span in spans if span.name != ROUND and span.began >= since]


def _draw_lanes(axes: Any, spans: Sequence[Span], lanes: Sequence[tuple[int, int]]) -> None:
    start = min((span.began for span in spans), default=0.0)
    for row, (rank, slot) in enumerate(lanes):
        own = [span for span in spans if (span.rank, span.slot) == (rank, slot)]
        # Backwards, so that rollouts come first: where roles share a slot, the others lie over them; swaps over all.
        for name in sorted(
            {span.name for span in own}, key=lambda name: (name != SWAP, name), reverse=True
        ):
            stretches = busy_intervals(span for span in own if span.name == name)
            bars, colour = (
                [(began - start, seconds) for began, seconds in stretches],
                ROLE_COLOURS.get(name, GREY),
            )
            if name == SWAP:
                axes.broken_barh(
                    bars,
                    (row - 0.4, 0.8),
                    facecolor="white",
                    edgecolor=colour,
                    hatch="////",
                    linewidth=1,
                )
                axes.vlines(
                    [began for began, _ in bars], row - 0.45, row + 0.45, color=colour, linewidth=1
                )
            else:
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, alpha=0.8)
    axes.set_yticks(range(len(lanes)), lane_names(lanes), fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _add_legend(figure: Any, names: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [
        name for name in (*ROLE_COLOURS, *sorted(names - ROLE_COLOURS.keys())) if name in names
    ]
    hatched: dict[str, Any] = {
        "facecolor": "white",
        "edgecolor": ROLE_COLOURS[SWAP],
        "hatch": "////",
    }
    looks = {
        name: hatched if name == SWAP else {"color": ROLE_COLOURS.get(name, GREY)} for name in known
    }
    patches = [Patch(**look, label=name.replace("_", " ")) for name, look in looks.items()]
    figure.legend(
        handles=patches, loc="outside upper right", ncols=len(patches), frameon=False, fontsize=10
    )


@dataclass(frozen=True, slots=True)
class Banded:
    """The curves of runs over the band of other runs: of a recipe, or of one `stage` of a pipeline.

    `steps` has the interval of each step, and `final` that of the last value. `curves` are by run, in the runs' order;
    `verdicts` has a row a run: its name, inside or OUTSIDE, the share of its steps inside, its last value.
    """

    stage: str
    metric: str
    steps: Sequence[Sequence[float]]
    final: Sequence[float]
    curves: Mapping[str, Sequence[float]]
    verdicts: Sequence[tuple[str, ...]]


def curves(runs: Sequence[RecordedRun], bands: Sequence[Banded] = ()) -> Any | None:
    """A figure with a panel for each band, and for each measure that some run has, a colour a run; None without any."""
    panels: list[Callable[[Any], None]] = [partial(_draw_banded, band=band) for band in bands]
    for title, names in _PANELS:
        series = [points(run.metrics, *names) for run in runs]
        if any(steps for steps, _ in series):
            panels.append(partial(_draw_measure, title=title, series=series))
    return _in_a_grid(panels, columns=3, width=4.2, height=2.5) if panels else None


def over_bands(bands: Sequence[Banded]) -> Any:
    """A larger figure of the bands alone, with legends."""
    panels = [partial(_draw_banded, band=band) for band in bands]
    figure = _in_a_grid(panels, columns=2, width=5.6 if len(bands) > 1 else 11, height=3.4)
    for axes in figure.axes:
        axes.legend(frameon=False, fontsize=9)
    return figure


def _in_a_grid(
    panels: Sequence[Callable[[Any], None]], *, columns: int, width: float, height: float
) -> Any:
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(width * columns, height * rows)
    for place, draw in enumerate(panels, 1):
        draw(figure.add_subplot(rows, columns, place))
    return figure


def _draw_measure(axes: Any, title: str, series: Sequence[Points]) -> None:
    for index, one in enumerate(series):
        _draw_smoothed(axes, one, index)
    axes.set_title(title, fontsize=10, loc="left")
    style(axes)


def _draw_banded(axes: Any, band: Banded) -> None:
    """The interval of the final value is a bar at the right. Runs that have one value each stand side by side."""
    has_steps, last = len(band.steps) > 1, len(band.steps)
    shade: dict[str, Any] = {"color": GREY, "alpha": 0.25, "linewidth": 0, "label": "the band"}
    if has_steps:
        axes.fill_between(range(1, last + 1), *zip(*band.steps, strict=True), **shade)
        axes.vlines(
            last * 1.02, *band.final, color=GREY, alpha=0.7, linewidth=5, label="of the final value"
        )
    else:
        axes.axhspan(*band.final, **shade)
    for index, (name, values) in enumerate(band.curves.items()):
        at = range(1, len(values) + 1) if has_steps else [index] * len(values)
        colour, mark = RUN_COLOURS[index % len(RUN_COLOURS)], "-" if has_steps else "o"
        axes.plot(at, values, mark, color=colour, linewidth=1.8, label=literal(name))
    what = f"{band.stage}: {band.metric}" if band.stage else band.metric
    axes.set_title(literal(f"{what}, over the band"), fontsize=10, loc="left")
    style(axes, below="step" if has_steps else "")
    if not has_steps:
        axes.set_xticks(range(len(band.curves)), map(literal, band.curves))
        axes.margins(x=0.2)


def over_seconds(runs: Sequence[RecordedRun]) -> Any | None:
    """A figure of reward over device seconds, which compares runs whose steps cost different time."""
    if not any(run.reward_curve for run in runs):
        return None
    figure = new_figure(11, 3.6)
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        series = (
            [at for at, _, _ in run.reward_curve],
            [reward for _, _, reward in run.reward_curve],
        )
        _draw_smoothed(axes, series, index, label=literal(run.name))
    axes.set_ylabel("reward")
    axes.legend(frameon=False)
    style(axes, below="device seconds")
    return figure


def _draw_smoothed(axes: Any, series: Points, index: int, *, label: str = "") -> None:
    colour, (at, values) = RUN_COLOURS[index % len(RUN_COLOURS)], series
    axes.plot(at, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(at, smooth(values), color=colour, linewidth=2, label=label)


def seconds_went(runs: Sequence[RecordedRun]) -> Any:
    """A figure with one bar a run: its device seconds, by what they went into."""
    figure = new_figure(11, 1.3 + 0.55 * len(runs))
    axes = figure.add_subplot()
    upwards = list(reversed(runs))
    names = [literal(run.name) for run in upwards]
    left = [0.0] * len(names)
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        widths = [100 * run.spent.share(part) for run in upwards]
        if not any(widths):
            continue
        axes.barh(names, widths, left=left, color=colour, label=part, height=0.62)
        for place, width in enumerate(widths):
            if width >= 6:
                ink = (
                    "white"
                    if part in ("useful tokens", "judging", "swaps", "training")
                    else "#20242a"
                )
                axes.text(
                    left[place] + width / 2,
                    place,
                    f"{width:.0f}%",
                    ha="center",
                    va="center",
                    color=ink,
                )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    style(axes, below="% of device seconds")
    axes.set_xlim(0, 100)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)
    return figure


def as_svg(figure: Any) -> str:
    """The picture as an `<svg>` element, which a page can hold without another file."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
