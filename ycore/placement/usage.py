"""How the slots of a round were used: busy, swapping, idle, and how far from what cannot be beaten.

Not here: the single turns and swaps (`telemetry.trace`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ycore.placement.load import Speed


@dataclass(frozen=True, slots=True)
class Usage:
    """One round. `busy_s` and `swap_s` have one value a slot; a slot is busy while a request is in flight there."""

    seconds: float
    busy_s: Sequence[float]
    swap_s: Sequence[float]
    swaps: int

    @property
    def num_slots(self) -> int:
        return len(self.busy_s)

    @property
    def bound_s(self) -> float:
        """The work-conserving bound: all engine seconds, shared evenly. No placement of this work is shorter."""
        return sum(self.busy_s) / self.num_slots

    @property
    def bound_ratio(self) -> float:
        """The round over its bound; 1 is perfect, and what a round without work has."""
        return self.seconds / self.bound_s if self.bound_s > 0 else 1.0

    @property
    def idle_share(self) -> float:
        """Of the slots' seconds, those with nothing in flight and no swap under way."""
        whole = self.seconds * self.num_slots
        return max(0.0, 1 - (sum(self.busy_s) + sum(self.swap_s)) / whole) if whole > 0 else 0.0


@dataclass(slots=True)
class SlotClock:
    """Running totals of one slot since the round began.

    `steps` is how many steps its engine has made, by what is known of its speed, and `depth` the requests in flight
    summed over these steps: depth over steps is the mean depth that a request met, however long the steps were.
    """

    speed: Speed
    in_flight: int = 0
    since: float = 0.0
    busy_s: float = 0.0
    swap_s: float = 0.0
    steps: float = 0.0
    depth: float = 0.0
    swap_began: float | None = None

    def advance(self, now: float) -> None:
        if self.in_flight:
            passed = now - self.since
            steps = passed / self.speed.step_s(self.in_flight)
            self.busy_s += passed
            self.steps += steps
            self.depth += self.in_flight * steps
        self.since = now
