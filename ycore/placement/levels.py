"""How deep an engine sleeps: level 1 keeps its weights in host memory, level 2 drops them.

Weights that are sent anew before the next use need not be kept. Frozen ones are kept or read again from disk,
whichever was measured cheaper here; which is cheaper changes with the size of the model.

Not here: the calls that send an engine to sleep (`roles.sleeping`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

_SECONDS_MEMORY = 0.5
KEEP, DROP = 1, 2


@dataclass(slots=True)
class MovingAverage:
    """Of seconds; None before the first."""

    value: float | None = None

    def observe(self, seconds: float) -> None:
        self.value = seconds if self.value is None else _SECONDS_MEMORY * self.value + (1 - _SECONDS_MEMORY) * seconds


@dataclass(slots=True)
class SleepLevels:
    """Chooses the level of one frozen model: each is tried once, then the cheaper is kept."""

    seconds: Mapping[int, MovingAverage] = field(default_factory=lambda: {KEEP: MovingAverage(), DROP: MovingAverage()})

    def choose(self) -> int:
        for level, average in self.seconds.items():
            if average.value is None:
                return level
        return min(self.seconds, key=lambda level: (self.seconds[level].value or 0.0, level))

    def observe(self, level: int, seconds: float) -> None:
        """A sleep at this level and the wake after it took so long together."""
        self.seconds[level].observe(seconds)
