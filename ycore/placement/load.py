"""The cost of a role's requests, learned from finished requests, and how busy the slots were.

An engine's step with n requests in flight takes `base + each * n` seconds, and each request grows by one token a step.
The line is a least-squares fit over finished requests of (mean number in flight, seconds per token). Everything is kept
as sums, so that the machines of a run can add theirs up and all learn the same.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import NamedTuple, Self

MEMORY = (
    0.7  # weight that earlier rounds keep when a new one is added: about the last three count
)
# Depths in units of base / each: there an engine reaches four fifths, and 95 %, of its highest throughput.
_GOOD_DEPTH = 4.0
_FULL_DEPTH = 20.0
_MIN_DEPTH_SHARE = 0.25
"""Share of a slot's requests in a round; a speed that was measured at one depth may be wrong."""
_SERIAL_ERROR = 0.25
"""Share of the line's squared error; below it, the number of requests served explains the seconds, not the line."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an engine's step: `base + each * n` with n requests in flight."""

    base: float
    each: float

    def step_s(self, in_flight: float) -> float:
        return self.base + self.each * in_flight

    @property
    def good_depth(self) -> float:
        """Requests in flight above which more add little throughput; infinite where each further one is free."""
        return _GOOD_DEPTH * self.base / self.each if self.each > 0 else math.inf


UNKNOWN = Speed(1.0, 0.0)  # before anything is measured: all steps take equally long


@dataclass(frozen=True, slots=True)
class Load:
    """One role's work in a round of one machine. Sizes are in tokens, or in requests where tokens are not counted.

    Late requests are rollouts started after the round's first verdict, in place of groups that cannot teach.
    """

    num_requests: float
    size: float  # mean
    deviation: float
    longest: float  # mean over rounds and machines
    speed: Speed
    num_late: float = 0.0
    num_times_late: float = math.inf  # moments of a round at which late requests were started
    late_at: float = 0.5  # mean share of the verdicts that were in at these moments, 0 to 1

    def engine_s(self, depth: float) -> float:
        """Seconds of a slot that one request costs when `depth` are in flight there."""
        return self.size * self.speed.step_s(depth) / depth

    def depth(self, num_slots: int, capacity: int, *, moves: bool = False) -> int:
        """Return how many requests a slot should hold: enough to run well, few enough to share with other slots.

        `moves`: single slots change their role within the round. What a slot holds, no other slot can take over, so it
        then holds no more than its engine needs to run at full speed.
        """
        share = float(math.ceil(self.num_requests / num_slots))
        if moves:
            share = min(
                share,
                max(
                    share * _MIN_DEPTH_SHARE, _FULL_DEPTH / _GOOD_DEPTH * self.speed.good_depth
                ),
            )
        return max(1, int(min(capacity, max(share, self.speed.good_depth))))


@dataclass(slots=True)
class Sums:
    """Sums over a role's requests; the squares give spread and slope."""

    num: float = 0.0
    size: float = 0.0
    size_squared: float = 0.0
    depth: float = 0.0
    depth_squared: float = 0.0
    step_s: float = 0.0
    depth_step_s: float = 0.0
    late: float = 0.0
    longest: float = 0.0
    times_late: float = 0.0
    late_at: float = 0.0
    rounds: float = 0.0
    step_s_squared: float = 0.0
    served_squared: float = 0.0
    served_step_s: float = 0.0

    def observe(
        self, *, seconds: float, depth: float, size: float, served: float = 1.0
    ) -> None:
        """Add a finished request: its engine's own seconds, the mean number in flight there, and its tokens.

        `served`: requests that left the engine in this time, with this one.
        """
        step_s = seconds / size
        self.num += 1
        self.size += size
        self.size_squared += size * size
        self.longest = max(self.longest, size)
        # A long request says more about a step's time than a short one, so the line is fitted by size.
        self.depth += size * depth
        self.depth_squared += size * depth * depth
        self.step_s += size * step_s
        self.depth_step_s += size * depth * step_s
        self.step_s_squared += size * step_s * step_s
        self.served_squared += served * served / size
        self.served_step_s += served * step_s

    def observe_late(self, at: float, *, is_first: bool) -> None:
        """Add a late request, started with a share `at` of the verdicts in. `is_first`: the first at this moment."""
        self.late += 1
        self.times_late += is_first
        self.late_at += is_first * min(1.0, at)

    def load(self) -> Load | None:
        """Return the mean round; None before any request has finished."""
        if self.num < 0.5 or self.rounds <= 0:
            return None
        mean = self.size / self.num
        return Load(
            num_requests=self.num / self.rounds,
            size=mean,
            deviation=math.sqrt(max(0.0, self.size_squared / self.num - mean * mean)),
            longest=self.longest / self.rounds,
            speed=self._speed(),
            num_late=self.late / self.rounds,
            num_times_late=self.times_late / self.rounds,
            late_at=self.late_at / self.times_late if self.times_late else 0.5,
        )

    def _speed(self) -> Speed:
        """Fit the line; it is all slope where requests have waited for each other instead.

        An engine reads long prompts one after the other. So of requests that come together the first is fast and the
        last is slow, at one depth, and the line is flat: more in flight would seem to gain all, but they gain nothing.
        There the seconds follow from the number of requests that were served meanwhile, and hardly from the line.
        """
        depth, step_s = self.depth / self.size, self.step_s / self.size
        spread = self.depth_squared / self.size - depth * depth
        covariance = self.depth_step_s / self.size - depth * step_s
        # Requests that all ran at one depth do not show the slope: then assume that the step is all slope.
        each = covariance / spread if spread > 0.01 * depth * depth else step_s / depth
        each = min(max(each, 0.0), step_s / depth)
        # The squared errors of both explanations, a token.
        line_error = (
            self.step_s_squared / self.size
            - step_s * step_s
            - each * (2 * covariance - each * spread)
        )
        explained = self.served_step_s**2 / self.served_squared
        served_error = (self.step_s_squared - explained) / self.size
        if served_error < _SERIAL_ERROR * line_error:
            return Speed(0.0, step_s / depth)
        return Speed(step_s - each * depth, each)


def as_numbers(sums: Mapping[str, Sums], roles: Sequence[str]) -> list[float]:
    """Return all sums in one row, in the same order on every machine."""
    return [value for role in roles for value in astuple(sums.get(role, Sums()))]


def from_numbers(numbers: Sequence[float], roles: Sequence[str]) -> dict[str, Sums]:
    """Invert `as_numbers`, also for added rows: their load is that of the mean machine."""
    width = len(fields(Sums))
    return {
        role: Sums(*numbers[index * width : (index + 1) * width])
        for index, role in enumerate(roles)
    }


def as_late_as(before: Sums, now: Sums) -> Sums:
    """Return this round's sums with the late requests per round, and their times, that `before` has."""
    rounds = now.rounds / before.rounds if before.rounds else 0.0
    return replace(
        now,
        late=before.late * rounds,
        times_late=before.times_late * rounds,
        late_at=before.late_at * rounds,
    )


def faded(before: Sums, now: Sums) -> Sums:
    """Add this round to earlier ones, which get less weight."""
    return Sums(
        *(MEMORY * old + new for old, new in zip(astuple(before), astuple(now), strict=True))
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """How a round used its slots. `busy_s` and `swap_s`: one value a slot; a slot with a request in flight is busy."""

    seconds: float
    busy_s: Sequence[float]
    swap_s: Sequence[float]
    swaps: int

    def sums(self) -> list[float]:
        """Return slot seconds, busy seconds, swap seconds and the number of swaps, to be added to other machines'."""
        slot_s = self.seconds * len(self.busy_s)
        return [slot_s, sum(self.busy_s), sum(self.swap_s), float(self.swaps)]

    @property
    def bound_ratio(self) -> float:
        """The round over its lower bound, the busy seconds shared evenly by all slots; 1 is perfect."""
        bound_s = sum(self.busy_s) / len(self.busy_s)
        return self.seconds / bound_s if bound_s > 0 else 1.0

    @property
    def idle_share(self) -> float:
        """Share of the slots' seconds with nothing in flight and no swap under way."""
        whole = self.seconds * len(self.busy_s)
        return max(0.0, 1 - (sum(self.busy_s) + sum(self.swap_s)) / whole) if whole > 0 else 0.0


class Reading(NamedTuple):
    """An engine's totals: its share of the slot's seconds, its steps, requests in flight summed over steps, and
    requests served."""

    seconds: float
    steps: float
    depth: float
    served: int

    def since(self, before: Self) -> tuple[float, float, int]:
        """Return the engine's seconds since `before`, the mean number in flight over steps, and requests served."""
        steps = self.steps - before.steps
        depth = (self.depth - before.depth) / steps if steps > 0 else 1.0
        return self.seconds - before.seconds, depth, self.served - before.served


class SlotClock:
    """Totals of one slot, and of its engines, since the round began. Engines at work share the slot evenly."""

    def __init__(self, speeds: Mapping[str, Speed], since: float) -> None:
        self.in_flight = 0
        self.in_flight_of = dict.fromkeys(speeds, 0)
        self.busy_s = self.swap_s = 0.0
        self.swap_began: float | None = None
        self._speeds = speeds
        self._totals = dict.fromkeys(speeds, Reading(0.0, 0.0, 0.0, 0))
        self._since = since

    def advance(self, now: float) -> None:
        passed, self._since = now - self._since, now
        if not self.in_flight or passed <= 0:
            return
        self.busy_s += passed
        at_work = [role for role, num in self.in_flight_of.items() if num]
        for role in at_work:
            seconds = passed / len(at_work)
            depth = self.in_flight_of[role]
            before = self._totals[role]
            steps = seconds / self._speeds[role].step_s(depth)
            self._totals[role] = before._replace(
                seconds=before.seconds + seconds,
                steps=before.steps + steps,
                depth=before.depth + depth * steps,
            )

    def change(self, role: str, by: int, now: float) -> Reading:
        """Count a request more (`by` 1) or less (-1); return the totals of its engine at this moment."""
        self.advance(now)
        self.in_flight += by
        self.in_flight_of[role] += by
        if by < 0:
            self._totals[role] = self._totals[role]._replace(
                served=self._totals[role].served - by
            )
        return self._totals[role]
