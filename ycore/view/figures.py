"""The report's pictures: curves, where the seconds went, several runs over device seconds; as SVG text or PNG files.

Not here: the numbers (`spent`, `compare`), and the page they stand on (`page`).
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.view.pictures import points, smooth
from ycore.view.record import PARTS, RunRecord, Spent, reward_curve

COLOURS = ("#2456a6", "#c2571a", "#3f8f5f", "#8a4fa3", "#b03a48", "#4a9aa8", "#77622a", "#5c6470")
_PART_COLOURS = dict(
    zip(
        PARTS,
        ("#2456a6", "#7da3d6", "#c9d3e0", "#8a4fa3", "#b03a48", "#e4e6ea", "#d9a441", "#3f8f5f", "#9aa0a8"),
        strict=True,
    )
)
_PANELS = (
    ("reward", ("ycore/reward", "reward")),
    ("completion length, tokens", ("completions/mean_length",)),
    ("share of groups without variance", ("frac_reward_zero_std",)),
    ("share cut off at the limit", ("completions/clipped_ratio",)),
    ("entropy, nats", ("entropy",)),
    ("gradient norm", ("grad_norm",)),
    ("KL to the reference", ("kl",)),
    ("logprob gap, engine to trainer", ("ycore/logprob_gap",)),
    ("tokens per second", ("ycore/tokens_per_s",)),
    ("seconds a step", ("ycore/time/step", "step_time")),
    ("idle share of the slots", ("ycore/idle_share",)),
    ("round over its bound", ("ycore/bound_ratio",)),
)

Draw = Callable[[Any], None]


def curves(runs: Sequence[RunRecord]) -> Draw | None:
    """A panel for each measure that some run tells of, a colour a run."""
    panels = [(title, series) for title, names in _PANELS if any(series := _series(runs, names))]
    if not panels:
        return None

    def draw(figure: Any) -> None:
        columns = min(3, len(panels))
        rows = -(-len(panels) // columns)
        figure.set_size_inches(4.2 * columns, 2.5 * rows)
        for place, (title, series) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, place + 1)
            for index, (steps, values) in enumerate(series):
                colour = COLOURS[index % len(COLOURS)]
                axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.35)
                axes.plot(steps, smooth(values, window=max(3, len(values) // 10)), color=colour, linewidth=1.9)
            _style(axes, title, "step")

    return draw


def _series(runs: Sequence[RunRecord], names: Sequence[str]) -> list[tuple[list[float], list[float]]]:
    """Steps and values of the first of `names` that a run has, run by run; nothing where no run has any."""
    found = [next((drawn for name in names if (drawn := points(run.metrics, name))[0]), ([], [])) for run in runs]
    return found if any(steps for steps, _ in found) else []


def seconds_went(spent_by_run: Mapping[str, Spent]) -> Draw:
    """One bar a run: its device seconds, by what they went into."""

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 1.3 + 0.55 * len(spent_by_run))
        axes = figure.add_subplot()
        names = list(spent_by_run)[::-1]
        left = [0.0] * len(names)
        for part in PARTS:
            widths = [_share(spent_by_run[name], part) for name in names]
            if not any(widths):
                continue
            axes.barh(names, widths, left=left, color=_PART_COLOURS[part], label=part, height=0.62)
            for place, width in enumerate(widths):
                if width >= 6:
                    text = "white" if part in ("useful tokens", "judging", "swaps", "training") else "#20242a"
                    axes.text(left[place] + width / 2, place, f"{width:.0f}%", ha="center", va="center", color=text)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        _style(axes, "", "% of device seconds")
        axes.set_xlim(0, 100)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=5, frameon=False, fontsize=9)

    return draw


def _share(one: Spent, part: str) -> float:
    return 100 * one.seconds[part] / one.total if one.total else 0.0


def over_seconds(runs: Sequence[RunRecord]) -> Draw | None:
    """Reward over device seconds, so that runs whose steps cost different time can be compared."""
    found = [(run.name, reward_curve(run.metrics, num_slots=run.num_slots)) for run in runs]
    if not any(curve for _, curve in found):
        return None

    def draw(figure: Any) -> None:
        figure.set_size_inches(11, 3.6)
        axes = figure.add_subplot()
        for index, (name, curve) in enumerate(found):
            seconds, rewards = [at for at, _, _ in curve], [reward for _, _, reward in curve]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(seconds, rewards, color=colour, linewidth=0.8, alpha=0.35)
            smoothed = smooth(rewards, window=max(3, len(rewards) // 10))
            axes.plot(seconds, smoothed, color=colour, linewidth=2.2, label=name)
        _style(axes, "", "device seconds")
        axes.set_ylabel("reward")
        axes.legend(frameon=False)

    return draw


def as_svg(draw: Draw) -> str:
    """The picture as an `<svg>` element, which a page can hold without another file."""
    text = io.StringIO()
    _drawn(draw).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]


def as_png(draw: Draw, path: Path) -> None:
    """The picture as a file."""
    partial = path.with_name(f".{path.name}")
    _drawn(draw).savefig(partial, format="png", dpi=110)
    partial.replace(path)


def _drawn(draw: Draw) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    return figure


def _style(axes: Any, title: str, below: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e9ebee", linewidth=0.8)
    axes.set_axisbelow(True)
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(below, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.tick_params(labelsize=8.5)
    axes.margins(x=0.01)
