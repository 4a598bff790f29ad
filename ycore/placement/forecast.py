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
_MIN_LATE = 0.5  # with fewer late requests than this, there is no second wave
_QUANTILES = [NormalDist().inv_cdf((index + 0.5) / COHORTS) for index in range(COHORTS)]
_SECOND_ORDER = [index * 5 % COHORTS for index in range(COHORTS)]
"""The second wave draws new lengths: in another order."""


def forecast_s(
    loads: Mapping[str, Load],
    division: Division,
    pool: SlotPool,
    *,
    shared: bool = False,
    moves: bool = False,
) -> float:
    """Return the seconds of a round that starts with this division; infinite where no slot rolls out.

    Args:
        pool: with each role's depth as its capacity.
        shared: every slot serves all roles at once.
        moves: slots without rollouts help the other roles.
    """
    if not division.get(ROLLOUT, 0):
        return math.inf
    return _Round(loads, division, pool, shared=shared, moves=moves).seconds()


def is_worth_a_swap(work_s: float, num_slots: int, swap_s: float) -> bool:
    """Whether the part of this work that one more slot would take is longer than the swap."""
    return num_slots == 0 or (work_s - num_slots * swap_s) / (num_slots + 1) > swap_s


@dataclass(slots=True)
class _MeanSlot:
    """The mean slot of a role; weights are requests per slot."""

    load: Load
    num_slots: int
    capacity: float
    is_open: bool = True
    sharing: int = 1  # engines at work on the slot, which share it evenly
    now: float = 0.0
    tokens: float = 0.0
    in_flight: float = 0.0
    running: list[tuple[float, int, float]] = field(default_factory=list)
    """A heap of (tokens at its end, cohort, weight)."""
    waiting: deque[tuple[float, int, float]] = field(default_factory=deque)
    """(size, cohort, weight) of each."""

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
        self._pool = pool
        self._moves = moves
        self._shared = shared
        self._rollout_load = rollout = loads[ROLLOUT]
        self._rollout = self._mean_slot(ROLLOUT, rollout, division[ROLLOUT])
        self._scorers: dict[str, _MeanSlot] = {}
        for role, load in loads.items():
            if role != ROLLOUT:
                num_slots = pool.num_slots if shared else division.get(role, 0)
                self._scorers[role] = self._mean_slot(role, load, num_slots)
        self._helpers: dict[
            str, _MeanSlot
        ] = {}  # the rollouts' slots, while they serve another role
        self._lengths = lengths(rollout)
        first = max(1.0, rollout.num_requests - rollout.num_late)
        self._late_cohorts = late_cohorts(rollout)
        self._late_share = rollout.num_late / first * COHORTS / max(1, len(self._late_cohorts))
        self._first_scorer = next(iter(self._scorers.values())).load
        self._help_at = self._back_at = math.inf
        self._now = 0.0
        for cohort, size in enumerate(self._lengths):
            self._rollout.add(size, cohort, first / COHORTS / self._rollout.num_slots)

    def _mean_slot(self, role: str, load: Load, num_slots: int) -> _MeanSlot:
        return _MeanSlot(load, num_slots, float(self._pool.capacity_of(role)))

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

    def _end(self, server: _MeanSlot) -> None:
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
        """Add replacement groups: of those drawn at one moment, one completion is as long as the longest of so many."""
        rollout = self._rollout_load
        together = max(1.0, rollout.num_late / rollout.num_times_late)
        longest = self._lengths[min(COHORTS - 1, int(COHORTS * together / (together + 1)))]
        self._rollout.add(
            self._lengths[min(_SECOND_ORDER[cohort], COHORTS - 2)], cohort + COHORTS, weight
        )
        if together > 1:
            self._rollout.add(longest, cohort + COHORTS, weight / together)

    def _score(self, cohort: int, num: float) -> None:
        for role, scorer in self._scorers.items():
            load = scorer.load
            requests = num * load.num_requests / max(1.0, self._rollout_load.num_requests)
            helper = self._helpers.get(role)
            slots = [slot for slot in (scorer, helper) if slot is not None and slot.num_slots]
            if not slots:  # they wait until the rollouts' slots come
                scorer.waiting.append((load.size, cohort, requests))
            for slot in slots:
                slot.add(load.size, cohort, requests / sum(other.num_slots for other in slots))

    def _needs_help(self) -> str | None:
        """Return the scorer with the most work waiting that has no slot or, with moves, is worth a swap."""
        waiting_s: dict[str, float] = {}
        for role, scorer in self._scorers.items():
            num_waiting = sum(weight for *_, weight in scorer.waiting)
            if (
                not num_waiting
                or role in self._helpers
                or not (self._moves or not scorer.num_slots)
            ):
                continue
            work_s = (
                num_waiting * max(1, scorer.num_slots) * scorer.load.engine_s(scorer.capacity)
            )
            if is_worth_a_swap(work_s, scorer.num_slots, self._pool.swap_s):
                waiting_s[role] = work_s
        return max(waiting_s, key=lambda role: waiting_s[role], default=None)

    def _help(self) -> None:
        self._help_at = math.inf
        role = self._needs_help()
        if role is None:
            return
        scorer = self._scorers[role]
        helper = self._helpers[role] = self._mean_slot(
            role, scorer.load, self._rollout.num_slots
        )
        helper.now = self._now
        self._rollout.is_open = False
        waiting = list(scorer.waiting)
        scorer.waiting.clear()
        num_slots = scorer.num_slots + helper.num_slots
        for size, cohort, weight in waiting:
            shared_weight = weight * max(1, scorer.num_slots) / num_slots
            helper.add(size, cohort, shared_weight)
            if scorer.num_slots:
                scorer.add(size, cohort, shared_weight)


def late_cohorts(load: Load) -> set[int]:
    """Return the cohorts whose verdicts bring late requests: one for each moment, at the measured mean share.

    With few such moments it is seldom the last verdict that brings more, which would make the round twice as long.
    """
    if load.num_late < _MIN_LATE:
        return set()
    times = max(1, round(min(load.num_times_late, COHORTS)))
    late_at = min(0.99, max(0.01, load.late_at))
    # Evenly spaced numbers from 0 to 1, raised to this power, have the mean `late_at`.
    power = (1 - late_at) / late_at
    return {int(((place + 0.5) / times) ** power * COHORTS) for place in range(times)}


def lengths(load: Load) -> list[float]:
    """Return the cohorts' lengths in tokens, shortest first, with the load's mean, spread and longest."""
    sigma = math.sqrt(math.log1p((load.deviation / load.size) ** 2))
    raw = [math.exp(sigma * quantile) for quantile in _QUANTILES[:-1]]
    # The longest is one cohort's; the others are scaled so that the mean stays.
    longest = max(load.longest, load.size)
    rest = max(load.size * COHORTS - longest, 0.1 * load.size * COHORTS)
    return [min(longest, value * rest / sum(raw)) for value in raw] + [longest]
