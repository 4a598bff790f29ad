"""Between steps: the division of slots that promises the shortest round, changed only when that clearly pays.

Not here: the forecast (`forecast`), and the moves during the round (`moves`).
"""

import math
from collections.abc import Iterator, Mapping

from ycore.placement.forecast import Setting, forecast_s
from ycore.placement.load import Load
from ycore.placement.placement import ROLLOUT, Division

MARGIN = 0.03
"""Share of a round that a change must save, beside its swaps."""

HORIZON = 10
"""Rounds over which the swaps of a change are spread."""

_MOST = 24
"""Divisions that are looked at in one go; where there are more, the neighbours of the best are looked at next."""


def next_division(current: Division | None, loads: Mapping[str, Load], setting: Setting) -> Division:
    """The current one, unless another promises a round that is shorter by more than the margin and its swaps.

    With None nothing was chosen yet, and the best is taken as it is. A pure function: controllers that know the same
    numbers come to the same division.
    """
    best = _search(loads, setting)
    if current is None:
        return best
    now_s, best_s = (forecast_s(loads, division, setting) for division in (current, best))
    return best if now_s - best_s > MARGIN * best_s + setting.swap_s / HORIZON else current


def _search(loads: Mapping[str, Load], setting: Setting) -> Division:
    """The best number of rollout slots, from coarse to fine."""
    low, high = 1, setting.num_slots
    while True:
        stride = max(1, math.ceil((high - low + 1) / _MOST))
        tried = sorted({*range(low, high + 1, stride), high}, reverse=True)
        divided = [divide(rollout, loads, setting) for rollout in tried]
        best = min(divided, key=lambda division: forecast_s(loads, division, setting))
        if stride == 1:
            return best
        low, high = max(1, best[ROLLOUT] - stride), min(setting.num_slots, best[ROLLOUT] + stride)


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


def divisions(loads: Mapping[str, Load], setting: Setting) -> Iterator[Division]:
    """Every number of rollout slots, the most first."""
    return (divide(rollout, loads, setting) for rollout in range(setting.num_slots, 0, -1))
