"""Between steps: the plan that promises the shortest round, changed only when that clearly pays.

Within a step: whether a slot that has nothing left in its role should take on another's backlog.

Not here: the forecast (`forecast`), how far it is believed (`experience`), and the moves during the round (`moves`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ycore.placement.forecast import Setting, forecast_s
from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division, Factors, Schedule


@dataclass(frozen=True, slots=True)
class Backlog:
    """A role's requests that wait and that are yet to come, the slots that serve it or are on their way, and what a
    request costs a slot, in seconds."""

    waiting: float
    coming: float
    num_slots: int
    engine_s: float

    @property
    def work_s(self) -> float:
        return (self.waiting + self.coming) * self.engine_s

    def through_s(self, *, more: int = 0, extra_s: float = 0.0) -> float:
        """Seconds until the work is done, by `more` slots than now, with so much work besides."""
        slots = self.num_slots + more
        work = self.work_s + extra_s
        return work / slots if slots else (math.inf if work else 0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a move costs: the swap, and the delay where nobody is left to give verdicts that more prompts wait for."""

    swap_s: float
    late_s: float = 0.0


def gain_s(here: Backlog, there: Backlog, cost: Cost) -> float:
    """Seconds by which the two roles are through sooner if a slot with nothing to do goes from here to there.

    Infinite where nobody else would do it; below zero where it does not pay.
    """
    if there.waiting == 0:
        return -math.inf
    if there.num_slots == 0:
        return math.inf
    if cost.swap_s == 0:  # it can be back at once
        return there.through_s()
    stay_s = max(here.through_s(), there.through_s())
    if here.num_slots > 1 or here.work_s == 0:
        return stay_s - max(here.through_s(more=-1), there.through_s(more=1, extra_s=cost.swap_s))
    if here.through_s() >= there.through_s():
        return -math.inf
    # The last slot of its role: it, or another, has to come back.
    together_s = (here.work_s + there.work_s + 2 * cost.swap_s) / (here.num_slots + there.num_slots)
    return stay_s - together_s - cost.late_s


def best_move(here: Backlog, others: Mapping[str, Backlog], cost: Cost) -> str | None:
    """The role that a slot with nothing to do should wake: where it gains most, at a tie the first named; or None.

    The backlog that it would take must also be worth more than the swap itself.
    """
    gains = {role: gain_s(here, there, cost) for role, there in others.items() if _is_worth(there, cost)}
    best = max(gains, key=lambda role: gains[role], default=None)
    return best if best is not None and gains[best] > 0 else None


def _is_worth(there: Backlog, cost: Cost) -> bool:
    taken_s = (there.work_s - there.num_slots * cost.swap_s) / (there.num_slots + 1)
    return there.num_slots == 0 or taken_s > cost.swap_s


MARGIN = 0.03
"""Share of a round that a change must save, beside its swaps."""

HORIZON = 10
"""Rounds over which the swaps of a change are spread."""

AS_GOOD = 1.02
"""Forecasts so close to each other say the same."""

_MOST = 24
"""Divisions that are looked at."""


def next_schedule(current: Schedule | None, loads: Mapping[str, Load], setting: Setting, factors: Factors) -> Schedule:
    """The current one, unless another promises a round that is shorter by more than the margin and its swaps.

    With None nothing was chosen yet, and the best is taken as it is. A pure function: controllers that know the same
    numbers come to the same plan.
    """

    def promised_s(schedule: Schedule) -> float:
        shared = schedule.mode == "shared"
        return factors[schedule.mode] * forecast_s(loads, schedule.division, setting, shared=shared)

    best = min(_plans(loads, setting), key=promised_s)
    if current is None:
        return best
    now_s, best_s = promised_s(current), promised_s(best)
    return best if now_s - best_s > MARGIN * best_s + setting.swap_s / HORIZON else current


def _plans(loads: Mapping[str, Load], setting: Setting) -> list[Schedule]:
    """The best of each mode. On one slot phases come by themselves."""
    everywhere = divide(setting.num_slots, loads, setting)
    shared = [] if setting.exclusive else [Schedule(everywhere, "shared")]
    if setting.num_slots == 1:
        return [Schedule(everywhere, "together"), *shared]
    divided = best_division(loads, setting)
    held = [Schedule(divided, "held")] if min(divided.values()) > 0 else []  # a role without a slot needs a move
    return [
        Schedule(divided, "divided"),
        *held,
        Schedule(everywhere, "phases"),
        Schedule(everywhere, "together"),
        *shared,
    ]


def best_division(loads: Mapping[str, Load], setting: Setting) -> Division:
    """The middle of the divisions around the shortest forecast that are as good as that one.

    Rounds become slowly longer on either side until one role is too few, and then fast: the middle is the safe place.
    """
    most = setting.num_slots - 1
    tried = sorted({*range(1, most + 1, math.ceil(most / _MOST)), most})
    told_s = [forecast_s(loads, divide(rollout, loads, setting), setting) for rollout in tried]
    first = last = min(range(len(tried)), key=told_s.__getitem__)
    enough_s = AS_GOOD * told_s[first]
    while first > 0 and told_s[first - 1] <= enough_s:
        first -= 1
    while last < len(tried) - 1 and told_s[last + 1] <= enough_s:
        last += 1
    return divide((tried[first] + tried[last] + 1) // 2, loads, setting)


def divide(rollout: int, loads: Mapping[str, Load], setting: Setting) -> Division:
    """So many slots for rollouts, the rest for the others by their work."""
    others = [role for role in loads if role != ROLLOUT]
    work = {role: loads[role].num_requests * loads[role].engine_s(setting.capacity[role]) for role in others}
    return {ROLLOUT: rollout, **shares(work, setting.num_slots - rollout)}


def shares(work: Mapping[str, float], num_slots: int) -> dict[str, int]:
    """Whole slots in proportion to work (largest remainders), at a tie to the first named."""
    total = sum(work.values())
    exact = {role: num_slots * amount / total for role, amount in work.items()}
    whole = {role: math.floor(share) for role, share in exact.items()}
    for role in sorted(exact, key=lambda role: whole[role] - exact[role])[: num_slots - sum(whole.values())]:
        whole[role] += 1
    return whole
