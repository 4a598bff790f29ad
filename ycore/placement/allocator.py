"""The allocator decides which slot serves which request, and when a slot changes its role: events in, actions out.

It has no clock, process or wait. The live run (`placement.shared_allocator`) and the simulator with its virtual clock
(`docs/benchmarks/simulator`) report the same events to it and carry out the same actions.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from ycore.placement.learning import Learning, moving_average
from ycore.placement.load import UNKNOWN, Load, Reading, SlotClock, Sums, Usage, as_numbers
from ycore.placement.moves import Backlog, best_move
from ycore.placement.placement import (
    DYNAMIC,
    ROLLOUT,
    Action,
    Division,
    Mode,
    Placement,
    SlotPool,
    StartRequest,
    Swap,
)

_SPARE_SHARE = (
    4  # where all engines stay awake, a slot less than a quarter full can serve another role
)


@dataclass(slots=True)
class _RunningRequest:
    role: str
    slot: int
    began: float
    before: Reading
    """The engine's totals when the request began."""


class Queue:
    """The waiting requests of one role. Ranks take turns; of a rank's own requests the longest comes first, since the
    one that ends last decides when the round is over, and of equals the one that was asked first."""

    def __init__(self) -> None:
        self._requests: dict[int, set[int]] = {}
        """By rank, the rank whose turn it is first."""
        self._heaps: dict[int, list[tuple[float, int, int]]] = {}
        """By rank: (-length, order, request), also of requests that were removed."""
        self._length = 0
        self._order = count()

    def __len__(self) -> int:
        return self._length

    def put(self, request: int, rank: int, length: float = 0.0) -> None:
        """Add a request. `length`: the expected length of its answer."""
        self._requests.setdefault(rank, set()).add(request)
        heapq.heappush(self._heaps.setdefault(rank, []), (-length, next(self._order), request))
        self._length += 1

    @property
    def next_rank(self) -> int:
        return next(iter(self._requests))

    def take(self) -> int:
        rank = self.next_rank
        requests = self._requests[rank]
        while (request := heapq.heappop(self._heaps[rank])[2]) not in requests:
            pass
        self.remove(request, rank)
        if requests:  # behind the other ranks that wait
            self._requests[rank] = self._requests.pop(rank)
        return request

    def remove(self, request: int, rank: int) -> None:
        self._requests[rank].remove(request)
        self._length -= 1
        if not self._requests[rank]:
            del self._requests[rank]
            del self._heaps[rank]


class Allocator:
    """Example: `allocator.ask(7, "judge")`, then carry out `allocator.decide(now)`; `now`: seconds of any clock."""

    def __init__(self, pool: SlotPool, placement: Placement = DYNAMIC) -> None:
        self.pool = pool
        self._learned = Learning(pool, placement)
        self._measured_swap_s: float | None = None
        self._running: dict[int, _RunningRequest] = {}
        self._waiting = {role: Queue() for role in pool.roles}
        self.begin_round(0.0)

    def begin_round(self, now: float) -> None:
        """Start a round with the learned schedule's division; the engines in `awake` must be awake."""
        assert not self._running, "a round begins when the last has ended"
        roles = self.pool.roles
        self._began = now
        self._seconds = 0.0
        self._swaps = 0
        self._has_verdict = False
        self._ended_since_ask = False
        self._requested = dict.fromkeys(roles, 0)
        self._sums: dict[str, Sums] = {role: Sums(rounds=1.0) for role in roles}
        self._awake = [role for role, count in self.division.items() for _ in range(count)]
        speeds = {
            role: self.loads[role].speed if role in self.loads else UNKNOWN for role in roles
        }
        self._clocks = [SlotClock(speeds, now) for _ in self._awake]
        self._free: dict[str, list[tuple[int, int]]] = {role: [] for role in roles}
        """Heaps of (in flight, slot), also with old entries."""
        self._spare: dict[str, set[int]] = {role: set() for role in roles}
        self._waking = dict.fromkeys(roles, 0)
        self._num_slots = {role: self._awake.count(role) for role in roles}
        for slot in range(self.pool.num_slots):
            self._note(slot)

    def ask(self, request: int, role: str, rank: int = 0, *, length: float = 0.0) -> None:
        """Add a rank's request, by a number that no other has; a later `StartRequest` of `decide` names the slot.

        `length`: the expected length of its answer, in any unit; 0 where nothing is known.
        """
        self._waiting[role].put(request, rank, length)
        self._requested[role] += 1
        if role == ROLLOUT and self._has_verdict:
            scorers = self.pool.roles[1:]
            verdicts = sum(self._sums[scorer].num for scorer in scorers) / len(scorers)
            share = verdicts / self._requested[ROLLOUT]
            self._sums[ROLLOUT].observe_late(share, is_first=self._ended_since_ask)
            self._ended_since_ask = False

    def withdraw(self, request: int, role: str, now: float, rank: int = 0) -> None:
        """Remove a request that was given up, whether it waits or runs."""
        running = self._running.pop(request, None)
        if running is None:
            self._waiting[role].remove(request, rank)
        else:
            self._leave(running, now)

    def ended(self, request: int, now: float, *, size: float = 1.0) -> None:
        """Remove a request that has its answer. `size`: tokens of the answer; 1 where they are not counted."""
        running = self._running.pop(request)
        seconds, depth, served = self._leave(running, now).since(running.before)
        self._has_verdict |= running.role != ROLLOUT
        self._ended_since_ask = True
        if seconds > 0:
            self._sums[running.role].observe(
                seconds=seconds, depth=depth, size=max(size, 1.0), served=served
            )

    def swapped(self, slot: int, now: float) -> None:
        """A `Swap` of this slot is done: its new role can serve requests."""
        clock = self._clocks[slot]
        assert clock.swap_began is not None
        seconds = now - clock.swap_began
        clock.swap_s += seconds
        clock.swap_began = None
        self._waking[self._awake[slot]] -= 1
        self._measured_swap_s = moving_average(self._measured_swap_s, seconds)
        self._note(slot)

    def end_round(self, now: float) -> Usage:
        """Return how the slots were used since the round began."""
        for clock in self._clocks:
            clock.advance(now)
        self._seconds = now - self._began
        busy_s = [clock.busy_s for clock in self._clocks]
        swap_s = [clock.swap_s for clock in self._clocks]
        return Usage(self._seconds, busy_s, swap_s, self._swaps)

    def measurements(self) -> list[float]:
        """Return what was measured in the round, to be added to the measurements of other machines' allocators."""
        return [*as_numbers(self._sums, self.pool.roles), self.swap_s, self._seconds, 1.0]

    def learn(self, added: Sequence[float]) -> None:
        """Choose the next schedule from the element-wise sum of all allocators' `measurements`: the same on each."""
        *numbers, swap_s, seconds, machines = added
        self._learned.learn(numbers, swap_s=swap_s / machines, round_s=seconds / machines)

    def state(self) -> dict[str, Any]:
        """Return what was learned so far, as plain JSON values, for a checkpoint between rounds."""
        return {**self._learned.state(), "swap_s": self._measured_swap_s}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; it counts from the next `begin_round` on."""
        self._learned.restore(state)
        self._measured_swap_s = state["swap_s"]

    @property
    def awake(self) -> tuple[str, ...]:
        """The role that is awake on each slot; during a swap, the role that is waking."""
        return tuple(self._awake)

    @property
    def division(self) -> Division:
        return self._learned.schedule.division

    @property
    def mode(self) -> Mode:
        return self._learned.schedule.mode

    @property
    def gathers(self) -> bool:
        """Whether the verdicts of a group should be requested together, once the whole group is written.

        On a shared slot a judge's step takes nearly as long for one short verdict as for several, and the rollouts wait
        for it; and a group is of use only with its last verdict.
        """
        return self.mode == "shared"

    @property
    def loads(self) -> Mapping[str, Load]:
        return self._learned.loads

    @property
    def swap_s(self) -> float:
        """Seconds of a swap: measured, or the pool's until then."""
        return self.pool.swap_s if self._measured_swap_s is None else self._measured_swap_s

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs, and no swap is under way."""
        is_swapping = any(clock.swap_began is not None for clock in self._clocks)
        return not (self._running or is_swapping or any(self._waiting.values()))

    def waiting(self) -> dict[str, int]:
        return {role: len(requests) for role, requests in self._waiting.items()}

    def in_flight(self) -> dict[tuple[str, int], tuple[int, float]]:
        """By role and slot: the number of running requests, and when the oldest of them began."""
        in_flight: dict[tuple[str, int], tuple[int, float]] = {}
        for running in self._running.values():
            key = (running.role, running.slot)
            number, oldest = in_flight.get(key, (0, running.began))
            in_flight[key] = (number + 1, min(oldest, running.began))
        return in_flight

    def decide(self, now: float) -> list[Action]:
        """Return the actions to carry out now, in order. Call it after every event, or several of the same moment."""
        if not any(self._waiting.values()):
            return []
        actions: list[Action] = []
        for role in self.pool.roles:
            waiting = self._waiting[role]
            while waiting and (slot := self._pick(role, waiting.next_rank)) is not None:
                request = waiting.take()
                before = self._clocks[slot].change(role, 1, now)
                self._running[request] = _RunningRequest(role, slot, now, before)
                self._note(slot)
                actions.append(StartRequest(request, slot))
        if self.mode == "phases":
            self._next_phase(now, actions)
        elif self.mode in ("divided", "together"):
            self._move_spare(now, actions)
        return actions

    def _pick(self, role: str, rank: int) -> int | None:
        """Return the slot with the fewest in flight; of several the rank's own, to which it has connections."""
        if self.mode == "shared":  # the fewest of this role, then the fewest of all
            busy = [(clock.in_flight_of[role], clock.in_flight) for clock in self._clocks]
            slot = min(range(self.pool.num_slots), key=busy.__getitem__)
            return slot if busy[slot][0] < self._learned.depth[role] else None
        depth = self._depth_now(role)
        own_slot = rank % self.pool.num_slots
        free = self._free[role]
        while free:
            in_flight, slot = free[0]
            clock = self._clocks[slot]
            can_take = (
                self._awake[slot] == role
                and clock.swap_began is None
                and clock.in_flight < depth
            )
            if can_take and in_flight == clock.in_flight:
                return own_slot if self._is_as_free(own_slot, slot, role) else slot
            heapq.heappop(
                free
            )  # an old entry or a full slot, which is noted again when it gets room
        return None

    def _is_as_free(self, slot: int, other: int, role: str) -> bool:
        clock = self._clocks[slot]
        is_open = self._awake[slot] == role and clock.swap_began is None
        return is_open and clock.in_flight == self._clocks[other].in_flight

    def _depth_now(self, role: str) -> int:
        """Return a role's depth. The slots that serve it leave slots that are waking for it a share of the queue."""
        depth = self._learned.depth[role]
        if not self._waking[role]:
            return depth
        unfinished = self._requested[role] - self._sums[role].num
        soon = sum(self._soon_free(other) for other in self.pool.roles if other != role)
        return min(depth, max(1, math.ceil(unfinished / (self._num_slots[role] + soon))))

    def _soon_free(self, role: str) -> float:
        """Estimate the slots that a role with nothing waiting gives up soon: the share of its requests that ended."""
        load = self.loads.get(role)
        if self._waiting[role] or load is None:
            return 0.0
        expected = self._requested[role] + self._coming(role, load)
        return self._num_slots[role] * self._sums[role].num / expected if expected else 0.0

    def _move_spare(self, now: float, actions: list[Action]) -> None:
        """Move slots that have run out of work, one by one, to where the backlog is worth the swap."""
        for role in self.pool.roles:
            spare = self._spare[role]
            while spare and not self._waiting[role]:
                targets = {
                    other: self._backlog(other) for other in self.pool.roles if other != role
                }
                target = best_move(
                    self._backlog(role), targets, swap_s=self.swap_s, late_s=self._late_s(role)
                )
                if target is None:
                    break
                slot = min(spare, key=lambda slot: (self._clocks[slot].in_flight, slot))
                self._swap(slot, target, now, actions)

    def _backlog(self, role: str) -> Backlog:
        waiting = len(self._waiting[role])
        num_slots = self._num_slots[role]
        load = self.loads.get(role)
        if load is None:  # nothing is known yet: more than one request a slot is worth a try
            return Backlog(min(waiting, 1), 0, 0 if waiting > num_slots else num_slots, 0.0)
        engine_s = load.engine_s(self._learned.depth[role])
        return Backlog(waiting, self._coming(role, load), num_slots, engine_s)

    def _coming(self, role: str, load: Load) -> float:
        """Estimate the requests still to come in this round: verdicts on running completions, and late rollouts."""
        if role == ROLLOUT:
            return max(0.0, load.num_late - self._sums[ROLLOUT].late)
        rollout = self.loads.get(ROLLOUT)
        under_way = self._requested[ROLLOUT] - self._sums[ROLLOUT].num
        return under_way * load.num_requests / rollout.num_requests if rollout else 0.0

    def _late_s(self, role: str) -> float:
        """Estimate the delay if verdicts come late: dynamic sampling may then need another rollout."""
        rollout = self.loads.get(ROLLOUT)
        if role == ROLLOUT or rollout is None:
            return 0.0
        return min(1.0, rollout.num_late) * rollout.longest * rollout.speed.step_s(1)

    def _next_phase(self, now: float, actions: list[Action]) -> None:
        """Change all slots together, once their role has nothing left anywhere."""
        is_swapping = any(clock.swap_began is not None for clock in self._clocks)
        if self._waiting[self._awake[0]] or self._running or is_swapping:
            return
        target = max(self.pool.roles, key=lambda other: len(self._waiting[other]))
        for slot in range(self.pool.num_slots):
            self._swap(slot, target, now, actions)

    def _swap(self, slot: int, target: str, now: float, actions: list[Action]) -> None:
        role = self._awake[slot]
        clock = self._clocks[slot]
        self._num_slots[role] -= 1
        self._num_slots[target] += 1
        self._waking[target] += 1
        self._spare[role].discard(slot)
        self._awake[slot] = target
        clock.swap_began = now
        self._swaps += 1
        actions.append(Swap(slot, role, target))

    def _leave(self, running: _RunningRequest, now: float) -> Reading:
        reading = self._clocks[running.slot].change(running.role, -1, now)
        self._note(running.slot)
        return reading

    def _note(self, slot: int) -> None:
        """Update `_free` and `_spare` after the slot's role or number in flight has changed."""
        role = self._awake[slot]
        clock = self._clocks[slot]
        if clock.swap_began is not None:
            return
        heapq.heappush(self._free[role], (clock.in_flight, slot))
        spare_up_to = 0 if self.pool.exclusive else self._learned.depth[role] // _SPARE_SHARE
        if clock.in_flight <= spare_up_to:
            self._spare[role].add(slot)
        else:
            self._spare[role].discard(slot)
