"""The report's pictures: curves, where the seconds went, and several runs over device seconds."""

import io
from collections.abc import Sequence
from typing import Any

from ycore.run.metrics import REWARD, STEP_SECONDS
from ycore.view.pictures import Points, literal, new_figure, points, smooth, style
from ycore.view.record import PARTS, RunRecord

RUN_COLOURS = ("#2456a6", "#c2571a", "#3f8f5f", "#8a4fa3", "#b03a48", "#4a9aa8", "#77622a", "#5c6470")
"""Of runs, in their order; more runs begin again."""

_PART_COLOURS = ("#2456a6", "#7da3d6", "#c9d3e0", "#8a4fa3", "#b03a48", "#e4e6ea", "#d9a441", "#3f8f5f", "#9aa0a8")
_DARK_PARTS = ("useful tokens", "judging", "swaps", "training")
_PANELS = (
    ("reward", REWARD),
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


def curves(runs: Sequence[RunRecord]) -> Any | None:
    """A figure with a panel for each measure that some run has, a colour a run; None where no run has any."""
    panels = [(title, [points(run.metrics, *names) for run in runs]) for title, names in _PANELS]
    panels = [(title, series) for title, series in panels if any(steps for steps, _ in series)]
    if not panels:
        return None
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(4.2 * columns, 2.5 * rows)
    for place, (title, series) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        for index, one in enumerate(series):
            _draw_smoothed(axes, one, index)
        axes.set_title(title, fontsize=10, loc="left")
        style(axes)
    return figure


def over_seconds(runs: Sequence[RunRecord]) -> Any | None:
    """A figure of reward over device seconds, which compares runs whose steps cost different time."""
    if not any(run.reward_curve for run in runs):
        return None
    figure = new_figure(11, 3.6)
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        series = [at for at, _, _ in run.reward_curve], [reward for _, _, reward in run.reward_curve]
        _draw_smoothed(axes, series, index, label=literal(run.name))
    axes.set_ylabel("reward")
    axes.legend(frameon=False)
    style(axes, below="device seconds")
    return figure


def _draw_smoothed(axes: Any, series: Points, index: int, *, label: str = "") -> None:
    colour, (at, values) = RUN_COLOURS[index % len(RUN_COLOURS)], series
    axes.plot(at, values, color=colour, linewidth=0.8, alpha=0.35)
    axes.plot(at, smooth(values, window=max(3, len(values) // 10)), color=colour, linewidth=2, label=label)


def seconds_went(runs: Sequence[RunRecord]) -> Any:
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
                ink = "white" if part in _DARK_PARTS else "#20242a"
                axes.text(left[place] + width / 2, place, f"{width:.0f}%", ha="center", va="center", color=ink)
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
