"""Draw the parts of a step side by side: `python docs/benchmarks/draw.py runs/benchmark/results.json bars.png`.

The figures come from `trl_and_ycore`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {
    "generate": "#3b6fb6",
    "score and batch": "#9dbbe0",
    "forward": "#e08a3c",
    "backward and optimizer": "#f0bd8c",
    "sync": "#7a7a7a",
    "round": "#3b6fb6",
    "train": "#e08a3c",
    "bare": "#bdbdbd",
}


def draw(results: Mapping[str, Any], file: Path) -> None:
    """Draw one panel a limit on tokens: a bar for TRL, one for ycore, and the bare passes of ycore's round."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = results["levels"]
    figure = Figure(figsize=(9, 0.6 + 1.7 * len(levels)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (tokens, level) in enumerate(levels.items()):
        axes = figure.add_subplot(len(levels), 1, number + 1)
        for row, parts in enumerate(bars(level).values()):
            left = 0.0
            for part, seconds in parts.items():
                axes.barh(
                    row,
                    seconds,
                    left=left,
                    color=_COLOURS.get(part, "#bdbdbd"),
                    edgecolor="white",
                )
                if seconds > 0.04 * level["trl"]["seconds"]:
                    axes.text(
                        left + seconds / 2,
                        row,
                        f"{part}\n{seconds:.1f}",
                        ha="center",
                        va="center",
                        fontsize=7,
                    )
                left += seconds
        axes.set_yticks(range(len(bars(level))), list(bars(level)))
        axes.invert_yaxis()
        axes.set_title(
            f"{tokens} completion tokens: {level['ratio']:.2f} times TRL",
            loc="left",
            fontsize=9,
        )
        axes.set_xlabel("seconds a step", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)


def bars(level: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Return the seconds by part for each bar; the bare passes for as many tokens as ycore's median step has."""
    bare = level["bare"]
    seconds = (
        sorted(bare["seconds"])[len(bare["seconds"]) // 2]
        / bare["tokens"]
        * level["ycore"]["tokens"]
    )
    return {
        "TRL": level["trl"]["parts"],
        "ycore": level["ycore"]["parts"],
        "bare passes": {"bare": seconds},
    }


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
