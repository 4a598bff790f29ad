"""The types of placement: roles, slots, what `--placement` asks for, and what the allocator decides.

`better_divisions` says when devices should move between training and engines that have some to themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

from ycore.errors import ConfigError, nearest

ROLLOUT, JUDGE, REWARD_MODEL, TEACHER = "rollout", "judge", "reward_model", "teacher"

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
    are_whole = all(share.isascii() and share.isdigit() and int(share) > 0 for share in shares)
    if (kind == "split") != bool(shares) or not are_whole:
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
        others = ":1" * (num_roles - 1)
        way_out = f"take --placement split:{num_slots - num_roles + 1}{others}"
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
    roles: Sequence[str] = (ROLLOUT,)  # the rollout first
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


# -- devices of training and of engines --------------------------------------------------------------------------------

ENGINE_DEVICES = "ycore/engine_devices"
"""The metric that says how many devices, or cores, engines had to themselves in a step."""

_WINDOW = 10  # steps
_LEAST_GAIN = 0.1  # of a step's seconds


def better_divisions(
    rows: Sequence[Mapping[str, Any]],
    engine_devices: int,
    num_devices: int,
    *,
    least_gain_s: float = 0.0,
) -> Iterator[tuple[int, str]]:
    """Yield devices of engines that make a step shorter by a tenth at least, the best first, each with a sentence.

    The work of both sides in the last steps is divided by other numbers of devices, and the longer side is the step. A
    division that the run has left takes at least as long as it took, so that the run does not go back and forth.

    Args:
        rows: the run's metrics so far. The first step after a start does not count, as nothing was written ahead of it,
            nor does one whose round was replayed.
        engine_devices: those of engines now, of `num_devices`.
        least_gain_s: seconds of each step to come that a move must save besides, as it costs as much.
    """
    rows = [row for row in rows if ENGINE_DEVICES in row and "ycore/time/round" in row]
    recent = [*takewhile(lambda row: row[ENGINE_DEVICES] == engine_devices, reversed(rows))]
    recent = recent[:-1][:_WINDOW]
    if len(recent) < _WINDOW:
        return
    step_s = fmean(row["ycore/time/step"] for row in recent)
    train_s = fmean(row["ycore/time/train"] for row in recent)
    engine_s = fmean(row["ycore/time/round"] * (1 - row["ycore/idle_share"]) for row in recent)
    waits_s = step_s - max(train_s, engine_s)
    train_s_devices = train_s * (num_devices - engine_devices)

    def seconds_with(number: int) -> float:
        left = [row["ycore/time/step"] for row in rows if row[ENGINE_DEVICES] == number]
        longer_s = max(
            train_s_devices / (num_devices - number), engine_s * engine_devices / number
        )
        return max(waits_s + longer_s, fmean(left[-_WINDOW:] or [0.0]))

    side = "engines idled" if engine_s < train_s else "training waited"
    reason = f"{side} {1 - min(engine_s, train_s) / step_s:.0%} of the last {_WINDOW} steps"
    most_s = step_s - max(_LEAST_GAIN * step_s, least_gain_s)
    for number in sorted(range(1, num_devices), key=seconds_with):
        if (then_s := seconds_with(number)) <= most_s:
            yield (
                number,
                f"{reason}; engine.devices={number} would take about {then_s:.1f} s a step instead of {step_s:.1f}",
            )
