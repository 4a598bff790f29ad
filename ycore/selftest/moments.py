"""When a run is killed: drawn from a seed before anything starts, and so the same for everybody who gives that seed.

A moment is a place in the run's progress, not on a clock: so many steps finished, and a share of the next one. A slow
machine is then killed where a fast one is. Every step, the start and the end get their share of the moments, for most
of a tiny run's time is its start.

Not here: who is killed (`faults`), and where the kill then landed (`phases`).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Moment:
    """`share` of the next step, after `steps` of them; before the first step and after the last, of start and end."""

    steps: int
    share: float

    def __str__(self) -> str:
        return f"{self.steps}+{self.share:.3f}"

    def delay_s(self, pace: "Pace", *, of: int) -> float:
        """Seconds from the row of the last finished step to the kill, in a run of `of` steps."""
        length = pace.start_s if self.steps == 0 else pace.end_s if self.steps == of else pace.step_s
        return self.share * length


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the parts of an undisturbed run took."""

    start_s: float
    step_s: float
    end_s: float
    until_model_s: float = 0.0
    """From the last step to the model in its folder, which is the trainer's part of the end."""


def draw_moments(count: int, *, steps: int, seed: int, row: str) -> list[Moment]:
    """`count` moments of a row of the scorecard, dealt evenly over start, steps and end, in an order of their own."""
    deals, shares = (random.Random(f"{what}/{seed}/{row}") for what in ("deals", "shares"))
    places: list[int] = []
    while len(places) < count:
        deal = list(range(steps + 1))
        deals.shuffle(deal)
        places += deal
    return [Moment(steps=place, share=shares.random()) for place in places[:count]]


def pace_of(seconds_of_rows: Sequence[float], *, modelled: float, ended: float) -> Pace:
    """From the seconds, since the start, at which a whole run's rows and its model appeared, and at which it ended."""
    gaps = sorted(later - earlier for earlier, later in pairwise(seconds_of_rows))
    middle = gaps[len(gaps) // 2] if gaps else 1.0
    last = seconds_of_rows[-1]
    return Pace(start_s=seconds_of_rows[0], step_s=middle, end_s=ended - last, until_model_s=modelled - last)
