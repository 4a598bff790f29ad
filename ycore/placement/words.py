"""The user's words for a placement: `colocated`, `split:3:1`, `dynamic`; refused in one line where they cannot be had.

Not here: what follows from them (`allocator`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ycore.errors import ConfigError, nearest
from ycore.placement.placement import ROLES, Division

Kind = Literal["colocated", "split", "dynamic"]
_KINDS: tuple[Kind, ...] = ("colocated", "split", "dynamic")
_RULE = "placement must be colocated, dynamic, or split with slots for each role, e.g. split:3:1"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A placement as it was asked for; `shares` are a split's slots for each role, in the order of the roles."""

    kind: Kind
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *map(str, self.shares)])


DYNAMIC = Wanted("dynamic")


def parse_placement(text: str) -> Wanted:
    """Example: `parse_placement("split:3:1") == Wanted("split", (3, 1))`. ConfigError on anything else."""
    name, *shares = text.split(":")
    kind = next((kind for kind in _KINDS if kind == name), None)
    if kind is None:
        raise ConfigError(f"{_RULE}; it is {text!r}{nearest(name, _KINDS, limit=1)}")
    if (kind == "split") != bool(shares):
        raise ConfigError(f"{_RULE}; it is {text!r}")
    if not all(share.isascii() and share.isdigit() and int(share) > 0 for share in shares):
        raise ConfigError(f"{_RULE}, each share a whole number of 1 or more; it is {text!r}")
    return Wanted(kind, tuple(map(int, shares)))


def check_placement(wanted: Wanted, *, roles: Sequence[str], num_slots: int) -> None:
    """Whether these roles can be placed so on so many slots; ConfigError with a placement that can."""
    if wanted.kind != "split":
        return
    here = f"this run has {len(roles)} ({', '.join(roles)})"
    if len(wanted.shares) != len(roles):
        raise ConfigError(f"placement {wanted} names {len(wanted.shares)} roles, and {here}{_way(roles, num_slots)}")
    if sum(wanted.shares) != num_slots:
        slots = "1 slot" if num_slots == 1 else f"{num_slots} slots"
        raise ConfigError(
            f"placement {wanted} divides {sum(wanted.shares)} slots, and here are {slots}" + _way(roles, num_slots)
        )


def _way(roles: Sequence[str], num_slots: int) -> str:
    if len(roles) == 1:
        return "; leave --placement out"
    if num_slots < len(roles):
        return "; take --placement dynamic or colocated, where roles share a slot"
    first = num_slots - len(roles) + 1
    return f"; e.g. --placement split:{':'.join(map(str, [first, *[1] * (len(roles) - 1)]))}"


def split_division(wanted: Wanted, roles: Sequence[str]) -> Division:
    """A checked split as slots by role."""
    return dict(zip(roles, wanted.shares, strict=True))


def in_order(roles: Sequence[str]) -> tuple[str, ...]:
    """Roles in the order in which a split names them."""
    return tuple(sorted(set(roles), key=ROLES.index))
