"""How a round used the slots: busy seconds, and the work that each role's requests were."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleWork:
    """A role's work in a round of one machine.

    Attributes:
        num_requests: Requests that have their answer.
        request_s: Seconds of these requests at their engines, added up.
        slot_s: Seconds that slots were busy with them.
    """

    num_requests: float = 0.0
    request_s: float = 0.0
    slot_s: float = 0.0

    @property
    def slot_s_each(self) -> float:
        """Slot seconds of one request."""
        return self.slot_s / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """How a round used its slots. `busy_s` and `swap_s`: one value a slot; a slot with a request in flight is busy."""

    seconds: float
    busy_s: Sequence[float]
    swap_s: Sequence[float]
    swaps: int

    def sums(self) -> list[float]:
        """Return slot seconds, busy seconds, swap seconds and the number of swaps, to be added to other machines'."""
        slot_s = self.seconds * len(self.busy_s)
        return [slot_s, sum(self.busy_s), sum(self.swap_s), float(self.swaps)]


def usage_metrics(sums: Sequence[float]) -> dict[str, float]:
    """Return a step's metrics from `Usage.sums`, added up over machines.

    `ycore/bound_ratio` is slot seconds over busy seconds: 1 is a round in which no slot was ever idle.
    """
    slot_s, busy_s, swap_s, num_swaps = sums
    return {
        "ycore/idle_share": max(0.0, 1 - (busy_s + swap_s) / slot_s) if slot_s > 0 else 0.0,
        "ycore/bound_ratio": slot_s / busy_s if busy_s > 0 else 1.0,
        "ycore/swaps": num_swaps,
        "ycore/swap_s": swap_s,
    }


class SlotClock:
    """The requests in flight on one slot, and its seconds since the round began."""

    def __init__(self, roles: Sequence[str], since: float) -> None:
        self.in_flight = dict.fromkeys(roles, 0)
        self.busy_s = dict.fromkeys(roles, 0.0)
        self.swap_s = 0.0
        self.swap_began: float | None = None
        self._since = since

    @property
    def num_in_flight(self) -> int:
        return sum(self.in_flight.values())

    def advance(self, now: float) -> None:
        """Add the seconds since the last call to the roles at work, which share the slot evenly."""
        at_work = [role for role, number in self.in_flight.items() if number]
        for role in at_work:
            self.busy_s[role] += (now - self._since) / len(at_work)
        self._since = now
