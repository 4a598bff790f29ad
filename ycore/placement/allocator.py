"""The allocator: events in, actions out. Who asks, ends, swaps is told to it; what to start and to swap it answers.

It has no clock, no process and no wait of its own. The live run drives it from asyncio (`controller.dispatch`), the
simulator from a virtual clock (`simulate.round`): both get the same decisions from the same events.

Not here: what a move is worth (`moves`), and what is learned from round to round (`learning`).
"""

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ycore.placement.learning import Learning, MovingAverage
from ycore.placement.load import UNKNOWN, EngineClock, Load, Reading, SlotClock, Sums, Usage, as_numbers
from ycore.placement.moves import Backlog, Cost, best_move
from ycore.placement.placement import (
    DYNAMIC,
    ROLLOUT,
    Action,
    Division,
    Mode,
    Placement,
    SlotPool,
    Start,
    Swap,
)

_SPARE = 4
"""Where engines of several roles run side by side, a slot that is less than a quarter full can take another's work."""


@dataclass(slots=True)
class _Flying:
    role: str
    slot: int
    began: float
    before: Reading
    """Its engine's totals when it began."""


class Allocator:
    """Example: `allocator.ask(7, "judge", now)`, then carry out `allocator.decide(now)`."""

    def __init__(self, pool: SlotPool, placement: Placement = DYNAMIC) -> None:
        self.pool = pool
        placement = placement if len(pool.roles) > 1 else Placement("split", (pool.num_slots,))
        capacity = {role: pool.capacity_of(role) for role in pool.roles}
        self._learned = Learning(pool.num_slots, capacity, placement, exclusive=pool.exclusive)
        self._swap_cost = MovingAverage()
        self._flying: dict[int, _Flying] = {}
        self._waiting: dict[str, deque[int]] = {role: deque() for role in pool.roles}
        self.begin_round(0.0)

    # -- events ----------------------------------------------------------------------------------------------------

    def begin_round(self, now: float) -> None:
        """A round begins; its slots are awake as `placement` says."""
        assert not self._flying, "a round begins when the last has ended"
        self._began = now
        self._seconds = 0.0
        self._swaps = 0
        self._verdict_given = self._news = False
        self._asked = dict.fromkeys(self.pool.roles, 0)
        self._round: dict[str, Sums] = {role: Sums(rounds=1.0) for role in self.pool.roles}
        self._awake = [role for role, count in self.division.items() for _ in range(count)]
        self._clocks = [SlotClock(self._engine_clocks(), since=now) for _ in self._awake]
        self._free: dict[str, list[tuple[int, int]]] = {role: [] for role in self.pool.roles}
        self._spare: dict[str, set[int]] = {role: set() for role in self.pool.roles}
        self._arriving = dict.fromkeys(self.pool.roles, 0)
        self._num_slots = {role: self._awake.count(role) for role in self.pool.roles}
        for slot in range(self.pool.num_slots):
            self._note(slot)

    def ask(self, request: int, role: str) -> None:
        """A request of this role wants a slot; `decide` says when and where."""
        self._waiting[role].append(request)
        self._asked[role] += 1
        if role == ROLLOUT and self._verdict_given:
            verdicts = sum(self._round[other].num for other in self.pool.roles[1:]) / (len(self.pool.roles) - 1)
            self._round[ROLLOUT].observe_late(verdicts / self._asked[ROLLOUT], is_first=self._news)
            self._news = False

    def withdraw(self, request: int, role: str, now: float) -> None:
        """Whoever asked has given up, in flight or not."""
        flying = self._flying.pop(request, None)
        if flying is None:
            self._waiting[role].remove(request)
        else:
            self._leave(flying, now)

    def ended(self, request: int, now: float, *, size: float = 1.0) -> None:
        """A request that was started has its answer, of `size` tokens (1 where nobody counts them)."""
        flying = self._flying.pop(request)
        seconds, depth = self._leave(flying, now).since(flying.before)
        self._verdict_given |= flying.role != ROLLOUT
        self._news = True
        if seconds > 0:
            self._round[flying.role].observe(seconds=seconds, depth=depth, size=max(size, 1.0))

    def swapped(self, slot: int, now: float) -> None:
        """A swap is through: the slot's new role can be asked."""
        clock = self._clocks[slot]
        assert clock.swap_began is not None
        seconds = now - clock.swap_began
        clock.swap_s += seconds
        clock.swap_began = None
        self._arriving[self._awake[slot]] -= 1
        self._swap_cost.observe(seconds)
        self._note(slot)

    def end_round(self, now: float) -> Usage:
        """How the slots were used since it began."""
        clocks = self._clocks
        for clock in clocks:
            clock.advance(now)
        self._seconds = now - self._began
        return Usage(self._seconds, [c.busy_s for c in clocks], [c.swap_s for c in clocks], self._swaps)

    # -- between rounds --------------------------------------------------------------------------------------------

    def numbers(self) -> list[float]:
        """What this controller learned in the round, to be added to the others'."""
        return [*as_numbers(self._round, self.pool.roles), self.swap_s, self._seconds, 1.0]

    def learn(self, added: Sequence[float]) -> None:
        """The sum of all controllers' numbers: they all come to the same plan for the next round."""
        *numbers, swap_s, seconds, controllers = added
        self._learned.learn(numbers, swap_s=swap_s / controllers, round_s=seconds / controllers)

    def state(self) -> dict[str, Any]:
        """What was learned so far, as plain JSON values, for a checkpoint between rounds."""
        return {**self._learned.state(), "swap_s": self._swap_cost.value}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` told; it counts from the next `begin_round` on."""
        self._learned.restore(state)
        self._swap_cost.value = state["swap_s"]

    @property
    def loads(self) -> Mapping[str, Load]:
        """Each role's work in a round, as learned so far."""
        return self._learned.loads

    @property
    def awake(self) -> tuple[str, ...]:
        """The role that is awake on each slot; during a swap, the role that is waking."""
        return tuple(self._awake)

    @property
    def mode(self) -> Mode:
        """How slots change their role in the next round."""
        return self._learned.schedule.mode

    @property
    def gathers(self) -> bool:
        """Whether the verdicts of a group are better asked together, once all of it is written.

        On a shared slot a judge's step for one short verdict takes nearly as long as that for several, and it takes it
        from the rollouts; a group is of use only with its last verdict.
        """
        return self.mode == "shared"

    @property
    def division(self) -> Division:
        """What the next round starts with."""
        return self._learned.schedule.division

    @property
    def swap_s(self) -> float:
        """What a swap costs: measured, or assumed until then."""
        return self.pool.swap_s if self._swap_cost.value is None else self._swap_cost.value

    def waiting(self) -> dict[str, int]:
        """Requests of each role that no slot has taken yet."""
        return {role: len(requests) for role, requests in self._waiting.items()}

    def in_flight(self) -> dict[tuple[str, int], tuple[int, float]]:
        """By role and slot: how many requests are with the engine, and when the oldest of them began."""
        found: dict[tuple[str, int], tuple[int, float]] = {}
        for flying in self._flying.values():
            count, oldest = found.get((flying.role, flying.slot), (0, flying.began))
            found[flying.role, flying.slot] = (count + 1, min(oldest, flying.began))
        return found

    @property
    def is_idle(self) -> bool:
        return not self._flying and not any(self._waiting.values())

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """What to do now, in order. To be asked after every event, or after several of one moment."""
        if not any(self._waiting.values()):
            return []
        actions: list[Action] = []
        for role in self.pool.roles:
            self._start_waiting(role, now, actions)
        if self.mode == "phases":
            self._next_phase(now, actions)
        elif self.mode in ("divided", "together"):
            self._move_spare(now, actions)
        return actions

    def _start_waiting(self, role: str, now: float, actions: list[Action]) -> None:
        waiting = self._waiting[role]
        while waiting and (slot := self._pick(role)) is not None:
            request = waiting.popleft()
            self._flying[request] = _Flying(role, slot, now, self._clocks[slot].start(role, now))
            self._note(slot)
            actions.append(Start(request, slot))

    def _pick(self, role: str) -> int | None:
        """The slot with the fewest in flight."""
        if self.mode == "shared":
            return self._pick_shared(role)
        depth = self._depth_now(role)
        free = self._free[role]
        while free:
            in_flight, slot = free[0]
            clock = self._clocks[slot]
            can_take = self._awake[slot] == role and clock.swap_began is None and clock.in_flight < depth
            if can_take and in_flight == clock.in_flight:
                return slot
            heapq.heappop(free)  # an old entry, or a full slot: one that gets room is noted anew
        return None

    def _pick_shared(self, role: str) -> int | None:
        """The slot with the fewest of this role, then the fewest of all."""
        held = [(clock.engines[role].in_flight, clock.in_flight) for clock in self._clocks]
        slot = min(range(self.pool.num_slots), key=held.__getitem__)
        return slot if held[slot][0] < self._learned.depth[role] else None

    def _depth_now(self, role: str) -> int:
        """While slots are on their way to a role, those that are there leave them, and those to follow, their share."""
        depth = self._learned.depth[role]
        if not self._arriving[role]:
            return depth
        there_is = self._asked[role] - self._round[role].num
        soon = sum(self._soon_free(other) for other in self.pool.roles if other != role)
        return min(depth, max(1, math.ceil(there_is / (self._num_slots[role] + soon))))

    def _soon_free(self, role: str) -> float:
        """Slots of a role with nothing waiting that others can hope for: as many as of its requests have ended."""
        load = self._learned.loads.get(role)
        if self._waiting[role] or load is None:
            return 0.0
        expected = self._asked[role] + self._coming(role, load)
        return self._num_slots[role] * self._round[role].num / expected if expected else 0.0

    def _move_spare(self, now: float, actions: list[Action]) -> None:
        """Slots with nothing left in their role go where the backlog is worth it, one by one."""
        for role in self.pool.roles:
            spare = self._spare[role]
            while spare and not self._waiting[role]:
                others = {other: self._backlog(other) for other in self.pool.roles if other != role}
                target = best_move(self._backlog(role), others, Cost(self.swap_s, self._late_s(role)))
                if target is None:
                    break
                slot = min(spare, key=lambda slot: (self._clocks[slot].in_flight, slot))
                self._swap(slot, target, now, actions)

    def _backlog(self, role: str) -> Backlog:
        waiting, slots = len(self._waiting[role]), self._num_slots[role]
        load = self._learned.loads.get(role)
        if load is None:  # nothing is known yet: more than a request a slot is worth a try
            return Backlog(min(waiting, 1), 0, 0 if waiting > slots else slots, 0.0)
        return Backlog(waiting, self._coming(role, load), slots, load.engine_s(self._learned.depth[role]))

    def _coming(self, role: str, load: Load) -> float:
        """Requests that this round is still to bring: for completions under way, and as earlier rounds had them."""
        if role == ROLLOUT:
            return max(0.0, load.num_late - self._round[role].late)
        rollout = self._learned.loads.get(ROLLOUT)
        under_way = self._asked[ROLLOUT] - self._round[ROLLOUT].num
        return under_way * load.num_requests / rollout.num_requests if rollout else 0.0

    def _late_s(self, role: str) -> float:
        """What it costs if verdicts come late: the prompts that are drawn by them have yet to be written."""
        rollout = self._learned.loads.get(ROLLOUT)
        if role == ROLLOUT or rollout is None:
            return 0.0
        return min(1.0, rollout.num_late) * rollout.longest * rollout.speed.step_s(1)

    def _next_phase(self, now: float, actions: list[Action]) -> None:
        """All slots change together, once the role has nothing left anywhere."""
        role = self._awake[0]
        if self._waiting[role] or self._flying or any(clock.swap_began is not None for clock in self._clocks):
            return
        target = max(self.pool.roles, key=lambda other: len(self._waiting[other]))
        for slot in range(self.pool.num_slots):
            self._swap(slot, target, now, actions)

    def _swap(self, slot: int, target: str, now: float, actions: list[Action]) -> None:
        role, clock = self._awake[slot], self._clocks[slot]
        self._num_slots[role] -= 1
        self._num_slots[target] += 1
        self._arriving[target] += 1
        self._spare[role].discard(slot)
        self._awake[slot] = target
        clock.swap_began = now
        self._swaps += 1
        actions.append(Swap(slot, role, target))

    def _engine_clocks(self) -> dict[str, EngineClock]:
        """As fast as learned so far; before that, every step is taken to be as long as any other."""
        loads = self._learned.loads
        return {role: EngineClock(loads[role].speed if role in loads else UNKNOWN) for role in self.pool.roles}

    def _leave(self, flying: _Flying, now: float) -> Reading:
        reading = self._clocks[flying.slot].end(flying.role, now)
        self._note(flying.slot)
        return reading

    def _note(self, slot: int) -> None:
        """The slot's number in flight or its role has changed."""
        role, clock = self._awake[slot], self._clocks[slot]
        if clock.swap_began is not None:
            return
        heapq.heappush(self._free[role], (clock.in_flight, slot))
        if clock.in_flight <= (0 if self.pool.exclusive else self._learned.depth[role] // _SPARE):
            self._spare[role].add(slot)
        else:
            self._spare[role].discard(slot)
