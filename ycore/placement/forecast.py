"""How long a round takes from a given division: one mean slot of each role, played through.

A role's requests are a dozen cohorts of equal number. Their lengths are the quantiles of a lognormal with the measured
mean and spread; the last cohort has the longest length seen. The slots of a role are alike, so one of them is played,
with weights instead of single requests. A finished rollout cohort is then scored; under dynamic sampling the verdicts
of the first wave bring a second. A role without slots gets those of the rollouts when these are done, a swap later,
until the rollouts need them back; with `moves` so does a role with slots, for the share of its queue that is worth the
swap. Other moves are left out: they seldom change which division is best. All this takes well under a millisecond.
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division, SlotPool

COHORTS = 12
_LEAST = 0.5  # with fewer late requests than this, there is no second wave
_QUANTILES = [NormalDist().inv_cdf((index + 0.5) / COHORTS) for index in range(COHORTS)]
_ORDER = [
    index * 5 % COHORTS for index in range(COHORTS)
]  # the second wave draws new lengths: in another order


def forecast_s(
    loads: Mapping[str, Load],
    division: Division,
    pool: SlotPool,
    *,
    shared: bool = False,
    moves: bool = False,
) -> float:
    """Seconds of a round that starts with this division; infinite where no slot rolls out. `pool` has each role's depth
    as its capacity. `shared`: every slot serves all roles at once. `moves`: slots without rollouts help the others."""
    if not division.get(ROLLOUT, 0):
        return math.inf
    return _Round(loads, division, pool, shared=shared, moves=moves).seconds()


@dataclass(slots=True)
class _Server:
    """The mean slot of a role; weights are requests per slot."""

    load: Load
    num_slots: int
    capacity: float
    is_open: bool = True
    sharing: int = 1  # engines at work on the slot, which share it evenly
    now: float = 0.0
    tokens: float = 0.0
    in_flight: float = 0.0
    running: list[tuple[float, int, float]] = field(
        default_factory=list
    )  # tokens at its end, cohort, weight
    waiting: deque[tuple[float, int, float]] = field(default_factory=deque)  # size, cohort, weight

    def advance(self, now: float) -> None:
        if self.running:
            self.tokens += (now - self.now) / self._step_s()
        self.now = now

    def add(self, size: float, cohort: int, weight: float) -> None:
        self.waiting.append((size, cohort, weight))
        self.fill()

    def fill(self) -> None:
        while self.is_open and self.waiting:
            size, cohort, weight = self.waiting[0]
            if self.running and self.in_flight + weight > self.capacity:
                return
            self.waiting.popleft()
            heapq.heappush(self.running, (self.tokens + size, cohort, weight))
            self.in_flight += weight

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        return self.now + (self.running[0][0] - self.tokens) * self._step_s()

    def _step_s(self) -> float:
        return self.load.speed.step_s(max(1.0, self.in_flight)) * self.sharing

    def end(self) -> tuple[int, float]:
        self.tokens, cohort, weight = heapq.heappop(self.running)
        self.in_flight -= weight
        self.fill()
        return cohort, weight


class _Round:
    def __init__(
        self,
        loads: Mapping[str, Load],
        division: Division,
        pool: SlotPool,
        *,
        shared: bool,
        moves: bool,
    ) -> None:
        self._pool, self._moves = pool, moves
        self._rollout_load = rollout = loads[ROLLOUT]
        self._rollout = self._server(ROLLOUT, rollout, division[ROLLOUT])
        self._scorers = {
            role: self._server(role, load, pool.num_slots if shared else division.get(role, 0))
            for role, load in loads.items()
            if role != ROLLOUT
        }
        self._shared = shared
        self._helpers: dict[str, _Server] = {}  # the rollouts' slots, while they serve another role
        self._lengths = lengths(rollout)
        first = max(1.0, rollout.num_requests - rollout.num_late)
        self._late_cohorts = late_cohorts(rollout)
        self._late_share = rollout.num_late / first * COHORTS / max(1, len(self._late_cohorts))
        self._first_scorer = next(iter(self._scorers.values())).load
        self._help_at = self._back_at = math.inf
        self._now = 0.0
        for cohort, size in enumerate(self._lengths):
            self._rollout.add(size, cohort, first / COHORTS / self._rollout.num_slots)

    def _server(self, role: str, load: Load, num_slots: int) -> _Server:
        return _Server(load, num_slots, float(self._pool.capacity_of(role)))

    def seconds(self) -> float:
        while True:
            scorers = [server for server in self._scorers.values() if server.num_slots]
            servers = [self._rollout, *scorers, *self._helpers.values()]
            if self._shared:
                sharing = max(1, sum(bool(server.running) for server in servers))
                for server in servers:
                    server.sharing = sharing
            ends = [server.next_end() for server in servers]
            now = min(*ends, self._help_at, self._back_at)
            if now == math.inf:
                return self._now
            for server in servers:
                server.advance(now)
            self._now = now
            if now == self._help_at:
                self._help()
            elif now == self._back_at:  # the rollouts need their slots again
                self._back_at = math.inf
                self._helpers.clear()
                self._rollout.is_open = True
                self._rollout.fill()
            else:
                self._end(servers[ends.index(now)])

    def _end(self, server: _Server) -> None:
        cohort, weight = server.end()
        num = weight * server.num_slots
        if server is self._rollout:
            self._score(cohort, num)
        elif server.load is self._first_scorer and cohort in self._late_cohorts:
            self._draw_late(cohort, num * self._late_share / self._rollout.num_slots)
        if (
            not self._rollout.running
            and self._help_at == math.inf
            and self._needs_help() is not None
        ):
            self._help_at = self._now + self._pool.swap_s
        elif (
            self._helpers
            and self._rollout.waiting
            and not any(helper.running for helper in self._helpers.values())
        ):
            self._back_at = min(self._back_at, self._now + self._pool.swap_s)

    def _draw_late(self, cohort: int, weight: float) -> None:
        """Replace groups: of those drawn at one moment, one completion is as long as the longest of so many."""
        rollout = self._rollout_load
        together = max(1.0, rollout.num_late / rollout.num_times_late)
        longest = self._lengths[min(COHORTS - 1, int(COHORTS * together / (together + 1)))]
        self._rollout.add(self._lengths[min(_ORDER[cohort], COHORTS - 2)], cohort + COHORTS, weight)
        if together > 1:
            self._rollout.add(longest, cohort + COHORTS, weight / together)

    def _score(self, cohort: int, num: float) -> None:
        for role, scorer in self._scorers.items():
            load = scorer.load
            requests = num * load.num_requests / max(1.0, self._rollout_load.num_requests)
            helper = self._helpers.get(role)
            servers = [
                server for server in (scorer, helper) if server is not None and server.num_slots
            ]
            if not servers:  # they wait until the rollouts' slots come
                scorer.waiting.append((load.size, cohort, requests))
            for server in servers:
                server.add(load.size, cohort, requests / sum(one.num_slots for one in servers))

    def _needs_help(self) -> str | None:
        """The scorer that has the most waiting, of those without a slot or, with moves, whose queue is worth a swap."""
        waiting_s, swap_s = dict[str, float](), self._pool.swap_s
        for role, server in self._scorers.items():
            slots, num = server.num_slots, sum(weight for *_, weight in server.waiting)
            work_s = num * max(1, slots) * server.load.engine_s(server.capacity)
            is_worth_it = self._moves and (work_s - slots * swap_s) / (slots + 1) > swap_s
            if num and role not in self._helpers and (not slots or is_worth_it):
                waiting_s[role] = work_s
        return max(waiting_s, key=lambda role: waiting_s[role], default=None)

    def _help(self) -> None:
        self._help_at = math.inf
        role = self._needs_help()
        if role is None:
            return
        scorer = self._scorers[role]
        helper = self._helpers[role] = self._server(role, scorer.load, self._rollout.num_slots)
        helper.now = self._now
        self._rollout.is_open = False
        waiting, both = list(scorer.waiting), scorer.num_slots + helper.num_slots
        scorer.waiting.clear()
        for size, cohort, weight in waiting:
            each = weight * max(1, scorer.num_slots) / both
            helper.add(size, cohort, each)
            if scorer.num_slots:
                scorer.add(size, cohort, each)


def late_cohorts(load: Load) -> set[int]:
    """The cohorts whose verdicts bring late requests: as many as there were moments, at the measured mean share.

    With few such moments it is seldom the last verdict that brings more, which would make the round twice as long.
    """
    if load.num_late < _LEAST:
        return set()
    times = max(1, round(min(load.num_times_late, COHORTS)))
    late_at = min(0.99, max(0.01, load.late_at))
    power = (
        1 - late_at
    ) / late_at  # evenly spaced numbers from 0 to 1, raised to this, have the mean `late_at`
    return {int(((place + 0.5) / times) ** power * COHORTS) for place in range(times)}


def lengths(load: Load) -> list[float]:
    """The cohorts' lengths in tokens, shortest first, with the load's mean, spread and longest."""
    sigma = math.sqrt(math.log1p((load.deviation / load.size) ** 2))
    raw = [math.exp(sigma * quantile) for quantile in _QUANTILES[:-1]]
    # The longest is one cohort's; the others are scaled so that the mean stays.
    longest = max(load.longest, load.size)
    rest = max(load.size * COHORTS - longest, 0.1 * load.size * COHORTS)
    return [min(longest, value * rest / sum(raw)) for value in raw] + [longest]
