"""Draw spans of a trace as lanes: one a slot, coloured by the role that is awake."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.run.trace import SWAP, Span
from ycore.view.activity import slot_names
from ycore.view.pictures import BLUE, GREEN, GREY, literal, new_figure, save_png

ROLE_COLOURS: Mapping[str, str] = {
    "rollout": BLUE, "judge": "#d9822b", "reward_model": GREEN, "teacher": "#8a4fa3", SWAP: "#c9342f",
}  # fmt: skip
_MAX_LANES = 64
_SWAP_LOOK: Mapping[str, Any] = {
    "facecolor": "white", "edgecolor": ROLE_COLOURS[SWAP], "hatch": "////", "linewidth": 1,
}  # fmt: skip


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
    intervals = _merged((span.began, span.seconds) for span in lane if span.name == name)
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


def _merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (began, seconds) in order; intervals that touch or overlap become one."""
    merged: list[tuple[float, float]] = []
    for began, seconds in sorted(intervals):
        if merged and began <= merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = (first, max(length, began + seconds - first))
        else:
            merged.append((began, seconds))
    return merged
