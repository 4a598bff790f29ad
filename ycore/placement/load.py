"""What a role's requests cost, learned from requests that ended: how many, how large, and how fast at which depth.

The model of an engine is the time of one of its steps with n requests in flight, `base + each * n` seconds: each
request grows by one token a step, so n of them at once cost more than one and less than n. It is a line, fitted by
least squares to (mean number in flight, seconds a token) of the requests that ended. Everything is kept as sums, so
that controllers can add theirs up and all know the same.

How the slots of a round were used: busy, swapping, idle, and how far from what cannot be beaten.

Not here: what follows for the slots (`moves`, `division`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

MEMORY = 0.7
"""Weight that a round keeps when the next one comes: about the last three count."""

_GOOD_DEPTH = 4.0
"""In units of base / each; there an engine gives four fifths of what it can at most."""


_HIGH = 16
"""A sum of high powers is nearly the power of the largest: so the longest is known from sums alone."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an engine's step: `base + each * n` with n requests in flight."""

    base: float
    each: float

    def step_s(self, in_flight: float) -> float:
        return self.base + self.each * in_flight

    @property
    def good_depth(self) -> float:
        """In flight from which on more at once gives little; infinite where each further one is free."""
        return _GOOD_DEPTH * self.base / self.each if self.each > 0 else math.inf


UNKNOWN = Speed(1.0, 0.0)
"""Before anything is known: every step is taken to be as long as any other."""


@dataclass(frozen=True, slots=True)
class Load:
    """One role's work in a round of one controller. Sizes are in tokens, or in requests where tokens are not told."""

    num_requests: float
    size: float
    deviation: float
    longest: float
    speed: Speed
    num_late: float = 0.0
    """Of the requests, those asked once a verdict was there: work that waits for other work."""

    num_times_late: float = math.inf
    """At how many moments of a round they were asked."""

    late_at: float = 0.5
    """How far the verdicts were at these moments on the mean, from 0 to 1."""

    def engine_s(self, depth: float) -> float:
        """Seconds of a slot that one request costs when `depth` are in flight there."""
        return self.size * self.speed.step_s(depth) / depth

    def depth(self, num_slots: int, capacity: int) -> int:
        """Requests a slot should hold: enough to run well, no more than leaves others their share."""
        share = math.ceil(self.num_requests / num_slots)
        return max(1, int(min(capacity, max(share, self.speed.good_depth))))


@dataclass(slots=True)
class Sums:
    """Sums over the requests of a role; the squares give spread and slope."""

    num: float = 0.0
    size: float = 0.0
    size_squared: float = 0.0
    depth: float = 0.0
    depth_squared: float = 0.0
    step_s: float = 0.0
    depth_step_s: float = 0.0
    late: float = 0.0
    size_high: float = 0.0
    times_late: float = 0.0
    late_at: float = 0.0
    rounds: float = 0.0

    def observe(self, *, seconds: float, depth: float, size: float) -> None:
        """One request of `size` that took so much of its engine's time, with `depth` of them there on the mean."""
        step_s = seconds / size
        self.num += 1
        self.size += size
        self.size_squared += size * size
        self.size_high += size**_HIGH
        # A long request says more of a step's time than a short one, so the line is fitted by size.
        self.depth += size * depth
        self.depth_squared += size * depth * depth
        self.step_s += size * step_s
        self.depth_step_s += size * depth * step_s

    def observe_late(self, at: float, *, is_first: bool) -> None:
        """A request that verdicts made necessary, when so much of them was given; the first of those of one moment?"""
        self.late += 1
        self.times_late += is_first
        self.late_at += is_first * min(1.0, at)

    def load(self) -> Load | None:
        """None as long as nothing has ended."""
        if self.num < 0.5 or self.rounds <= 0:
            return None
        mean = self.size / self.num
        deviation = math.sqrt(max(0.0, self.size_squared / self.num - mean * mean))
        return Load(
            self.num / self.rounds,
            mean,
            deviation,
            self.size_high ** (1 / _HIGH),
            self._speed(),
            self.late / self.rounds,
            self.times_late / self.rounds,
            self.late_at / self.times_late if self.times_late else 0.5,
        )

    def _speed(self) -> Speed:
        depth, step_s = self.depth / self.size, self.step_s / self.size
        spread = self.depth_squared / self.size - depth * depth
        covariance = self.depth_step_s / self.size - depth * step_s
        # Where all ran at the same depth nothing is known of the slope: then take it as all slope.
        each = covariance / spread if spread > 0.01 * depth * depth else step_s / depth
        each = min(max(each, 0.0), step_s / depth)
        return Speed(step_s - each * depth, each)


def as_numbers(sums: Mapping[str, Sums], roles: Sequence[str]) -> list[float]:
    """All sums in an order that every controller shares."""
    return [value for role in roles for value in _row(sums.get(role, Sums()))]


def _row(sums: Sums) -> tuple[float, ...]:
    return (
        sums.num, sums.size, sums.size_squared, sums.depth, sums.depth_squared,
        sums.step_s, sums.depth_step_s, sums.late, sums.size_high, sums.times_late, sums.late_at, sums.rounds,
    )  # fmt: skip


def from_numbers(numbers: Sequence[float], roles: Sequence[str]) -> dict[str, Sums]:
    """What `as_numbers` told, or the sum of what several told; a load of it is that of their mean."""
    width = len(fields(Sums))
    return {role: Sums(*numbers[index * width : (index + 1) * width]) for index, role in enumerate(roles)}


def as_late_as(before: Sums, now: Sums) -> Sums:
    """This round's sums, with as many late requests a round, at such times, as there were before."""
    rounds = now.rounds / before.rounds if before.rounds else 0.0
    late = {"late": before.late, "times_late": before.times_late, "late_at": before.late_at}
    return replace(now, **{name: value * rounds for name, value in late.items()})


def faded(before: Sums, now: Sums, memory: float = MEMORY) -> Sums:
    """Old rounds count less."""
    return Sums(*(memory * old + new for old, new in zip(_row(before), _row(now), strict=True)))


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
