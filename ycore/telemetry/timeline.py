"""timeline.png: one lane a slot, a colour a role, swaps hatched; the last rounds of a run, or simulated ones.

Not here: the spans (`trace`). Uses matplotlib's file backend only, so it needs no display.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.telemetry.trace import ROUND, SWAP, Span, busy_stretches, finish_trace, read_trace

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
    begins = sorted({span.told.get("step", 0): span.began for span in spans if span.name == ROUND}.values())
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
