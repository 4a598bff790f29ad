"""Several runs at equal device seconds: the reward that each had reached by then, with an interval. Pure.

Steps of different runs cost different time, so a comparison step by step flatters the slower one. Here each run is
looked at after the same device seconds, over the steps of a window that ends there.

Not here: reading runs (`record`), drawing (`figures`).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

Row = Mapping[str, Any]

SHARES = (0.25, 0.5, 0.75, 1.0)
_WINDOW = 10  # steps


@dataclass(frozen=True, slots=True)
class Reached:
    """A run's reward after some device seconds: the mean of the last `steps` steps, and the half width of its 95 %
    interval (Student's t, steps taken as independent; None with fewer than three)."""

    device_s: float
    step: int
    reward: float
    half_width: float | None
    steps: int


def reward_curve(metrics: Sequence[Row], *, num_slots: int) -> list[tuple[float, int, float]]:
    """`(device seconds, step, reward)` of every step that tells all three."""
    found = [row for row in metrics if _step_s(row) is not None and _reward(row) is not None]
    seconds = accumulate((_step_s(row) or 0.0) * num_slots for row in found)
    return [(at, int(row["step"]), _reward(row) or 0.0) for at, row in zip(seconds, found, strict=True)]


def at_equal_seconds(curves: Sequence[Sequence[tuple[float, int, float]]]) -> list[list[Reached]]:
    """For each run, what it had reached at SHARES of the device seconds that all of them have; none if one is empty."""
    if not curves or any(not curve for curve in curves):
        return [[] for _ in curves]
    common = min(curve[-1][0] for curve in curves)
    return [[reached for share in SHARES if (reached := _at(curve, common * share))] for curve in curves]


def _at(curve: Sequence[tuple[float, int, float]], device_s: float) -> Reached | None:
    before = [point for point in curve if point[0] <= device_s * (1 + 1e-9)]
    if not before:
        return None
    window = [reward for _, _, reward in before[-_WINDOW:]]
    return Reached(device_s, before[-1][1], statistics.fmean(window), half_width(window), len(window))


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 3:
        return None
    return _T_975[min(len(values) - 1, len(_T_975) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


# Student's t, 97.5 % quantile, by degrees of freedom from 0 (none) to 9, the most that a window has.
_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _step_s(row: Row) -> float | None:
    return _finite(row.get("ycore/time/step", row.get("step_time")))


def _reward(row: Row) -> float | None:
    return _finite(row.get("ycore/reward", row.get("reward")))


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
