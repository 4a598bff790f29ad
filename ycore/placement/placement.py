"""The user's words for a placement: `colocated`, `split:3:1`, `dynamic`; refused in one line where they cannot be had.

Placement: which role is awake on each slot, as a frozen value.

How a round is to go: the division it starts with, and the mode in which slots change their role afterwards.

What there is to allocate, and what the allocator answers: the pool of slots, and the two things to do in it.

Not here: what follows from them (`allocator`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ycore.errors import ConfigError, nearest

ROLLOUT, JUDGE, REWARD_MODEL = "rollout", "judge", "reward_model"

ROLES = (ROLLOUT, JUDGE, REWARD_MODEL)
"""In the order in which a split names its shares."""

Division = Mapping[str, int]
"""How many slots each role has; which ones does not matter, since slots are alike."""


Kind = Literal["colocated", "split", "dynamic"]
_KINDS: tuple[Kind, ...] = ("colocated", "split", "dynamic")
_RULE = "placement must be colocated, dynamic, or split with slots for each role, e.g. split:3:1"


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement as it was asked for; `shares` are a split's slots for each role, in the order of the roles."""

    kind: Kind
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *map(str, self.shares)])


DYNAMIC = Placement("dynamic")


def parse_placement(text: str) -> Placement:
    """Example: `parse_placement("split:3:1") == Placement("split", (3, 1))`. ConfigError on anything else."""
    name, *shares = text.split(":")
    kind = next((kind for kind in _KINDS if kind == name), None)
    if kind is None:
        raise ConfigError(f"{_RULE}; it is {text!r}{nearest(name, _KINDS, limit=1)}")
    if (kind == "split") != bool(shares):
        raise ConfigError(f"{_RULE}; it is {text!r}")
    if not all(share.isascii() and share.isdigit() and int(share) > 0 for share in shares):
        raise ConfigError(f"{_RULE}, each share a whole number of 1 or more; it is {text!r}")
    return Placement(kind, tuple(map(int, shares)))


def check_placement(placement: Placement, *, roles: Sequence[str], num_slots: int) -> None:
    """Whether these roles can be placed so on so many slots; ConfigError with a placement that can."""
    if placement.kind != "split":
        return
    here = f"this run has {len(roles)} ({', '.join(roles)})"
    if len(placement.shares) != len(roles):
        raise ConfigError(
            f"placement {placement} names {len(placement.shares)} roles, and {here}{_way(roles, num_slots)}"
        )
    if sum(placement.shares) != num_slots:
        slots = "1 slot" if num_slots == 1 else f"{num_slots} slots"
        raise ConfigError(
            f"placement {placement} divides {sum(placement.shares)} slots, and here are {slots}"
            + _way(roles, num_slots)
        )


def _way(roles: Sequence[str], num_slots: int) -> str:
    if len(roles) == 1:
        return "; leave --placement out"
    if num_slots < len(roles):
        return "; take --placement dynamic or colocated, where roles share a slot"
    first = num_slots - len(roles) + 1
    return f"; e.g. --placement split:{':'.join(map(str, [first, *[1] * (len(roles) - 1)]))}"


def split_division(placement: Placement, roles: Sequence[str]) -> Division:
    """A checked split as slots by role."""
    return dict(zip(roles, placement.shares, strict=True))


def in_order(roles: Sequence[str]) -> tuple[str, ...]:
    """Roles in the order in which a split names them."""
    return tuple(sorted(set(roles), key=ROLES.index))


Mode = Literal["divided", "held", "phases", "together", "shared"]
"""
divided: roles have slots of their own from the start, and single slots move when they run dry and it pays.
held: the same without moves, as a split.
phases: all roll out, then all change together; deep batches, no overlap.
together: all roll out, and single slots leave as they run dry.
shared: every slot does every role's work at once, as it comes; only where the engines of all roles stay up.
"""

MODES: tuple[Mode, ...] = ("divided", "held", "phases", "together", "shared")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Example: `Schedule({"rollout": 3, "judge": 1}, "divided")`."""

    division: Division
    mode: Mode


Factors = Mapping[Mode, float]
"""By mode: what a round takes, over its forecast."""


UNLIMITED = 10**9


@dataclass(frozen=True, slots=True)
class SlotPool:
    """What there is to allocate: slots, roles (the rollout first), and what one slot may hold of each.

    `exclusive`: one engine of a slot is awake at a time, and is emptied before it sleeps. Else the engines of all
    roles stay up, a change is only one of who gets requests, and running ones are kept.
    """

    num_slots: int
    roles: tuple[str, ...] = (ROLLOUT,)
    capacity: Mapping[str, int] | None = None
    exclusive: bool = False
    swap_s: float = 0.0
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
