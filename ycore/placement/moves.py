"""Within a step: whether a slot that has nothing left in its role should take on another's backlog.

A move is judged by the time at which the two roles concerned would be through, with it and without it. What counts as a
role's work is what waits and what is still to come, since completions that are being written will want their judge;
what is in flight on other slots stays there either way.

Not here: carrying it out (`allocator`), and the division a step starts with (`division`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass


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
