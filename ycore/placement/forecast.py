"""How long a round would take from a starting division: one mean slot of each role, played through.

A role's requests are a dozen cohorts of equal number, their lengths the quantiles of a lognormal with the measured
mean and spread, the last cohort's the longest seen. All slots of a role are alike, so one of them is played, with
weights instead of single requests. A cohort that is written is then scored; where prompts are drawn because of verdicts
(dynamic sampling), the verdicts of the first wave bring a second. A role without slots gets those of the rollouts when
they are through, a swap later, until they are wanted back. Other moves are left out: where roles have slots of their
own, moves were seen to make a round shorter or leave it as it is, and the best division is seldom another with them.

That takes well under a millisecond and knows what sums do not: tails, depth, and what waits for what.

Not here: which divisions are compared (`division`); whole rounds with single requests (`simulate`).
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division

COHORTS = 12
_LEAST = 0.5
"""Requests of a whole second wave below which there is none."""

_QUANTILES = [NormalDist().inv_cdf((index + 0.5) / COHORTS) for index in range(COHORTS)]
_ORDER = [index * 5 % COHORTS for index in range(COHORTS)]
"""Cohorts of the second wave take their lengths in another order: they are drawn anew."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a forecast needs to know of the slots: how many, what each may hold of a role, what a swap costs."""

    num_slots: int
    capacity: Mapping[str, int]
    swap_s: float
    exclusive: bool = True
    """One role of a slot at a time; else the engines of all roles stay up, and may work at once."""


@dataclass(slots=True)
class _Server:
    """The mean slot of a role; weights are requests a slot."""

    load: Load
    num_slots: int
    capacity: float
    is_open: bool = True
    at_once: int = 1
    """Engines at work on the slot; each has its share of it."""

    now: float = 0.0
    tokens: float = 0.0
    in_flight: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)  # ends at tokens, cohort, weight
    waiting: deque[tuple[float, int, float]] = field(default_factory=deque)  # size, cohort, weight

    def advance(self, now: float) -> None:
        if self.running:
            self.tokens += (now - self.now) / self._step_s()
        self.now = now

    def add(self, size: float, cohort: int, weight: float) -> None:
        self.waiting.append((size, cohort, weight))
        self.fill()

    def fill(self) -> None:
        while (
            self.is_open and self.waiting and (not self.running or self.in_flight + self.waiting[0][2] <= self.capacity)
        ):
            size, cohort, weight = self.waiting.popleft()
            heapq.heappush(self.running, (self.tokens + size, cohort, weight))
            self.in_flight += weight

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return self.now + (self.running[0][0] - self.tokens) * self._step_s()

    def _step_s(self) -> float:
        return self.load.speed.step_s(max(1.0, self.in_flight)) * self.at_once

    def end(self) -> tuple[int, float]:
        self.tokens, cohort, weight = heapq.heappop(self.running)
        self.in_flight -= weight
        self.fill()
        return cohort, weight


class _Forecast:
    def __init__(self, loads: Mapping[str, Load], division: Division, setting: Setting, *, shared: bool) -> None:
        self._loads = loads
        self._setting = setting
        self._rollout = self._server(ROLLOUT, division[ROLLOUT])
        slots = dict.fromkeys(loads, setting.num_slots) if shared else division
        self._scorers = {role: self._server(role, slots.get(role, 0)) for role in loads if role != ROLLOUT}
        self._shared = shared
        self._helpers: dict[str, _Server] = {}
        rollout = loads[ROLLOUT]
        self._lengths = lengths(rollout)
        first = max(1.0, rollout.num_requests - rollout.num_late)
        self._bring = bringing(rollout)
        self._again = rollout.num_late / first * COHORTS / max(1, len(self._bring))
        self._asks_again = next(load for role, load in loads.items() if role != ROLLOUT)
        self._help_at = self._back_at = math.inf
        self._now = 0.0
        for cohort, size in enumerate(self._lengths):
            self._rollout.add(size, cohort, first / COHORTS / self._rollout.num_slots)

    def _server(self, role: str, num_slots: int) -> _Server:
        return _Server(self._loads[role], num_slots, float(self._setting.capacity[role]))

    def seconds(self) -> float:
        while True:
            servers = [self._rollout, *self._active(self._scorers), *self._active(self._helpers)]
            if self._shared:
                at_once = max(1, sum(bool(server.running) for server in servers))
                for server in servers:
                    server.at_once = at_once
            ends = [server.next_end() for server in servers]
            now = min(*ends, self._help_at, self._back_at)
            if now == math.inf:
                return self._now
            for server in (self._rollout, *self._scorers.values(), *self._helpers.values()):
                server.advance(now)
            self._now = now
            if now == self._help_at:
                self._help()
            elif now == self._back_at:
                self._go_back()
            else:
                self._end(servers[ends.index(now)])

    def _active(self, servers: Mapping[str, _Server]) -> list[_Server]:
        return [server for server in servers.values() if server.num_slots]

    def _end(self, server: _Server) -> None:
        cohort, weight = server.end()
        num = weight * server.num_slots
        if server is self._rollout:
            self._to_scorers(cohort, num)
        elif server.load is self._asks_again and cohort in self._bring:
            self._draw_again(cohort, num * self._again / self._rollout.num_slots)
        if not self._rollout.running and self._help_at == math.inf and self._needs_help() is not None:
            self._help_at = self._now + self._setting.swap_s
        elif self._helpers and self._rollout.waiting and not any(helper.running for helper in self._helpers.values()):
            self._back_at = min(self._back_at, self._now + self._setting.swap_s)

    def _draw_again(self, cohort: int, weight: float) -> None:
        """Prompts in place of others; of those of one moment, one completion is as long as the longest of so many."""
        rollout = self._rollout.load
        together = max(1.0, rollout.num_late / rollout.num_times_late)
        longest = self._lengths[min(COHORTS - 1, int(COHORTS * together / (together + 1)))]
        self._rollout.add(self._lengths[min(_ORDER[cohort], COHORTS - 2)], cohort + COHORTS, weight)
        if together > 1:
            self._rollout.add(longest, cohort + COHORTS, weight / together)

    def _to_scorers(self, cohort: int, num: float) -> None:
        for role, server in self._scorers.items():
            load, helper = self._loads[role], self._helpers.get(role)
            wanted = num * load.num_requests / max(1.0, self._loads[ROLLOUT].num_requests)
            if server.num_slots:
                server.add(load.size, cohort, wanted / server.num_slots)
            elif helper is not None:
                helper.add(load.size, cohort, wanted / helper.num_slots)
            else:  # until the rollouts' slots come
                server.waiting.append((load.size, cohort, wanted))

    def _needs_help(self) -> str | None:
        """The scorer without a slot that has the most waiting."""
        waiting_s = {
            role: sum(weight for *_, weight in server.waiting) * server.load.engine_s(server.capacity)
            for role, server in self._scorers.items()
            if not server.num_slots and server.waiting and role not in self._helpers
        }
        return max(waiting_s, key=lambda role: waiting_s[role], default=None)

    def _help(self) -> None:
        self._help_at = math.inf
        role = self._needs_help()
        if role is None:
            return
        server = self._scorers[role]
        helper = self._helpers[role] = self._server(role, self._rollout.num_slots)
        helper.now = self._now
        self._rollout.is_open = False  # its slots are away
        waiting = list(server.waiting)
        server.waiting.clear()
        for size, cohort, num in waiting:
            helper.add(size, cohort, num / helper.num_slots)

    def _go_back(self) -> None:
        self._back_at = math.inf
        self._helpers.clear()
        self._rollout.is_open = True
        self._rollout.fill()


def forecast_s(loads: Mapping[str, Load], division: Division, setting: Setting, *, shared: bool = False) -> float:
    """Seconds of a round that starts with this division; infinite where nothing rolls out.

    `shared`: every slot does the work of all roles at once.
    """
    return _Forecast(loads, division, setting, shared=shared).seconds() if division.get(ROLLOUT, 0) else math.inf


def bringing(load: Load) -> set[int]:
    """The cohorts whose verdicts bring more prompts: at as many moments as there were, as late on the mean.

    With few of them it is seldom the last verdict that brings more, by which a round would be twice as long.
    """
    if load.num_late < _LEAST:
        return set()
    times = max(1, round(min(load.num_times_late, COHORTS)))
    late_at = min(0.99, max(0.01, load.late_at))
    power = (1 - late_at) / late_at  # evenly spread numbers from 0 to 1, so raised, have this mean
    return {int(((place + 0.5) / times) ** power * COHORTS) for place in range(times)}


def lengths(load: Load) -> list[float]:
    """The cohorts' lengths, shortest first, with the load's mean, spread and longest."""
    sigma = math.sqrt(math.log1p((load.deviation / load.size) ** 2))
    raw = [math.exp(sigma * quantile) for quantile in _QUANTILES[:-1]]
    # The longest is one cohort's; the others are scaled so that the mean stays.
    longest = max(load.longest, load.size)
    rest = max(load.size * COHORTS - longest, 0.1 * load.size * COHORTS)
    return [min(longest, value * rest / sum(raw)) for value in raw] + [longest]
