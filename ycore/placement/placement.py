"""Placement: which role is awake on each slot, as a frozen value.

Not here: when it changes (`moves` within a step, `division` between steps).
"""

from collections.abc import Mapping
from dataclasses import dataclass

ROLLOUT, JUDGE, REWARD_MODEL = "rollout", "judge", "reward_model"

ROLES = (ROLLOUT, JUDGE, REWARD_MODEL)
"""In the order in which a split names its shares."""

Division = Mapping[str, int]
"""How many slots each role has; which ones does not matter, since slots are alike."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Example: `Placement(("rollout", "rollout", "judge"))`: slots 0 and 1 roll out, slot 2 judges."""

    awake: tuple[str, ...]

    @property
    def num_slots(self) -> int:
        return len(self.awake)

    def count(self, role: str) -> int:
        return self.awake.count(role)


def placement_of(division: Division) -> Placement:
    """The first slots for the first role, and so on."""
    return Placement(tuple(role for role, count in division.items() for _ in range(count)))
