"""What a controller learned from earlier rounds: each role's load, how well forecasts held, and the next schedule.

Everything learned comes from sums over all controllers, so that all of them learn the same. It is part of a checkpoint:
a resumed run divides its slots as it would have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from ycore.placement.load import Load, Sums, as_late_as, faded, from_numbers
from ycore.placement.moves import next_schedule, schedule_s, with_depths
from ycore.placement.placement import MODES, ROLLOUT, Mode, Placement, Schedule, SlotPool

KEEP, DROP = 1, 2  # vLLM's sleep levels: 1 keeps an engine's weights in host memory, 2 drops them


def moving_average(before: float | None, seconds: float) -> float:
    """`before` is None for the first value."""
    return seconds if before is None else 0.5 * before + 0.5 * seconds


class SleepLevels:
    """Chooses the sleep level of one frozen model: tries each once, then keeps the cheaper."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}  # by level, of a sleep and the wake after it

    def choose(self) -> int:
        """KEEP or DROP, for the next sleep."""
        return min((KEEP, DROP), key=lambda level: self.seconds.get(level, -1.0))

    def observe(self, level: int, seconds: float) -> None:
        """Record what a sleep at this level and the wake after it took together."""
        self.seconds[level] = moving_average(self.seconds.get(level), seconds)


_CALIBRATION_MEMORY = (
    0.97  # weight that a round keeps when the next one comes, of any mode: about the last 33 count
)
_LEAST, _MOST = (
    0.6,
    1.5,
)  # measured over forecast is clipped to this: beyond it, something else disturbed the round


@dataclass(frozen=True, slots=True)
class Prior:
    """Measured over forecast, by mode, before anything is measured; it counts for `weight` rounds."""

    factors: Mapping[Mode, float]
    weight: float


ONE_AWAKE = Prior(
    {"divided": 1.0, "held": 1.02, "phases": 1.1, "together": 1.25, "shared": 1.0}, weight=5.0
)
"""Where one engine of a slot is awake at a time, from simulated rounds of 1 to 8 slots. The forecast leaves out that
single slots wait for each other or leave early."""

ALL_AWAKE = Prior(
    {"divided": 1.0, "held": 1.1, "phases": 1.35, "together": 1.3, "shared": 1.2}, weight=2.0
)
"""Where the engines of all roles stay awake, so that moves cost nothing and batches get shallower. The mean of 12 loads
in simulated rounds of 2 slots as fast as two cores."""


@dataclass(slots=True)
class Calibration:
    """`measured`: by mode, how many rounds count, and their sum of measured over forecast."""

    prior: Prior = ONE_AWAKE
    measured: dict[Mode, tuple[float, float]] = field(
        default_factory=lambda: dict.fromkeys(MODES, (0.0, 0.0))
    )

    def observe(self, mode: Mode, *, seconds: float, forecast_s: float) -> None:
        """Add a round: what it took, and the forecast from its own requests."""
        for each, (rounds, ratios) in self.measured.items():
            self.measured[each] = rounds * _CALIBRATION_MEMORY, ratios * _CALIBRATION_MEMORY
        rounds, ratios = self.measured[mode]
        self.measured[mode] = rounds + 1.0, ratios + min(_MOST, max(_LEAST, seconds / forecast_s))

    @property
    def factors(self) -> Mapping[Mode, float]:
        """By mode, what a round takes over its forecast."""
        first, weight = self.prior.factors, self.prior.weight
        return {
            mode: (weight * first[mode] + ratios) / (weight + rounds)
            for mode, (rounds, ratios) in self.measured.items()
        }

    def state(self) -> dict[str, list[float]]:
        return {mode: list(measured) for mode, measured in self.measured.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Take what `state` gave; a mode that it lacks (an older checkpoint) starts at the prior."""
        for mode in MODES:
            rounds, ratios = state.get(mode, (0.0, 0.0))
            self.measured[mode] = rounds, ratios


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
            division, mode = dict(zip(pool.roles, placement.shares, strict=True)), "held"
        self.schedule = Schedule(division, mode)
        self._was_chosen = False
        self._sums: dict[str, Sums] = {}
        self._calibration = Calibration(ONE_AWAKE if pool.exclusive else ALL_AWAKE)

    def learn(self, numbers: Sequence[float], *, swap_s: float, round_s: float) -> None:
        """Add a round: all controllers' `load.as_numbers` summed, and the mean seconds of a swap and of the round."""
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
        own = _loads(now)
        if len(own) == len(roles) and round_s > 0:
            expected_s = schedule_s(own, self.schedule, pool)
            self._calibration.observe(self.schedule.mode, seconds=round_s, forecast_s=expected_s)
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
            self.depth = {
                role: with_depths(self.loads, self._pool, moves=moves).capacity_of(role)
                for role in self.depth
            }

    def state(self) -> dict[str, Any]:
        return {
            "sums": {role: list(astuple(sums)) for role, sums in self._sums.items()},
            "experience": self._calibration.state(),
            "division": dict(self.schedule.division),
            "manner": self.schedule.mode,
            "chosen": self._was_chosen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave. With other roles or another number of slots than then, only the loads are kept."""
        roles = self._pool.roles
        self._sums = {role: Sums(*state["sums"][role]) for role in roles if role in state["sums"]}
        self._update_loads()
        division = {role: state["division"].get(role, 0) for role in roles}
        is_same = (
            set(state["division"]) == set(roles) and sum(division.values()) == self._pool.num_slots
        )
        if self._is_dynamic and is_same:
            self._calibration.restore(state["experience"])
            self.schedule, self._was_chosen = Schedule(division, state["manner"]), state["chosen"]
            self._set_depth()


def _loads(sums: Mapping[str, Sums]) -> dict[str, Load]:
    return {
        role: load for role, role_sums in sums.items() if (load := role_sums.load()) is not None
    }
