"""The allocator's memory of earlier rounds: each role's load, how well forecasts held, and the next schedule.

Everything learned comes from sums over all machines, so that all of them learn the same. It is part of a checkpoint:
a resumed run divides its slots as it would have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from ycore.placement.load import Load, Sums, as_late_as, faded, from_numbers
from ycore.placement.moves import next_schedule, schedule_s, with_depths
from ycore.placement.placement import ROLLOUT, Mode, Placement, Schedule, SlotPool

KEEP = 1
"""vLLM's sleep level that keeps an engine's weights in host memory."""
DROP = 2
"""vLLM's sleep level that drops an engine's weights."""


def moving_average(before: float | None, seconds: float) -> float:
    """Average; `before` is None for the first value."""
    return seconds if before is None else 0.5 * before + 0.5 * seconds


class SleepLevels:
    """Chooses the sleep level of one frozen model: tries each once, then keeps the cheaper."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by level, of a sleep and the wake after it

    def choose(self) -> int:
        """Return KEEP or DROP, for the next sleep."""
        return min((KEEP, DROP), key=lambda level: self.seconds.get(level, -1.0))

    def observe(self, level: int, seconds: float) -> None:
        """Record what a sleep at this level and the wake after it took together."""
        self.seconds[level] = moving_average(self.seconds.get(level), seconds)


_TRUST = 0.2  # weight of a new round in its mode's factor
_FORGET = 0.03  # share of the way back to the first factor, in every round and mode
_MIN_RATIO = 0.6  # measured over forecast is clipped to these: beyond, something else disturbed the round
_MAX_RATIO = 1.5

EXCLUSIVE_FACTORS: Mapping[Mode, float] = {
    "divided": 1.0,
    "held": 1.02,
    "phases": 1.1,
    "together": 1.25,
    "shared": 1.0,
}
"""The first factors where one engine of a slot is awake at a time, from simulated rounds of 1 to 8 slots. The forecast
leaves out that single slots wait for each other or leave early."""

AWAKE_FACTORS: Mapping[Mode, float] = {
    "divided": 1.0,
    "held": 1.1,
    "phases": 1.35,
    "together": 1.3,
    "shared": 1.2,
}
"""The first factors where the engines of all roles stay awake, so that moves cost nothing and batches get shallower. The
mean of 12 loads in simulated rounds of 2 slots as fast as two cores."""


class Calibration:
    """`factors`: by mode, what a round takes over its forecast."""

    def __init__(self, first: Mapping[Mode, float] = EXCLUSIVE_FACTORS) -> None:
        self._first = first
        self.factors = dict(first)

    def observe(self, mode: Mode, *, seconds: float, forecast_s: float) -> None:
        """Add a round: what it took, and the forecast from its own requests."""
        for other, first in self._first.items():
            self.factors[other] += _FORGET * (first - self.factors[other])
        ratio = min(_MAX_RATIO, max(_MIN_RATIO, seconds / forecast_s))
        self.factors[mode] += _TRUST * (ratio - self.factors[mode])


class Learning:
    """`schedule` is how the next round goes, `depth` the requests that a slot should hold of each role."""

    def __init__(self, pool: SlotPool, placement: Placement) -> None:
        self.loads: dict[str, Load] = {}
        self.depth = {role: pool.capacity_of(role) for role in pool.roles}
        self._pool = pool
        self._is_dynamic = placement.kind == "dynamic" and len(pool.roles) > 1
        division = {role: pool.num_slots if role == ROLLOUT else 0 for role in pool.roles}
        mode: Mode = "phases" if placement.kind == "colocated" else "together"
        if len(pool.roles) == 1:
            mode = "held"
        elif placement.kind == "split":
            division = dict(zip(pool.roles, placement.shares, strict=True))
            mode = "held"
        self.schedule = Schedule(division, mode)
        self._was_chosen = False
        self._sums: dict[str, Sums] = {}
        self._calibration = Calibration(EXCLUSIVE_FACTORS if pool.exclusive else AWAKE_FACTORS)

    def learn(self, numbers: Sequence[float], *, swap_s: float, round_s: float) -> None:
        """Add a round: `load.as_numbers` summed over machines, and the mean seconds of a swap and of the round."""
        roles = self._pool.roles
        now = from_numbers(numbers, roles)
        before = self._sums.get(ROLLOUT)
        if before is not None and self.schedule.mode in ("phases", "together"):
            # These modes themselves make verdicts late; that must not make the other modes look worse.
            now[ROLLOUT] = as_late_as(before, now[ROLLOUT])
        self._sums = {role: faded(self._sums.get(role, Sums()), now[role]) for role in roles}
        self._update_loads()
        if not self._is_dynamic or len(self.loads) < len(roles):
            return
        pool = replace(self._pool, swap_s=swap_s)
        round_loads = _loads(now)
        if len(round_loads) == len(roles) and round_s > 0:
            expected_s = schedule_s(round_loads, self.schedule, pool)
            self._calibration.observe(
                self.schedule.mode, seconds=round_s, forecast_s=expected_s
            )
        current = self.schedule if self._was_chosen else None
        self.schedule = next_schedule(current, self.loads, pool, self._calibration.factors)
        self._was_chosen = True
        self._set_depth()

    def _update_loads(self) -> None:
        self.loads = _loads(self._sums)
        self._set_depth()

    def _set_depth(self) -> None:
        if self._is_dynamic:
            moves = self.schedule.mode in ("divided", "together")
            pool = with_depths(self.loads, self._pool, moves=moves)
            self.depth = {role: pool.capacity_of(role) for role in pool.roles}

    def state(self) -> dict[str, Any]:
        return {
            "sums": {role: list(astuple(sums)) for role, sums in self._sums.items()},
            "factors": dict(self._calibration.factors),
            "division": dict(self.schedule.division),
            "mode": self.schedule.mode,
            "chosen": self._was_chosen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. With other roles or another number of slots than then, only the loads are kept."""
        roles = self._pool.roles
        self._sums = {
            role: Sums(*state["sums"][role]) for role in roles if role in state["sums"]
        }
        self._update_loads()
        division: dict[str, int] = state["division"]
        is_same = set(division) == set(roles) and sum(division.values()) == self._pool.num_slots
        if self._is_dynamic and is_same:
            self._calibration.factors.update(state["factors"])
            self.schedule = Schedule({role: division[role] for role in roles}, state["mode"])
            self._was_chosen = state["chosen"]
            self._set_depth()


def _loads(sums: Mapping[str, Sums]) -> dict[str, Load]:
    loads = {role: role_sums.load() for role, role_sums in sums.items()}
    return {role: load for role, load in loads.items() if load is not None}
