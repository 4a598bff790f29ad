"""How the slots of a round were used: busy, swapping, idle, and how far from what cannot be beaten.

Not here: the single turns and swaps (`telemetry.trace`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
class EngineClock:
    """Running totals of one role's engine on a slot since the round began.

    `steps` is how many steps it has made, by what is known of its speed, and `depth` its requests in flight summed over
    these steps: depth over steps is the mean depth that a request met, however long the steps were.
    """

    speed: Speed
    in_flight: int = 0
    seconds: float = 0.0
    """What the slot gave it: engines that are at work at once share the slot evenly."""

    steps: float = 0.0
    depth: float = 0.0

    def advance(self, seconds: float) -> None:
        steps = seconds / self.speed.step_s(self.in_flight)
        self.seconds += seconds
        self.steps += steps
        self.depth += self.in_flight * steps

    def read(self) -> "Reading":
        return Reading(self.seconds, self.steps, self.depth)


class Reading(NamedTuple):
    """An engine's totals at one moment; what a request met is the difference of two."""

    seconds: float
    steps: float
    depth: float

    def since(self, before: "Reading") -> tuple[float, float]:
        """The engine's own seconds from then to now, and the mean depth in them."""
        steps = self.steps - before.steps
        return self.seconds - before.seconds, (self.depth - before.depth) / steps if steps > 0 else 1.0


@dataclass(slots=True)
class SlotClock:
    """Running totals of one slot since the round began, and of its engines by role."""

    engines: Mapping[str, EngineClock]
    since: float = 0.0
    in_flight: int = 0
    busy_s: float = 0.0
    swap_s: float = 0.0
    swap_began: float | None = None

    def advance(self, now: float) -> None:
        passed, self.since = now - self.since, now
        if self.in_flight and passed > 0:
            self.busy_s += passed
            at_work = [engine for engine in self.engines.values() if engine.in_flight]
            for engine in at_work:
                engine.advance(passed / len(at_work))

    def start(self, role: str, now: float) -> Reading:
        """One more request of this role, and what its engine's totals are as it begins."""
        self.advance(now)
        reading = self.engines[role].read()
        self.in_flight += 1
        self.engines[role].in_flight += 1
        return reading

    def end(self, role: str, now: float) -> Reading:
        """One request less."""
        self.advance(now)
        self.in_flight -= 1
        self.engines[role].in_flight -= 1
        return self.engines[role].read()
