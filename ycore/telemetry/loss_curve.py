"""curve.png of a run without rollouts: its loss, and what its trainer counts as right, step by step.

Not here: the picture of a run with rewards, whose parts this one is drawn with (`curve`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.telemetry.curve import draw_series, points, save, style

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
