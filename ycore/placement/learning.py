"""What one controller's placement knows from earlier rounds, and the plan that follows from it for the next one.

All that is learned comes from sums over all controllers, so that each comes to the same. It is part of a checkpoint:
a run that goes on divides its slots as it would have.

How deep an engine sleeps: level 1 keeps its weights in host memory, level 2 drops them.

What rounds took over what was forecast for them, by mode: a forecast is believed as far as it held.

Not here: what happens within a round (`allocator`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from ycore.placement.forecast import Setting, forecast_s
from ycore.placement.load import Load, Sums, as_late_as, faded, from_numbers
from ycore.placement.moves import next_schedule
from ycore.placement.placement import MODES, ROLLOUT, Factors, Mode, Placement, Schedule, split_division

_SECONDS_MEMORY = 0.5
KEEP, DROP = 1, 2


@dataclass(slots=True)
class MovingAverage:
    """Of seconds; None before the first."""

    value: float | None = None

    def observe(self, seconds: float) -> None:
        self.value = seconds if self.value is None else _SECONDS_MEMORY * self.value + (1 - _SECONDS_MEMORY) * seconds


@dataclass(slots=True)
class SleepLevels:
    """Chooses the level of one frozen model: each is tried once, then the cheaper is kept."""

    seconds: Mapping[int, MovingAverage] = field(default_factory=lambda: {KEEP: MovingAverage(), DROP: MovingAverage()})

    def choose(self) -> int:
        for level, average in self.seconds.items():
            if average.value is None:
                return level
        return min(self.seconds, key=lambda level: (self.seconds[level].value or 0.0, level))

    def observe(self, level: int, seconds: float) -> None:
        """A sleep at this level and the wake after it took so long together."""
        self.seconds[level].observe(seconds)


FORECAST_MEMORY = 0.97
"""Weight that a round keeps when the next one comes, of whichever mode: about the last 33 count."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Factors until there are measured ones, and the rounds that they count for."""

    factors: Factors
    weight: float


ONE_AWAKE = Assumed({"divided": 1.0, "held": 1.02, "phases": 1.1, "together": 1.25, "shared": 1.0}, weight=5.0)
"""Where one engine of a slot is awake at a time. The forecast knows nothing of single slots that wait for each other or
leave early. From simulated rounds of 1 to 8 slots."""

ALL_UP = Assumed({"divided": 1.0, "held": 1.1, "phases": 1.35, "together": 1.3, "shared": 1.2}, weight=2.0)
"""Where the engines of all roles stay up: there, slots move for nothing, which batches pay for. What each mode took
over its forecast on the mean of 12 loads, in simulated rounds of 2 slots that are as fast as two cores."""

_LEAST, _MOST = 0.6, 1.5
"""A round outside of these was disturbed by something else."""


@dataclass(slots=True)
class Experience:
    """By mode, how many rounds count and the sum of their ratios."""

    assumed: Assumed = ONE_AWAKE
    weights: dict[Mode, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))
    sums: dict[Mode, float] = field(default_factory=lambda: dict.fromkeys(MODES, 0.0))

    def observe(self, mode: Mode, *, seconds: float, forecast_s: float) -> None:
        """A round of this mode took so long, and this is its forecast from its own requests."""
        for one in MODES:
            self.weights[one] *= FORECAST_MEMORY
            self.sums[one] *= FORECAST_MEMORY
        self.weights[mode] += 1.0
        self.sums[mode] += min(_MOST, max(_LEAST, seconds / forecast_s))

    @property
    def factors(self) -> Factors:
        first, weight = self.assumed.factors, self.assumed.weight
        return {one: (weight * first[one] + self.sums[one]) / (weight + self.weights[one]) for one in MODES}

    def state(self) -> dict[str, list[float]]:
        """Plain JSON values."""
        return {one: [self.weights[one], self.sums[one]] for one in MODES}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for one in MODES:
            self.weights[one], self.sums[one] = state.get(one, (0.0, 0.0))


class Learning:
    """`capacity`: what one slot may hold of each role. `plan` is what the next round starts with."""

    def __init__(
        self, num_slots: int, capacity: Mapping[str, int], placement: Placement, *, exclusive: bool = True
    ) -> None:
        self.loads: dict[str, Load] = {}
        self.depth = dict(capacity)
        """Requests that a slot should hold of each role."""

        self._num_slots = num_slots
        self._capacity = capacity
        self._exclusive = exclusive
        self._roles = tuple(capacity)
        self._plans = placement.kind == "dynamic"
        everywhere = {role: num_slots if role == ROLLOUT else 0 for role in self._roles}
        mode: Mode = "phases" if placement.kind == "colocated" else "together"
        self.schedule = Schedule(everywhere, mode)
        if placement.kind == "split":
            self.schedule = Schedule(split_division(placement, self._roles), "held")
        self._chosen = False
        self._sums: dict[str, Sums] = {}
        self._experience = Experience(ONE_AWAKE if exclusive else ALL_UP)

    def learn(self, numbers: Sequence[float], *, swap_s: float, round_s: float) -> None:
        """All controllers' sums of a round (`load.as_numbers`), and the means of their swap's and round's seconds."""
        now = from_numbers(numbers, self._roles)
        before = self._sums.get(ROLLOUT)
        if before is not None and self.schedule.mode in ("phases", "together"):
            # There verdicts come late by the mode itself; that must not make the other modes look worse.
            now[ROLLOUT] = as_late_as(before, now[ROLLOUT])
        self._sums = {role: faded(self._sums.get(role, Sums()), now[role]) for role in self._roles}
        self._follow()
        if not self._plans or len(self.loads) < len(self._roles):
            return
        setting = Setting(self._num_slots, self.depth, swap_s, self._exclusive)
        self._look_back(now, setting, round_s)
        self.schedule = next_schedule(
            self.schedule if self._chosen else None, self.loads, setting, self._experience.factors
        )
        self._chosen = True

    def _follow(self) -> None:
        self.loads = {role: load for role, sums in self._sums.items() if (load := sums.load()) is not None}
        for role, load in self.loads.items() if self._plans else ():
            self.depth[role] = load.depth(self._num_slots, self._capacity[role])

    def _look_back(self, now: Mapping[str, Sums], setting: Setting, round_s: float) -> None:
        """What the round took, against the forecast that its own requests give."""
        own = {role: load for role, sums in now.items() if (load := sums.load()) is not None}
        if len(own) == len(self._roles) and round_s > 0:
            told_s = forecast_s(own, self.schedule.division, setting, shared=self.schedule.mode == "shared")
            self._experience.observe(self.schedule.mode, seconds=round_s, forecast_s=told_s)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "sums": {role: list(astuple(sums)) for role, sums in self._sums.items()},
            "experience": self._experience.state(),
            "division": dict(self.schedule.division),
            "manner": self.schedule.mode,
            "chosen": self._chosen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` told. With other roles or another number of slots than then, only the requests' sums hold."""
        self._sums = {role: Sums(*state["sums"][role]) for role in self._roles if role in state["sums"]}
        self._follow()
        division = {role: state["division"].get(role, 0) for role in self._roles}
        if self._plans and set(state["division"]) == set(self._roles) and sum(division.values()) == self._num_slots:
            self._experience.restore(state["experience"])
            self.schedule, self._chosen = Schedule(division, state["manner"]), state["chosen"]
