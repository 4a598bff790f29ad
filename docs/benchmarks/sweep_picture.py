"""The figures of `simulate_sweep` as a picture and as a table."""

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_GREY = "#8a8f98"
_COLOURS = {8: "#2456a6", 64: "#d9822b", 512: "#3a8f5c"}
_LINES = {"8B": "-", "0.6B": "--"}
_MARKS = {"level 1": "s", "level 2": "o"}
_EVEN = ("#8a8f98", "#d9822b", "#2456a6", "#3a8f5c")


def draw(told: dict[str, Any], path: Path) -> None:
    """Left: against the best split in hindsight. Middle: against colocated. Right: from which round length it pays."""
    figure = Figure(figsize=(16, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    _ratios(left, middle, told["points"])
    _break_even(right, told["break_even"])
    figure.savefig(path)


def _ratios(left: Any, middle: Any, points: list[dict[str, Any]]) -> None:
    lines: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    for row in points:
        for level, values in row["swaps"].items():
            dot = (
                row["judge_work"],
                values["dynamic_over_split"],
                values["dynamic_over_colocated"],
            )
            lines.setdefault((row["model"], row["slots"], level), []).append(dot)
    for (model, slots, level), dots in lines.items():
        works = [dot[0] for dot in dots]
        look = {
            "color": _COLOURS.get(slots, _GREY),
            "linestyle": _LINES[model],
            "marker": _MARKS[level],
        }
        left.plot(
            works,
            [dot[1] for dot in dots],
            markersize=4,
            label=f"{model}, {slots} slots, {level}",
            **look,
        )
        middle.plot(works, [dot[2] for dot in dots], markersize=4, **look)
    left.axhline(1.02, color=_GREY, linestyle=":")
    middle.axhline(0.84, color=_GREY, linestyle=":")
    for axes, title in (
        (left, "round: dynamic over the best split in hindsight"),
        (middle, "dynamic over colocated"),
    ):
        axes.set(title=title, xscale="log", xlabel="judge's work over the rollouts'")
        axes.axhline(1.0, color="black", linewidth=0.8)
    left.legend(fontsize=7)


def _break_even(axes: Any, lines: list[dict[str, Any]]) -> None:
    for colour, line in zip(_EVEN, lines, strict=False):
        ratios = [row["ratio"] for row in line["rows"]]
        label = (
            f"{line['slots']} slots, {line['per_slot']} a slot, judge {line['judge_work']:g}"
        )
        dynamic = [row["dynamic_over_split"] for row in line["rows"]]
        colocated = [row["colocated_s"] / line["best_split_s"] for row in line["rows"]]
        axes.plot(ratios, dynamic, marker="o", color=colour, label=label)
        axes.plot(ratios, colocated, marker=".", linestyle=":", color=colour)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(
        title="8B: dynamic (dotted: colocated) over the best split",
        xscale="log",
        ylim=(0.75, 1.5),
        xlabel="seconds of the best split's round over seconds of a swap",
    )
    axes.legend(fontsize=8)


def table(told: dict[str, Any]) -> str:
    """Markdown: a line for every point and cost of a swap, then one for every point of the break-even."""
    layout = "model, machines x slots x engines, judge work"
    lines = _head(
        f"{layout}, best split, its s, swap s, dynamic s, colocated s, over split, over colocated, swaps"
    )
    for row in told["points"]:
        for values in row["swaps"].values():
            where = f"{row['machines']} x {row['slots']} x {row['engines']}"
            cells = [
                row["model"],
                where,
                row["judge_work"],
                row["best_split"],
                f"{row['best_split_s']:.0f}",
            ]
            cells += [
                values["swap_s"],
                f"{values['dynamic_s']:.0f}",
                f"{values['colocated_s']:.0f}",
            ]
            cells += [
                f"{values['dynamic_over_split']:.3f}",
                f"{values['dynamic_over_colocated']:.3f}",
            ]
            lines.append(
                "| " + " | ".join(map(str, [*cells, f"{values['dynamic_swaps']:.1f}"])) + " |"
            )
    lines += [
        "",
        *_head(
            "slots, a slot, judge work, best split, its s, round over swap, over split, over colocated, gain, swaps"
        ),
    ]
    for line in told["break_even"]:
        for row in line["rows"]:
            cells = [
                line["slots"],
                line["per_slot"],
                line["judge_work"],
                line["best_split"],
                f"{line['best_split_s']:.0f}",
            ]
            cells += [
                f"{row['ratio']:g}",
                f"{row['dynamic_over_split']:.3f}",
                f"{row['dynamic_over_colocated']:.3f}",
            ]
            lines.append(
                "| "
                + " | ".join(
                    map(str, [*cells, f"{row['gain']:.3f}", f"{row['dynamic_swaps']:.1f}"])
                )
                + " |"
            )
    return "\n".join(lines)


def _head(names: str) -> list[str]:
    cells = names.split(", ")
    return ["| " + " | ".join(cells) + " |", "| --- " * len(cells) + "|"]
