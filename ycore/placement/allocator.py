"""The allocator decides which slot serves which request, and when a slot changes its role: events in, actions out.

It has no clock, process or wait. The live run (`placement.service`) and the simulator with its virtual clock
(`docs/benchmarks/simulator`) report the same events to it and carry out the same actions.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ycore.placement.placement import (
    DYNAMIC,
    ROLLOUT,
    Action,
    Placement,
    SlotPool,
    StartRequest,
    Swap,
)


class RoleWork(NamedTuple):
    """A role's work in a round of one machine.

    Attributes:
        num_requests: Requests that have their answer.
        request_s: Seconds of these requests at their engines, added up.
        slot_s: Seconds that slots were busy with them.
    """

    num_requests: float = 0.0
    request_s: float = 0.0
    slot_s: float = 0.0


def usage_metrics(usage: Sequence[float]) -> dict[str, float]:
    """Return a step's metrics from what `Allocator.end_round` gives, added up over machines.

    `ycore/bound_ratio` is slot seconds over busy seconds: 1 is a round in which no slot was ever idle.
    """
    slot_s, busy_s, swap_s, num_swaps = usage
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
        self.num_in_flight = 0
        self.busy_s = dict.fromkeys(roles, 0.0)
        self.swap_s = 0.0
        self.swap_began: float | None = None
        self._since = since

    def advance(self, now: float) -> None:
        """Add the seconds since the last call to the roles at work, which share the slot evenly."""
        passed, self._since = now - self._since, now
        at_work = [role for role, number in self.in_flight.items() if number and passed]
        for role in at_work:
            self.busy_s[role] += passed / len(at_work)


Mode = Literal["held", "phases", "moving", "shared"]
"""How slots change their role within a round.

held: no slot does.
phases: all slots roll out, then all change together.
moving: a slot without work moves to another role where its backlog is worth the swap.
shared: every slot serves all roles at once.
"""

_OWN_SLOT = 0.5
"""Slots' worth of work from which a role has a slot of its own where all engines stay awake."""
_NEAR = 0.75  # slots by which a role's share of the work may differ from its slots
_MEMORY = 0.5  # weight that earlier rounds keep when a new one is added


def moving_average(before: float | None, value: float) -> float:
    """Average; `before` is None for the first value."""
    return value if before is None else _MEMORY * before + (1 - _MEMORY) * value


@dataclass
class Request:
    """A request that has no answer yet; `slot` is None while it waits."""

    role: str
    rank: int
    slot: int | None = None
    began: float = 0.0


class Queue:
    """The waiting requests of one role. Ranks take turns; of a rank's own requests the longest comes first, since the
    one that ends last decides when the round is over, and of equals the one that was asked first."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[tuple[float, int]]] = {}
        """By rank, the rank whose turn it is first: (-length, request), sorted."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, request: int, rank: int, length: float = 0.0) -> None:
        """Add a request. `length`: the expected length of its answer."""
        insort(self._waiting.setdefault(rank, []), (-length, request))

    def take(self) -> int:
        rank = next(iter(self._waiting))
        waiting = self._waiting.pop(rank)
        _, request = waiting.pop(0)
        if waiting:
            self._waiting[rank] = waiting  # behind the other ranks that wait
        return request

    def remove(self, request: int, rank: int) -> None:
        waiting = [entry for entry in self._waiting[rank] if entry[-1] != request]
        if waiting:
            self._waiting[rank] = waiting
        else:
            del self._waiting[rank]


class Allocator:
    """Example: `allocator.ask(7, "judge")`, then carry out `allocator.decide(now)`; `now`: seconds of any clock."""

    def __init__(self, pool: SlotPool, placement: Placement = DYNAMIC) -> None:
        self.pool = pool
        self.mode = mode_of(placement, pool)
        self._is_dynamic = placement.kind == "dynamic" and len(pool.roles) > 1
        self.division = first_division(placement, pool)
        self._work: dict[str, RoleWork] = {}
        """The mean round of one machine so far."""
        self._measured_swap_s: float | None = None
        self.requests: dict[int, Request] = {}
        """The requests without an answer, by their numbers."""
        self._num_unfinished = dict.fromkeys(pool.roles, 0)
        self._waiting = {role: Queue() for role in pool.roles}
        self.begin_round(0.0)

    def begin_round(self, now: float) -> None:
        """Start a round with the learned division; the engines in `awake` must be awake.

        What runs or waits since an earlier round is this round's too.
        """
        roles = self.pool.roles
        self._began = now
        self._num_swaps = 0
        self._num_ended = dict.fromkeys(roles, 0)
        self._request_s = dict.fromkeys(roles, 0.0)
        self.awake = list(Counter(self.division).elements())
        """The role that is awake on each slot; during a swap, the role that is waking."""
        self._clocks = [SlotClock(roles, now) for _ in self.awake]
        for request in self.requests.values():
            if request.slot is not None:
                self._count(request.slot, request.role, 1, now)

    def ask(self, request: int, role: str, rank: int = 0, *, length: float = 0.0) -> None:
        """Add a rank's request, by a number that no other has; a later `StartRequest` of `decide` names the slot.

        `length`: the expected length of its answer, in any unit; 0 where nothing is known.
        """
        self.requests[request] = Request(role, rank)
        self._waiting[role].put(request, rank, length)
        self._num_unfinished[role] += 1

    def withdraw(self, request: int, now: float) -> None:
        """Remove a request that was given up, whether it waits or runs."""
        given_up = self.requests.pop(request)
        self._num_unfinished[given_up.role] -= 1
        if given_up.slot is None:
            self._waiting[given_up.role].remove(request, given_up.rank)
        else:
            self._count(given_up.slot, given_up.role, -1, now)

    def ended(self, request: int, now: float) -> None:
        """Remove a request that has its answer."""
        answered = self.requests.pop(request)
        assert answered.slot is not None, "it was sent to a slot"
        self._count(answered.slot, answered.role, -1, now)
        self._num_unfinished[answered.role] -= 1
        self._num_ended[answered.role] += 1
        self._request_s[answered.role] += now - answered.began

    def swapped(self, slot: int, now: float) -> None:
        """A `Swap` of this slot is done: its new role can serve requests."""
        clock = self._clocks[slot]
        assert clock.swap_began is not None
        seconds = now - clock.swap_began
        clock.swap_s += seconds
        clock.swap_began = None
        self._measured_swap_s = moving_average(self._measured_swap_s, seconds)

    def end_round(self, now: float) -> list[float]:
        """Return the round's slot seconds, busy seconds, swap seconds and swaps, to be added to other machines'.

        A slot with a request in flight is busy.
        """
        for clock in self._clocks:
            clock.advance(now)
        slot_s = (now - self._began) * len(self._clocks)
        busy_s = sum(sum(clock.busy_s.values()) for clock in self._clocks)
        swap_s = sum(clock.swap_s for clock in self._clocks)
        return [slot_s, busy_s, swap_s, float(self._num_swaps)]

    def measurements(self) -> list[float]:
        """Return what was measured in the round, to be added to the measurements of other machines' allocators."""
        measured = []
        for role in self.pool.roles:
            slot_s = sum(clock.busy_s[role] for clock in self._clocks)
            measured += [float(self._num_ended[role]), self._request_s[role], slot_s]
        return [*measured, self.swap_s, 1.0]

    def learn(self, added: Sequence[float]) -> None:
        """Choose the next division from the element-wise sum of all allocators' `measurements`: the same on each."""
        *sums, swap_s, num_machines = added
        self._measured_swap_s = swap_s / num_machines
        for index, role in enumerate(self.pool.roles):
            measured = [value / num_machines for value in sums[3 * index : 3 * index + 3]]
            before = self._work.get(role, measured)
            self._work[role] = RoleWork(*map(moving_average, before, measured))
        work_s = {role: work.request_s for role, work in self._work.items()}
        num_slots = self.pool.num_slots
        if self._is_dynamic and num_slots >= len(work_s) and sum(work_s.values()) > 0:
            self.division = divide(num_slots, work_s, self.division)
            if not self.pool.exclusive:
                least = num_slots * min(work_s.values()) / sum(work_s.values())
                self.mode = "shared" if least < _OWN_SLOT else "held"

    def state(self) -> dict[str, Any]:
        """Return what was learned so far, as plain JSON values, for a checkpoint between rounds."""
        return {
            "work": {role: list(work) for role, work in self._work.items()},
            "division": self.division,
            "mode": self.mode,
            "swap_s": self._measured_swap_s,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave, from the next `begin_round` on; the division only for the same roles and slots."""
        roles = self.pool.roles
        work: dict[str, list[float]] = state["work"]
        self._work = {role: RoleWork(*work[role]) for role in roles if role in work}
        self._measured_swap_s = state["swap_s"]
        division: dict[str, int] = state["division"]
        is_same = set(division) == set(roles) and sum(division.values()) == self.pool.num_slots
        if self._is_dynamic and is_same:
            self.division = {role: division[role] for role in roles}
            self.mode = state["mode"]

    @property
    def gathers(self) -> bool:
        """Whether the verdicts of a group should be requested together, once the whole group is written.

        On a shared slot a judge's step takes nearly as long for one short verdict as for several, and the rollouts wait
        for it; and a group is of use only with its last verdict.
        """
        return self.mode == "shared"

    @property
    def swap_s(self) -> float:
        """Seconds of a swap: measured, or the pool's until then."""
        return self.pool.swap_s if self._measured_swap_s is None else self._measured_swap_s

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs, and no swap is under way."""
        return not (self.requests or self._is_swapping)

    @property
    def _is_swapping(self) -> bool:
        return any(clock.swap_began is not None for clock in self._clocks)

    def waiting(self) -> dict[str, int]:
        return {role: len(requests) for role, requests in self._waiting.items()}

    def in_flight(self) -> dict[tuple[str, int], tuple[int, float]]:
        """By role and slot: the number of running requests, and when the oldest of them began."""
        in_flight: dict[tuple[str, int], tuple[int, float]] = {}
        for request in self.requests.values():
            if request.slot is not None:
                key = (request.role, request.slot)
                number, oldest = in_flight.get(key, (0, request.began))
                in_flight[key] = (number + 1, min(oldest, request.began))
        return in_flight

    def decide(self, now: float) -> list[Action]:
        """Return the actions to carry out now, in order. Call it after every event, or several of the same moment."""
        actions: list[Action] = []
        for role, waiting in self._waiting.items():
            while waiting and (slot := self._pick(role)) is not None:
                request = waiting.take()
                self._count(slot, role, 1, now)
                self.requests[request].slot = slot
                self.requests[request].began = now
                actions.append(StartRequest(request, slot))
        if self.mode == "phases":
            actions += self._next_phase(now)
        elif self.mode == "moving":
            actions += self._move_idle_slots(now)
        return actions

    def _pick(self, role: str) -> int | None:
        """Return the slot with the fewest in flight; None where none has room."""
        loads = [
            (clock.in_flight[role], clock.num_in_flight, slot)
            for slot, clock in enumerate(self._clocks)
            if self.mode == "shared" or (self.awake[slot] == role and clock.swap_began is None)
        ]
        number, _, slot = min(loads, default=(math.inf, 0, 0))
        return slot if number < self._depth(role) else None

    def _depth(self, role: str) -> int:
        """Return how many requests a slot may hold of a role: its share, as slots that still wake will take theirs.

        No other slot can take over what a slot holds. So where slots move, it holds no more than if all served the role.
        """
        capacity = self.pool.capacity_of(role)
        if self.mode == "shared":
            return capacity
        share = self._num_unfinished[role] / max(1, self.awake.count(role))
        if self.mode == "moving" and role != ROLLOUT:
            num_requests = self._num_ended[role] + self._left(role)
            share = min(share, num_requests / self.pool.num_slots)
        return max(1, min(capacity, math.ceil(share)))

    def _left(self, role: str) -> float:
        """Estimate the requests of the round without an answer, with those that running completions will bring."""
        left = float(self._num_unfinished[role])
        rollouts = self._work.get(ROLLOUT)
        if role != ROLLOUT and rollouts is not None and rollouts.num_requests:
            per_rollout = self._work[role].num_requests / rollouts.num_requests
            left += per_rollout * self._num_unfinished[ROLLOUT]
        return left

    def _next_phase(self, now: float) -> list[Action]:
        """Change all slots together, once their role has nothing left anywhere."""
        is_at_work = any(clock.num_in_flight for clock in self._clocks) or self._is_swapping
        if is_at_work or self.is_idle or self._waiting[self.awake[0]]:
            return []
        target = max(self.pool.roles, key=lambda role: len(self._waiting[role]))
        return [self._swap(slot, target, now) for slot in range(self.pool.num_slots)]

    def _move_idle_slots(self, now: float) -> list[Action]:
        """Move slots that have run out of work, one by one, to where the backlog is worth the swap."""
        actions: list[Action] = []
        for slot, role in enumerate(self.awake):
            clock = self._clocks[slot]
            if clock.num_in_flight or clock.swap_began is not None or self._waiting[role]:
                continue
            others = [target for target in self.pool.roles if self._waiting[target]]
            gains = [self._gain_s(role, target) for target in others]
            best_s = max(gains, default=0.0)
            if best_s > 0:
                actions.append(self._swap(slot, others[gains.index(best_s)], now))
        return actions

    def _gain_s(self, source: str, target: str) -> float:
        """Return the seconds by which both roles are done sooner if a slot moves; infinite where `target` has none."""
        num_source = self.awake.count(source)
        num_target = self.awake.count(target)
        if num_target == 0:
            return math.inf
        source_s = self._left_s(source)
        target_s = self._left_s(target)
        if num_source == 1 and source_s > 0:  # it would have to come back
            return -math.inf
        stay_s = max(source_s / num_source, target_s / num_target)
        source_done_s = source_s / (num_source - 1) if source_s else 0.0
        target_done_s = (target_s + 2 * self.swap_s) / (num_target + 1)
        return stay_s - max(source_done_s, target_done_s)

    def _left_s(self, role: str) -> float:
        """Estimate the slot seconds of what a role has left in the round."""
        work = self._work.get(role)
        if work is None or not work.num_requests:
            return 0.0
        return self._left(role) * work.slot_s / work.num_requests

    def _swap(self, slot: int, target: str, now: float) -> Swap:
        role = self.awake[slot]
        self.awake[slot] = target
        self._clocks[slot].swap_began = now
        self._num_swaps += 1
        return Swap(slot, role, target)

    def _count(self, slot: int, role: str, change: int, now: float) -> None:
        """Count a request more or less on a slot."""
        clock = self._clocks[slot]
        clock.advance(now)
        clock.in_flight[role] += change
        clock.num_in_flight += change


def divide(num_slots: int, work: Mapping[str, float], now: Mapping[str, int]) -> dict[str, int]:
    """Divide slots in proportion to work, at least one for each role; keep the present division where that is near."""
    total = sum(work.values())
    exact = {role: num_slots * amount / total for role, amount in work.items()}
    if all(abs(max(1.0, exact[role]) - now[role]) < _NEAR for role in work):
        return dict(now)
    division = {role: max(1, round(share)) for role, share in exact.items()}
    while (missing := num_slots - sum(division.values())) != 0:
        change = 1 if missing > 0 else -1
        candidates = [role for role in division if division[role] + change > 0]
        role = max(candidates, key=lambda role: change * (exact[role] - division[role]))
        division[role] += change
    return division


def mode_of(placement: Placement, pool: SlotPool) -> Mode:
    """Return how slots change their role within a round."""
    if placement.kind == "split" or len(pool.roles) == 1:
        return "held"
    if placement.kind == "colocated":
        return "phases"
    return "moving" if pool.exclusive else "shared"


def first_division(placement: Placement, pool: SlotPool) -> dict[str, int]:
    """Return the slots of each role in the first round: a split's, even shares, or all for rollouts."""
    num_roles = len(pool.roles)
    if num_roles > 1 and placement.kind == "split":
        return dict(zip(pool.roles, placement.shares, strict=True))
    if placement.kind == "colocated" or pool.num_slots < num_roles:
        return dict.fromkeys(pool.roles, 0) | {ROLLOUT: pool.num_slots}
    division = dict.fromkeys(pool.roles, pool.num_slots // num_roles)
    division[ROLLOUT] += pool.num_slots % num_roles
    return division
