"""What one controller's placement knows from earlier rounds, and the plan that follows from it for the next one.

All that is learned comes from sums over all controllers, so that each comes to the same. It is part of a checkpoint:
a run that goes on divides its slots as it would have.

Not here: what happens within a round (`allocator`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from ycore.placement.division import next_plan
from ycore.placement.experience import ALL_UP, ONE_AWAKE, Experience
from ycore.placement.forecast import Setting, forecast_s
from ycore.placement.load import Load, Sums, as_late_as, faded, from_numbers
from ycore.placement.placement import ROLLOUT
from ycore.placement.plan import Manner, Plan
from ycore.placement.words import Wanted, split_division


class Learning:
    """`capacity`: what one slot may hold of each role. `plan` is what the next round starts with."""

    def __init__(self, num_slots: int, capacity: Mapping[str, int], wanted: Wanted, *, exclusive: bool = True) -> None:
        self.loads: dict[str, Load] = {}
        self.depth = dict(capacity)
        """Requests that a slot should hold of each role."""

        self._num_slots = num_slots
        self._capacity = capacity
        self._exclusive = exclusive
        self._roles = tuple(capacity)
        self._plans = wanted.kind == "dynamic"
        everywhere = {role: num_slots if role == ROLLOUT else 0 for role in self._roles}
        manner: Manner = "phases" if wanted.kind == "colocated" else "together"
        self.plan = Plan(everywhere, manner)
        if wanted.kind == "split":
            self.plan = Plan(split_division(wanted, self._roles), "held")
        self._chosen = False
        self._sums: dict[str, Sums] = {}
        self._experience = Experience(ONE_AWAKE if exclusive else ALL_UP)

    def learn(self, numbers: Sequence[float], *, swap_s: float, round_s: float) -> None:
        """All controllers' sums of a round (`load.as_numbers`), and the means of their swap's and round's seconds."""
        now = from_numbers(numbers, self._roles)
        before = self._sums.get(ROLLOUT)
        if before is not None and self.plan.manner in ("phases", "together"):
            # There verdicts come late by the manner itself; that must not make the other manners look worse.
            now[ROLLOUT] = as_late_as(before, now[ROLLOUT])
        self._sums = {role: faded(self._sums.get(role, Sums()), now[role]) for role in self._roles}
        self._follow()
        if not self._plans or len(self.loads) < len(self._roles):
            return
        setting = Setting(self._num_slots, self.depth, swap_s, self._exclusive)
        self._look_back(now, setting, round_s)
        self.plan = next_plan(self.plan if self._chosen else None, self.loads, setting, self._experience.factors)
        self._chosen = True

    def _follow(self) -> None:
        self.loads = {role: load for role, sums in self._sums.items() if (load := sums.load()) is not None}
        for role, load in self.loads.items() if self._plans else ():
            self.depth[role] = load.depth(self._num_slots, self._capacity[role])

    def _look_back(self, now: Mapping[str, Sums], setting: Setting, round_s: float) -> None:
        """What the round took, against the forecast that its own requests give."""
        own = {role: load for role, sums in now.items() if (load := sums.load()) is not None}
        if len(own) == len(self._roles) and round_s > 0:
            told_s = forecast_s(own, self.plan.division, setting, shared=self.plan.manner == "shared")
            self._experience.observe(self.plan.manner, seconds=round_s, forecast_s=told_s)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "sums": {role: list(astuple(sums)) for role, sums in self._sums.items()},
            "experience": self._experience.state(),
            "division": dict(self.plan.division),
            "manner": self.plan.manner,
            "chosen": self._chosen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` told. With other roles or another number of slots than then, only the requests' sums hold."""
        self._sums = {role: Sums(*state["sums"][role]) for role in self._roles if role in state["sums"]}
        self._follow()
        division = {role: state["division"].get(role, 0) for role in self._roles}
        if self._plans and set(state["division"]) == set(self._roles) and sum(division.values()) == self._num_slots:
            self._experience.restore(state["experience"])
            self.plan, self._chosen = Plan(division, state["manner"]), state["chosen"]
