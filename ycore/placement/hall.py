"""What there is to allocate, and what the allocator answers: the hall of slots, and the two things to do in it.

Not here: who decides (`allocator`), and who carries it out (`controller.dispatch`, `simulate.round`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ycore.placement.placement import ROLLOUT

UNLIMITED = 10**9


@dataclass(frozen=True, slots=True)
class Hall:
    """What there is to allocate: slots, roles (the rollout first), and what one slot may hold of each.

    `exclusive`: one engine of a slot is awake at a time, and is emptied before it sleeps. Else the engines of all
    roles stay up, a change is only one of who gets requests, and running ones are kept.
    """

    num_slots: int
    roles: tuple[str, ...] = (ROLLOUT,)
    capacity: Mapping[str, int] | None = None
    exclusive: bool = False
    first_swap_s: float = 0.0
    """Assumed until one was measured."""

    def capacity_of(self, role: str) -> int:
        return UNLIMITED if self.capacity is None else self.capacity[role]


@dataclass(frozen=True, slots=True)
class Start:
    """Send this request to the slot's engine now."""

    request: int
    slot: int


@dataclass(frozen=True, slots=True)
class Swap:
    """Put one role of the slot to sleep and wake another; then tell `swapped`."""

    slot: int
    asleep: str
    awake: str


Action = Start | Swap
