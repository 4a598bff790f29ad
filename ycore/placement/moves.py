"""When slots change their role: within a round, whether an idle slot takes over another role's backlog; between rounds,
which schedule promises the shortest round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ycore.placement.forecast import forecast_s
from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division, Mode, Schedule, SlotPool


@dataclass(frozen=True, slots=True)
class Backlog:
    waiting: float  # requests of a role
    coming: float  # those still to come
    num_slots: int  # with those that are waking for it
    engine_s: float  # of a slot that a request costs

    @property
    def work_s(self) -> float:
        return (self.waiting + self.coming) * self.engine_s

    def done_s(self, *, more_slots: int = 0, extra_s: float = 0.0) -> float:
        """Seconds until the work is done, with `more_slots` than now and `extra_s` more work."""
        slots = self.num_slots + more_slots
        work = self.work_s + extra_s
        return work / slots if slots else (math.inf if work else 0.0)


def best_move(
    here: Backlog, others: Mapping[str, Backlog], *, swap_s: float, late_s: float = 0.0
) -> str | None:
    """The role that an idle slot should wake: where it gains most, at a tie the first; None where it should stay.

    The part of the backlog that the slot would take must also be worth more than the swap. `late_s`: seconds that
    prompts wait where the last slot of a role leaves and its verdicts come late.
    """
    gains = {
        role: gain_s(here, there, swap_s=swap_s, late_s=late_s)
        for role, there in others.items()
        if there.num_slots == 0
        or (there.work_s - there.num_slots * swap_s) / (there.num_slots + 1) > swap_s
    }
    best = max(gains, key=lambda role: gains[role], default=None)
    return best if best is not None and gains[best] > 0 else None


def gain_s(here: Backlog, there: Backlog, *, swap_s: float, late_s: float = 0.0) -> float:
    """Seconds by which both roles are done sooner if an idle slot goes from here to there.

    Infinite where `there` has no other slot; below zero where the move does not pay.
    """
    if there.waiting == 0:
        return -math.inf
    if there.num_slots == 0:
        return math.inf
    if swap_s == 0:  # the slot can return at once
        return there.done_s()
    stay_s = max(here.done_s(), there.done_s())
    if here.num_slots > 1 or here.work_s == 0:
        return stay_s - max(here.done_s(more_slots=-1), there.done_s(more_slots=1, extra_s=swap_s))
    if here.done_s() >= there.done_s():
        return -math.inf
    # The last slot of its role: it, or another, has to come back.
    together_s = (here.work_s + there.work_s + 2 * swap_s) / (here.num_slots + there.num_slots)
    return stay_s - together_s - late_s


MARGIN = 0.03  # share of a round that a new schedule must save, beside its swaps
HORIZON = 10  # rounds over which the swaps of a new schedule are spread
AS_GOOD = 1.02  # forecasts within this factor count as equal
_MOST = 24  # divisions to forecast


def next_schedule(
    current: Schedule | None,
    loads: Mapping[str, Load],
    pool: SlotPool,
    factors: Mapping[Mode, float],
) -> Schedule:
    """The current schedule, unless another promises a round that is shorter by more than the margin and its swaps.

    A pure function: controllers with the same numbers choose the same. `factors`: what a round takes over its forecast.
    """

    def promised_s(schedule: Schedule) -> float:
        return factors[schedule.mode] * schedule_s(loads, schedule, pool)

    best = min(_schedules(loads, with_depths(loads, pool)), key=promised_s)
    if current is None:
        return best
    now_s, best_s = promised_s(current), promised_s(best)
    return best if now_s - best_s > MARGIN * best_s + pool.swap_s / HORIZON else current


def schedule_s(loads: Mapping[str, Load], schedule: Schedule, pool: SlotPool) -> float:
    """The forecast of a round that goes so."""
    mode = schedule.mode
    pool = with_depths(loads, pool, moves=mode == "divided")
    return forecast_s(
        loads, schedule.division, pool, shared=mode == "shared", moves=mode == "divided"
    )


def with_depths(loads: Mapping[str, Load], pool: SlotPool, *, moves: bool = False) -> SlotPool:
    """The pool with what a slot should hold of each role as its capacity."""
    depths = {
        role: load.depth(pool.num_slots, pool.capacity_of(role), moves=moves)
        for role, load in loads.items()
    }
    return replace(
        pool, capacity={role: depths.get(role, pool.capacity_of(role)) for role in pool.roles}
    )


def _schedules(loads: Mapping[str, Load], pool: SlotPool) -> list[Schedule]:
    """The best of each mode. On one slot, `together` is the same as `phases`."""
    everywhere = divide(pool.num_slots, loads, pool)
    modes: list[Mode] = ["together"] if pool.num_slots == 1 else ["phases", "together"]
    modes += [] if pool.exclusive else ["shared"]
    found = [Schedule(everywhere, mode) for mode in modes]
    if pool.num_slots == 1:
        return found
    divided = best_division(loads, pool)
    held = (
        [Schedule(divided, "held")] if min(divided.values()) > 0 else []
    )  # a role without a slot needs a move
    return [Schedule(divided, "divided"), *held, *found]


def best_division(loads: Mapping[str, Load], pool: SlotPool) -> Division:
    """The middle one of the divisions around the shortest forecast that are as good as that.

    A round gets longer slowly on either side until one role has too few slots, and then fast: the middle is safe.
    """
    most = pool.num_slots - 1
    tried = sorted({*range(1, most + 1, math.ceil(most / _MOST)), most})
    seconds = [forecast_s(loads, divide(rollout, loads, pool), pool) for rollout in tried]
    first = last = min(range(len(tried)), key=seconds.__getitem__)
    enough_s = AS_GOOD * seconds[first]
    while first > 0 and seconds[first - 1] <= enough_s:
        first -= 1
    while last < len(tried) - 1 and seconds[last + 1] <= enough_s:
        last += 1
    return divide((tried[first] + tried[last] + 1) // 2, loads, pool)


def divide(rollout: int, loads: Mapping[str, Load], pool: SlotPool) -> Division:
    """This many slots for rollouts, the rest for the other roles by their work."""
    work = {
        role: load.num_requests * load.engine_s(pool.capacity_of(role))
        for role, load in loads.items()
        if role != ROLLOUT
    }
    return {ROLLOUT: rollout, **shares(work, pool.num_slots - rollout)}


def shares(work: Mapping[str, float], num_slots: int) -> dict[str, int]:
    """Whole slots in proportion to work (largest remainders); at a tie the first role gets more."""
    total = sum(work.values())
    exact = {role: num_slots * amount / total for role, amount in work.items()}
    whole = {role: math.floor(share) for role, share in exact.items()}
    for role in sorted(exact, key=lambda role: whole[role] - exact[role])[
        : num_slots - sum(whole.values())
    ]:
        whole[role] += 1
    return whole
