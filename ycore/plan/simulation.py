"""One round in virtual time: the live run's allocator and sampling decisions, driven by a heap of events.

What a round has to do: how long every completion is, what its judging takes, which groups can teach.

One slot in virtual time: engines with continuous batching, each request a token a step of its engine.

Not here: the decisions (`placement.allocator`, `sampling.demand`), and comparing placements (`compare`).
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed, Usage
from ycore.placement.placement import ROLLOUT, Start, Swap
from ycore.round.sampling import Yield, num_to_draw

Sizes = Mapping[str, float]
"""One completion: tokens to write under `rollout`, and the size of the request of every other role that scores it."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """The completions of one prompt. `after`: drawn only when so many groups of the round have ended (a recording)."""

    completions: tuple[Sizes, ...]
    teaches: bool = True
    after: int = 0


GroupAt = Callable[[int], SimulatedGroup]
"""The group at a place in the run's order: the same one however often and by whichever placement it is asked."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths: lognormal with this mean and spread, cut off at the longest, as budgets cut them."""

    mean: float
    sigma: float
    longest: float

    def draw(self, source: random.Random) -> float:
        drawn = math.exp(source.gauss(math.log(self.mean) - self.sigma**2 / 2, self.sigma))
        return max(1.0, min(self.longest, drawn))


@dataclass(frozen=True, slots=True)
class Assumed:
    """A workload without a recording. `scoring`: the size of a request of each other role, for every completion."""

    lengths: Lengths
    scoring: Sizes
    group_size: int = 8
    teach_share: float = 1.0
    seed: int = 0

    def group_at(self, position: int) -> SimulatedGroup:
        source = random.Random(f"{self.seed}/{position}")
        completions = tuple({ROLLOUT: self.lengths.draw(source), **self.scoring} for _ in range(self.group_size))
        return SimulatedGroup(completions, teaches=source.random() < self.teach_share)


@dataclass(slots=True)
class _Engine:
    role: str
    speed: Speed
    reading_s: float
    tokens: float = 0.0
    to_read_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)


class VirtualSlot:
    """The engines of all roles on one slot. Those that have work share the slot evenly, as processes share a core."""

    __slots__ = ("_busy", "_engines", "_now")

    def __init__(self, speeds: Mapping[str, Speed], reading_s: Mapping[str, float] | None = None) -> None:
        reading_s = reading_s or {}
        self._engines = {role: _Engine(role, speed, reading_s.get(role, 0.0)) for role, speed in speeds.items()}
        self._busy: list[_Engine] = []
        self._now = 0.0

    def start(self, request: int, role: str, size: float, now: float) -> None:
        self._advance(now)
        engine = self._engines[role]
        if not engine.ends:
            self._busy.append(engine)
        engine.to_read_s += engine.reading_s
        heapq.heappush(engine.ends, (engine.tokens + size, request))

    def next_end(self) -> tuple[float, int, str] | None:
        """(when, request, role) of the request that ends first if nothing else comes."""
        first = None
        for engine in self._busy:
            tokens, request = engine.ends[0]
            seconds = engine.to_read_s * len(self._busy) + (tokens - engine.tokens) * self._step_s(engine)
            found = (self._now + seconds, request, engine.role)
            first = found if first is None or found < first else first
        return first

    def end(self, role: str, now: float) -> None:
        """Take out what `next_end` told."""
        self._advance(now)
        engine = self._engines[role]
        engine.tokens, _ = heapq.heappop(engine.ends)  # exactly there, whatever the rounding
        engine.to_read_s = 0.0
        if not engine.ends:
            self._busy.remove(engine)

    def _advance(self, now: float) -> None:
        passed = now - self._now
        if passed:
            for engine in self._busy:
                written = passed
                if engine.to_read_s:
                    read = min(engine.to_read_s, passed / len(self._busy))
                    engine.to_read_s -= read
                    written -= read * len(self._busy)
                engine.tokens += written / self._step_s(engine)
        self._now = now

    def _step_s(self, engine: _Engine) -> float:
        return engine.speed.step_s(len(engine.ends)) * len(self._busy)


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast the engines of each role are, and what their sleeping and waking takes.

    `swap_s[role]`: a sleep and the wake after it; a swap pays half for the role that goes and half for the one that
    comes. `reading_s[role]`: reading the prompt of one request, while the others of its engine wait; none where sizes
    and speeds hold it already.
    """

    speeds: Mapping[str, Speed]
    swap_s: Mapping[str, float]
    reading_s: Mapping[str, float] = field(default_factory=dict)

    def swap_between(self, asleep: str, awake: str) -> float:
        return (self.swap_s.get(asleep, 0.0) + self.swap_s.get(awake, 0.0)) / 2


@dataclass(frozen=True, slots=True)
class Demand:
    """How a round draws; the same rules as a live round's."""

    need: int
    dynamic: bool = False
    max_tries: int = 4
    max_in_flight: int | None = None


class Lane(NamedTuple):
    """A stretch of one slot's time: a request's role, or `swap`."""

    slot: int
    name: str
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulated round."""

    usage: Usage
    lanes: list[Lane]
    drawn: int
    written_s: float
    """When the last completion was written."""


class SimulatedRound:
    """Example: `SimulatedRound(allocator, machine, group_at, demand).run()`; `position` goes on from round to round."""

    def __init__(
        self,
        allocator: Allocator,
        machine: Machine,
        group_at: GroupAt,
        demand: Demand,
        *,
        position: int = 0,
        yields: Yield | None = None,
    ) -> None:
        self.position = position
        self._allocator = allocator
        self._machine = machine
        self._group_at = group_at
        self._demand = demand
        self._yields = yields or Yield()
        self._slots = [VirtualSlot(machine.speeds, machine.reading_s) for _ in range(allocator.pool.num_slots)]
        self._stamps = [0] * len(self._slots)
        self._following: list[tuple[float, int, str] | None] = [None] * len(self._slots)
        self._events: list[tuple[float, int, int, int]] = []  # when, order, slot, the slot's stamp (-1: a swap's end)
        self._num_events = 0
        self._asked: dict[int, tuple[str, int, int]] = {}  # request: role, group, completion
        self._began: dict[int, float] = {}
        self._changed: set[int] = set()
        self._groups: dict[int, SimulatedGroup] = {}
        self._unwritten: Counter[int] = Counter()  # group: completions still to be written
        self._open: Counter[int] = Counter()  # group: requests without an answer
        self._lanes: list[Lane] = []
        self._num_requests = self._drawn = self._kept = self._finished = 0
        self._written_s = 0.0

    def run(self) -> Outcome:
        """The round, from time 0 to the end of the last request."""
        now = 0.0
        self._allocator.begin_round(now)
        self._draw()
        self._act(now)
        while self._events:
            now, _, slot, stamp = heapq.heappop(self._events)
            if stamp == -1:
                self._allocator.swapped(slot, now)
            elif stamp == self._stamps[slot]:
                self._end_request(slot, now)
            else:
                continue
            self._act(now)
        assert self._allocator.is_idle, "every request was answered"
        return Outcome(self._allocator.end_round(now), self._lanes, self._drawn, self._written_s)

    def _draw(self) -> None:
        demand, flying = self._demand, self._drawn - self._finished
        wanted = num_to_draw(
            need=demand.need,
            kept=self._kept,
            in_flight=flying,
            drawn=self._drawn,
            max_draws=demand.need * (demand.max_tries if demand.dynamic else 1),
            rate=self._yields.rate if demand.dynamic else 1.0,
        )
        if demand.max_in_flight is not None:
            wanted = max(0, min(wanted, demand.max_in_flight - flying))
        for _ in range(wanted):
            group = self._group_at(self.position)
            if group.after > self._finished:
                return
            self._open_group(self.position, group)
            self.position += 1

    def _open_group(self, position: int, group: SimulatedGroup) -> None:
        self._drawn += 1
        self._groups[position] = group
        self._unwritten[position] = len(group.completions)
        for index in range(len(group.completions)):
            self._ask(ROLLOUT, position, index)

    def _ask(self, role: str, position: int, index: int) -> None:
        request = self._num_requests
        self._num_requests += 1
        self._asked[request] = (role, position, index)
        self._open[position] += 1
        self._allocator.ask(request, role)

    def _act(self, now: float) -> None:
        """Carry out what the allocator decides; a slot's next end is looked for once, however many requests came."""
        for action in self._allocator.decide(now):
            if isinstance(action, Start):
                role, position, index = self._asked[action.request]
                self._slots[action.slot].start(action.request, role, self._size(role, position, index), now)
                self._began[action.request] = now
                self._changed.add(action.slot)
            else:
                self._swap(action, now)
        for slot in self._changed:
            self._schedule(slot)
        self._changed.clear()

    def _size(self, role: str, position: int, index: int) -> float:
        return self._groups[position].completions[index][role]

    def _swap(self, swap: Swap, now: float) -> None:
        seconds = self._machine.swap_between(swap.asleep, swap.awake)
        self._lanes.append(Lane(swap.slot, "swap", now, seconds))
        self._push(now + seconds, swap.slot, -1)

    def _schedule(self, slot: int) -> None:
        self._stamps[slot] += 1
        following = self._following[slot] = self._slots[slot].next_end()
        if following is not None:
            self._push(following[0], slot, self._stamps[slot])

    def _push(self, when: float, slot: int, stamp: int) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, slot, stamp))

    def _end_request(self, slot: int, now: float) -> None:
        following = self._following[slot]
        assert following is not None
        _, request, role = following
        self._slots[slot].end(role, now)
        self._changed.add(slot)
        _, position, index = self._asked.pop(request)
        began = self._began.pop(request)
        self._lanes.append(Lane(slot, role, began, now - began))
        self._allocator.ended(request, now, size=self._size(role, position, index))
        if role == ROLLOUT:
            self._written_s = now
            self._unwritten[position] -= 1
            for other in self._to_score(position, index):
                self._ask_scorers(position, other)
        self._open[position] -= 1
        if not self._open[position]:
            self._finish(position)

    def _to_score(self, position: int, written: int) -> Sequence[int]:
        """The completions to score now that this one is written: itself, or, gathered, all once it is the last."""
        if not self._allocator.gathers:
            return [written]
        return [] if self._unwritten[position] else range(len(self._groups[position].completions))

    def _ask_scorers(self, position: int, index: int) -> None:
        for role in self._groups[position].completions[index]:
            if role != ROLLOUT:
                self._ask(role, position, index)

    def _finish(self, position: int) -> None:
        group = self._groups.pop(position)
        self._finished += 1
        self._kept += group.teaches or not self._demand.dynamic
        self._yields.observe(taught=group.teaches)
        self._draw()
