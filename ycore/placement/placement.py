"""The types of placement: roles, slots, what `--placement` asks for, and what the allocator decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ycore.errors import ConfigError, nearest

ROLLOUT, JUDGE, REWARD_MODEL, TEACHER = "rollout", "judge", "reward_model", "teacher"

ALLOCATOR = "allocator"
"""The name of the allocator's process, log and socket, on a machine with several ranks."""

ROLES = (
    ROLLOUT,
    JUDGE,
    REWARD_MODEL,
    TEACHER,
)  # in the order in which a split gives their slots
Kind = Literal["colocated", "split", "dynamic"]
_RULE = (
    "placement must be colocated, dynamic, or split with slots for each role, e.g. split:3:1"
)


@dataclass(frozen=True)
class Placement:
    """The value of `--placement`. `shares`: a split's slots per role, in the order of ROLES."""

    kind: Kind
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *map(str, self.shares)])


DYNAMIC = Placement("dynamic")


def parse_placement(text: str) -> Placement:
    """E.g. `parse_placement("split:3:1") == Placement("split", (3, 1))`; ConfigError where `text` is no placement."""
    name, *shares = text.split(":")
    kind = next((kind for kind in get_args(Kind) if kind == name), None)
    if kind is None:
        raise ConfigError(f"{_RULE}; it is {text!r}{nearest(name, get_args(Kind), limit=1)}")
    if (kind == "split") != bool(shares):
        raise ConfigError(f"{_RULE}; it is {text!r}")
    if not all(share.isascii() and share.isdigit() and int(share) > 0 for share in shares):
        raise ConfigError(f"{_RULE}, each share a whole number of 1 or more; it is {text!r}")
    return Placement(kind, tuple(map(int, shares)))


def check_placement(placement: Placement, *, roles: Sequence[str], num_slots: int) -> None:
    """ConfigError, with a way out, where a split does not match the run's roles and a controller's slots."""
    num_roles = len(roles)
    shares = placement.shares
    if placement.kind != "split" or (len(shares) == num_roles and sum(shares) == num_slots):
        return
    if num_roles == 1:
        way_out = "leave --placement out"
    elif num_slots < num_roles:
        way_out = "take --placement dynamic or colocated, where roles share a slot"
    else:
        fitting = [1] * num_roles
        if len(shares) == num_roles:
            fitting = [min(share, num_slots) for share in shares]
        while sum(fitting) > num_slots:
            fitting[fitting.index(max(fitting))] -= 1
        fitting[0] += num_slots - sum(fitting)
        way_out = f"the nearest that works is --placement split:{':'.join(map(str, fitting))}"
    rule = f"must divide this run's slots ({num_slots}) among its roles ({', '.join(roles)})"
    raise ConfigError(f"placement {placement} {rule}; {way_out}")


def in_order(roles: Sequence[str]) -> tuple[str, ...]:
    """Return the roles without repeats, in the order of ROLES."""
    return tuple(sorted(set(roles), key=ROLES.index))


@dataclass(frozen=True)
class SlotPool:
    """A machine's slots.

    `exclusive`: one engine of a slot is awake at a time, and finishes its requests before it sleeps. Otherwise the
    engines of all roles stay awake, a swap only redirects new requests, and running ones continue.
    """

    num_slots: int
    roles: tuple[str, ...] = (ROLLOUT,)  # the rollout first
    capacity: Mapping[str, int] | None = None
    """Requests that a slot may hold of each role; None is no limit."""
    exclusive: bool = False
    swap_s: float = 0.0
    """One engine falls asleep, another wakes; the allocator replaces it by what it measures."""

    def capacity_of(self, role: str) -> int:
        return 10**9 if self.capacity is None else self.capacity[role]


class StartRequest(NamedTuple):
    """Send this request to the slot's engine now."""

    request: int
    slot: int


class Swap(NamedTuple):
    """Put the slot's `asleep` role to sleep, wake its `awake` role, then call `Allocator.swapped`."""

    slot: int
    asleep: str
    awake: str


Action = StartRequest | Swap
