"""The speed of an engine, learned from finished requests: how long a step takes with n requests in flight.

The line is a least-squares fit over finished requests of (mean number in flight, seconds per token).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

_SERIAL_ERROR = 0.25
"""Share of the line's squared error; below it, the number of requests served explains the seconds, not the line."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of an engine's step: `base + per_request * n` with n requests in flight."""

    base: float
    per_request: float

    def step_s(self, in_flight: float) -> float:
        return self.base + self.per_request * in_flight


UNKNOWN = Speed(1.0, 0.0)  # before anything is measured: all steps take equally long


@dataclass(slots=True)
class Sums:
    """Sums over a role's requests, for the line through their seconds."""

    size: float = 0.0
    depth: float = 0.0
    depth_squared: float = 0.0
    step_s: float = 0.0
    depth_step_s: float = 0.0
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
        self.size += size
        # A long request says more about a step's time than a short one, so the line is fitted by size.
        self.depth += size * depth
        self.depth_squared += size * depth * depth
        self.step_s += size * step_s
        self.depth_step_s += size * depth * step_s
        self.step_s_squared += size * step_s * step_s
        self.served_squared += served * served / size
        self.served_step_s += served * step_s

    def speed(self) -> Speed:
        """Fit the line; it is all slope where requests have waited for each other instead.

        An engine reads long prompts one after the other. So of requests that come together the first is fast and the
        last is slow, at one depth, and the line is flat: more in flight would seem to gain all, but they gain nothing.
        There the seconds follow from the number of requests that were served meanwhile, and hardly from the line.
        """
        if not self.step_s:  # requests that took no time by the clock
            return UNKNOWN
        depth, step_s = self.depth / self.size, self.step_s / self.size
        spread = self.depth_squared / self.size - depth * depth
        covariance = self.depth_step_s / self.size - depth * step_s
        # Requests that all ran at one depth do not show the slope: then assume that the step is all slope.
        per_request = covariance / spread if spread > 0.01 * depth * depth else step_s / depth
        per_request = min(max(per_request, 0.0), step_s / depth)
        # The squared errors of both explanations, a token.
        line_error = (
            self.step_s_squared / self.size
            - step_s * step_s
            - per_request * (2 * covariance - per_request * spread)
        )
        explained = self.served_step_s**2 / self.served_squared
        served_error = (self.step_s_squared - explained) / self.size
        if served_error < _SERIAL_ERROR * line_error:
            return Speed(0.0, step_s / depth)
        return Speed(step_s - per_request * depth, per_request)


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
