"""When slots change their role: within a round, whether an idle slot takes over another role's backlog; between rounds,
which schedule promises the shortest round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ycore.placement.forecast import forecast_s, is_worth_a_swap
from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division, Mode, Schedule, SlotPool


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests that a role has left in the round."""

    waiting: float  # requests
    coming: float  # requests that are still to be asked
    num_slots: int  # with those that are waking for it
    engine_s: float  # slot seconds that a request costs

    @property
    def work_s(self) -> float:
        return (self.waiting + self.coming) * self.engine_s

    def done_s(self, *, more_slots: int = 0, extra_s: float = 0.0) -> float:
        """Return the seconds until the work is done, with `more_slots` than now and `extra_s` more work."""
        slots = self.num_slots + more_slots
        work = self.work_s + extra_s
        if slots:
            return work / slots
        return math.inf if work else 0.0


def best_move(
    source: Backlog, targets: Mapping[str, Backlog], *, swap_s: float, late_s: float = 0.0
) -> str | None:
    """Return the role that an idle slot should wake: where it gains most, at a tie the first; None to stay.

    The part of the backlog that the slot would take must also be worth more than the swap. `late_s`: seconds that
    prompts wait where the last slot of a role leaves and its verdicts come late.
    """
    gains = {
        role: gain_s(source, target, swap_s=swap_s, late_s=late_s)
        for role, target in targets.items()
        if is_worth_a_swap(target.work_s, target.num_slots, swap_s)
    }
    best = max(gains, key=lambda role: gains[role], default=None)
    return best if best is not None and gains[best] > 0 else None


def gain_s(source: Backlog, target: Backlog, *, swap_s: float, late_s: float = 0.0) -> float:
    """Return the seconds by which both roles are done sooner if an idle slot changes from source to target.

    Infinite where `target` has no other slot; below zero where the move does not pay.
    """
    if target.waiting == 0:
        return -math.inf
    if target.num_slots == 0:
        return math.inf
    if swap_s == 0:  # the slot can return at once
        return target.done_s()
    stay_s = max(source.done_s(), target.done_s())
    if source.num_slots > 1 or source.work_s == 0:
        move_s = max(source.done_s(more_slots=-1), target.done_s(more_slots=1, extra_s=swap_s))
        return stay_s - move_s
    if source.done_s() >= target.done_s():
        return -math.inf
    # The last slot of its role: it, or another, has to come back.
    work_s = source.work_s + target.work_s + 2 * swap_s
    return stay_s - work_s / (source.num_slots + target.num_slots) - late_s


MARGIN = 0.03  # share of a round that a new schedule must save, beside its swaps
HORIZON = 10  # rounds over which the swaps of a new schedule are spread
AS_GOOD = 1.02  # forecasts within this factor count as equal
_MAX_FORECASTS = 24  # of divisions


def next_schedule(
    current: Schedule | None,
    loads: Mapping[str, Load],
    pool: SlotPool,
    factors: Mapping[Mode, float],
) -> Schedule:
    """Return the current schedule, or another that promises a round shorter by more than the margin and its swaps.

    `factors`: by mode, what a round takes over its forecast.
    """

    def promised_s(schedule: Schedule) -> float:
        return factors[schedule.mode] * schedule_s(loads, schedule, pool)

    best = min(_schedules(loads, with_depths(loads, pool)), key=promised_s)
    if current is None:
        return best
    best_s = promised_s(best)
    saved_s = promised_s(current) - best_s
    return best if saved_s > MARGIN * best_s + pool.swap_s / HORIZON else current


def schedule_s(loads: Mapping[str, Load], schedule: Schedule, pool: SlotPool) -> float:
    """Forecast the seconds of a round with this schedule."""
    mode = schedule.mode
    pool = with_depths(loads, pool, moves=mode == "divided")
    return forecast_s(
        loads, schedule.division, pool, shared=mode == "shared", moves=mode == "divided"
    )


def with_depths(loads: Mapping[str, Load], pool: SlotPool, *, moves: bool = False) -> SlotPool:
    """Return the pool with the requests that a slot should hold of each role as its capacity."""
    capacity = {role: pool.capacity_of(role) for role in pool.roles}
    for role, load in loads.items():
        capacity[role] = load.depth(pool.num_slots, capacity[role], moves=moves)
    return replace(pool, capacity=capacity)


def _schedules(loads: Mapping[str, Load], pool: SlotPool) -> list[Schedule]:
    """Return the best schedule of each mode. On one slot, `together` is the same as `phases`."""
    schedules: list[Schedule] = []
    all_rollouts = divide(pool.num_slots, loads, pool)
    if pool.num_slots > 1:
        divided = best_division(loads, pool)
        schedules.append(Schedule(divided, "divided"))
        if min(divided.values()) > 0:  # a role without a slot needs a move
            schedules.append(Schedule(divided, "held"))
        schedules.append(Schedule(all_rollouts, "phases"))
    schedules.append(Schedule(all_rollouts, "together"))
    if not pool.exclusive:
        schedules.append(Schedule(all_rollouts, "shared"))
    return schedules


def best_division(loads: Mapping[str, Load], pool: SlotPool) -> Division:
    """Return the middle one of the divisions around the shortest forecast that are as good as that.

    A round gets longer slowly on either side until one role has too few slots, and then fast: the middle is safe.
    """
    most = pool.num_slots - 1
    tried = sorted({*range(1, most + 1, math.ceil(most / _MAX_FORECASTS)), most})
    seconds = [forecast_s(loads, divide(rollout, loads, pool), pool) for rollout in tried]
    first = last = min(range(len(tried)), key=seconds.__getitem__)
    enough_s = AS_GOOD * seconds[first]
    while first > 0 and seconds[first - 1] <= enough_s:
        first -= 1
    while last < len(tried) - 1 and seconds[last + 1] <= enough_s:
        last += 1
    return divide((tried[first] + tried[last] + 1) // 2, loads, pool)


def divide(rollout: int, loads: Mapping[str, Load], pool: SlotPool) -> Division:
    """Give this many slots to rollouts, the rest to the other roles by their work."""
    work = {
        role: load.num_requests * load.engine_s(pool.capacity_of(role))
        for role, load in loads.items()
        if role != ROLLOUT
    }
    return {ROLLOUT: rollout, **shares(work, pool.num_slots - rollout)}


def shares(work: Mapping[str, float], num_slots: int) -> dict[str, int]:
    """Split slots in proportion to work (largest remainders); at a tie the first role gets more."""
    total = sum(work.values())
    exact = {role: num_slots * amount / total for role, amount in work.items()}
    whole = {role: math.floor(share) for role, share in exact.items()}
    for role in sorted(exact, key=lambda role: whole[role] - exact[role])[
        : num_slots - sum(whole.values())
    ]:
        whole[role] += 1
    return whole
