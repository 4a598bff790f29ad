"""Time as a person reads it: durations, and what is left of a run.

Not here: measuring (`roles.step_metrics`).
"""

from collections import deque
from collections.abc import Mapping
from typing import Any


class TimeLeft:
    """An estimate from the last steps' own times."""

    def __init__(self, num_steps: int | None) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=20)

    def after(self, row: Mapping[str, Any]) -> str:
        """`3 min 20 s left`, or nothing where no step has told its time, and after the last."""
        seconds, left = row.get("ycore/time/step"), (self._num_steps or 0) - int(row["step"])
        if isinstance(seconds, int | float):
            self._seconds.append(float(seconds))
        if not self._seconds or left <= 0:
            return ""
        return f"{as_duration(left * sum(self._seconds) / len(self._seconds))} left"


def as_duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
