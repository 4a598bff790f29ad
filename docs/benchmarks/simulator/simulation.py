"""Rounds in virtual time: the live run's allocator and sampling decisions, driven by a heap of events.

Only the clock, the engines and the completions are made up.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from statistics import fmean

from simulator.speeds import Speed
from ycore.placement.allocator import Allocator, usage_metrics
from ycore.placement.placement import ROLLOUT, StartRequest
from ycore.round.sampling import AcceptanceRate, num_to_draw
from ycore.run.trace import SWAP, Span

Sizes = Mapping[str, float]
"""One completion: its tokens under `rollout`, and the size of the request of every other role that scores it."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """The completions of one prompt. `after`: not drawn before so many groups of the round have ended (a recording)."""

    completions: tuple[Sizes, ...]
    teaches: bool = True
    after: int = 0


GroupAt = Callable[[int], SimulatedGroup]  # the group at a position of the run's order


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths in tokens: lognormal with this mean and spread, cut off at the longest."""

    mean: float
    sigma: float
    longest: float

    def draw(self, source: random.Random) -> float:
        drawn = math.exp(source.gauss(math.log(self.mean) - self.sigma**2 / 2, self.sigma))
        return max(1.0, min(self.longest, drawn))


@dataclass(frozen=True, slots=True)
class Workload:
    """Assumed groups. `scoring`: the size of each other role's request, the same for every completion."""

    lengths: Lengths
    scoring: Sizes
    group_size: int = 8
    teach_share: float = 1.0
    seed: int = 0

    def group_at(self, position: int) -> SimulatedGroup:
        source = random.Random(f"{self.seed}/{position}")
        completions = tuple(
            {ROLLOUT: self.lengths.draw(source), **self.scoring} for _ in range(self.group_size)
        )
        return SimulatedGroup(completions, teaches=source.random() < self.teach_share)


_ROUNDING_S = 1e-9


@dataclass(slots=True)
class _Engine:
    speed: Speed
    reading_s: float
    tokens: float = 0.0
    reading: deque[tuple[float, int]] = field(
        default_factory=deque
    )  # (size, request), the first is being read
    read_s: float = 0.0  # of the first
    ends: list[tuple[float, int]] = field(
        default_factory=list
    )  # a heap of (tokens at its end, request)

    @property
    def step_s(self) -> float:
        return self.speed.step_s(len(self.ends) + len(self.reading))

    def start(self, request: int, size: float) -> None:
        if self.reading_s:
            self.reading.append((size, request))
        else:
            heapq.heappush(self.ends, (self.tokens + size, request))

    def next_end(self) -> tuple[float, int]:
        """Return (its own seconds from now, request)."""
        tokens, request = self.ends[0] if self.ends else (math.inf, -1)
        if tokens <= self.tokens:
            return 0.0, request
        if not self.reading:
            return (tokens - self.tokens) * self.step_s, request
        seconds = -self.read_s
        for size, reads in self.reading:
            seconds += self.reading_s
            if size <= 1:
                return seconds, reads
            tokens, request = min((tokens, request), (self.tokens + size - 1, reads))
        return max(seconds, 0.0) + (tokens - self.tokens) * self.step_s, request

    def work(self, seconds: float) -> None:
        """Read prompts one after the other, and write tokens; the reading of one writes its first token."""
        while self.reading and self.read_s + seconds >= self.reading_s - _ROUNDING_S:
            seconds = max(0.0, seconds - (self.reading_s - self.read_s))
            size, request = self.reading.popleft()
            self.read_s = 0.0
            heapq.heappush(self.ends, (self.tokens + max(0.0, size - 1), request))
        if self.reading:
            self.read_s += seconds
        else:
            self.tokens += seconds / self.step_s


class VirtualSlot:
    """The engines of all roles on one slot, with continuous batching. Engines that have work share the slot evenly."""

    def __init__(
        self, speeds: Mapping[str, Speed], reading_s: Mapping[str, float] | None = None
    ) -> None:
        self._engines = {
            role: _Engine(speed, (reading_s or {}).get(role, 0.0))
            for role, speed in speeds.items()
        }
        self._now = 0.0

    def start(self, request: int, role: str, size: float, now: float) -> None:
        self._advance(now)
        self._engines[role].start(request, size)

    def end(self, role: str, now: float) -> None:
        """Remove the request that `next_end` named."""
        self._advance(now)
        engine = self._engines[role]
        engine.tokens, _ = heapq.heappop(engine.ends)  # exactly there, whatever the rounding

    def next_end(self) -> tuple[float, int, str] | None:
        """Return (time, request, role) of the request that ends first if no other starts."""
        busy = self._busy()
        ends = []
        for role, engine in busy:
            seconds, request = engine.next_end()
            ends.append((self._now + seconds * len(busy), request, role))
        return min(ends) if ends else None

    def _advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if passed:
            busy = self._busy()
            for _, engine in busy:
                engine.work(passed / len(busy))

    def _busy(self) -> list[tuple[str, _Engine]]:
        return [item for item in self._engines.items() if item[1].ends or item[1].reading]


def of_engines(speed: Speed, count: int) -> Speed:
    """Return the speed of a slot on which a role has so many engines, which share its requests evenly."""
    return Speed(speed.base, speed.per_request / count)


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast the engines of each role are."""

    speeds: Mapping[str, Speed]
    swap_s: Mapping[
        str, float
    ]  # a sleep and the wake after it; a swap costs half of each of its two roles
    reading_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of reading one prompt up to its first token, while other requests wait; empty where sizes include it."""


@dataclass(frozen=True, slots=True)
class Demand:
    need: int  # groups, by the same rules as a live round's
    dynamic: bool = False
    max_tries: int = 4
    known_lengths: bool = (
        False  # of each prompt, from its groups of earlier rounds: the longest are begun first
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    seconds: float
    usage: list[float]  # as `Allocator.end_round` gives it, of all machines
    uses: list[tuple[str, int, float, float]]  # of slots, each as `lanes` names it
    drawn: int

    @property
    def lanes(self) -> list[Span]:
        """Return requests, by their role, and swaps; slots count on from machine to machine."""
        return [Span(name, 0, slot, began, seconds) for name, slot, began, seconds in self.uses]

    @property
    def metrics(self) -> dict[str, float]:
        return usage_metrics(self.usage)


@dataclass(slots=True)
class _Request:
    role: str
    position: int
    index: int
    size: float
    began: float = 0.0


@dataclass(slots=True)
class _OpenGroup:
    group: SimulatedGroup
    machine: int  # whose slots serve it
    rank: int  # of that machine
    unwritten: int
    unanswered: int = 0


_SWAP_ENDS = -1  # in place of a stamp


@dataclass(eq=False)
class SimulatedRound:
    """Example: `SimulatedRound([allocator], machine, group_at, demand).run()`.

    `allocators` are one for each machine of the run, with as many slots; `ranks` are those of a machine. `position`
    counts on from round to round; `yields` learns the share of groups that teach.
    """

    allocators: Sequence[Allocator]
    machine: Machine
    group_at: GroupAt
    demand: Demand
    _: KW_ONLY
    ranks: int = 1
    position: int = 0
    yields: AcceptanceRate = field(default_factory=AcceptanceRate)

    def __post_init__(self) -> None:
        speeds, reading_s = self.machine.speeds, self.machine.reading_s
        self._num_slots = self.allocators[0].pool.num_slots  # of a machine
        self._slots = [
            VirtualSlot(speeds, reading_s)
            for _ in range(len(self.allocators) * self._num_slots)
        ]
        self._stamps = [0] * len(
            self._slots
        )  # a slot's events with an older stamp no longer hold
        self._events: list[
            tuple[float, int, int, int, int]
        ] = []  # a heap of (time, order, slot, stamp, request)
        self._order = itertools.count()  # among events of one moment
        self._requests: list[_Request] = []
        self._open: dict[int, _OpenGroup] = {}  # by position
        self._uses: list[tuple[str, int, float, float]] = []
        self._drawn = self._kept = self._finished = 0
        self._num_open = [0] * len(self.allocators)  # groups of each machine
        self._has_news: set[int] = set()  # machines whose allocator has something to decide

    def run(self) -> Outcome:
        now = 0.0
        for allocator in self.allocators:
            allocator.begin_round(now)
        self._draw()
        self._act(now, changed=[])
        while self._events:
            now, _, slot, stamp, request = heapq.heappop(self._events)
            machine, machine_slot = divmod(slot, self._num_slots)
            self._has_news.add(machine)
            if stamp == _SWAP_ENDS:
                self.allocators[machine].swapped(machine_slot, now)
                self._act(now, changed=[])
            elif stamp == self._stamps[slot]:
                self._end_request(slot, request, now)
                self._act(now, changed=[slot])
        assert all(allocator.is_idle for allocator in self.allocators), (
            "every request was answered"
        )
        usages = [allocator.end_round(now) for allocator in self.allocators]
        usage = [sum(values) for values in zip(*usages, strict=True)]
        return Outcome(now, usage, self._uses, self._drawn)

    def _draw(self) -> None:
        demand = self.demand
        wanted = num_to_draw(
            need=demand.need,
            kept=self._kept,
            in_flight=self._drawn - self._finished,
            drawn=self._drawn,
            max_draws=demand.need * (demand.max_tries if demand.dynamic else 1),
            rate=self.yields.rate if demand.dynamic else 1.0,
        )
        for _ in range(wanted):
            group = self.group_at(self.position)
            if group.after > self._finished:
                return
            machine = min(range(len(self.allocators)), key=self._num_open.__getitem__)
            rank = self._drawn // len(self.allocators) % self.ranks
            self._drawn += 1
            self._num_open[machine] += 1
            self._open[self.position] = _OpenGroup(
                group, machine, rank, unwritten=len(group.completions)
            )
            for index in range(len(group.completions)):
                self._ask(ROLLOUT, self.position, index)
            self.position += 1

    def _ask(self, role: str, position: int, index: int) -> None:
        opened = self._open[position]
        opened.unanswered += 1
        known = role == ROLLOUT and self.demand.known_lengths
        length = fmean(sizes[ROLLOUT] for sizes in opened.group.completions) if known else 0.0
        self.allocators[opened.machine].ask(
            len(self._requests), role, opened.rank, length=length
        )
        self._has_news.add(opened.machine)
        self._requests.append(
            _Request(role, position, index, opened.group.completions[index][role])
        )

    def _act(self, now: float, *, changed: Iterable[int]) -> None:
        """Carry out what the allocator decides, then find each changed slot's next end once."""
        slots = set(changed)
        decided = [
            (machine, action)
            for machine in self._has_news
            for action in self.allocators[machine].decide(now)
        ]
        self._has_news.clear()
        for machine, action in decided:
            slot = machine * self._num_slots + action.slot
            if isinstance(action, StartRequest):
                request = self._requests[action.request]
                request.began = now
                self._slots[slot].start(action.request, request.role, request.size, now)
                slots.add(slot)
            else:
                costs = self.machine.swap_s
                seconds = (costs.get(action.asleep, 0.0) + costs.get(action.awake, 0.0)) / 2
                self._uses.append((SWAP, slot, now, seconds))
                self._push(now + seconds, slot, _SWAP_ENDS, -1)
        for slot in slots:
            self._stamps[slot] += 1
            following = self._slots[slot].next_end()
            if following is not None:
                self._push(following[0], slot, self._stamps[slot], following[1])

    def _push(self, when: float, slot: int, stamp: int, request: int) -> None:
        heapq.heappush(self._events, (when, next(self._order), slot, stamp, request))

    def _end_request(self, slot: int, number: int, now: float) -> None:
        request = self._requests[number]
        opened = self._open[request.position]
        self._slots[slot].end(request.role, now)
        self._uses.append((request.role, slot, request.began, now - request.began))
        allocator = self.allocators[opened.machine]
        allocator.ended(number, now)
        if request.role == ROLLOUT:
            opened.unwritten -= 1
            indices: Iterable[int] = [request.index]
            if (
                allocator.gathers
            ):  # the scorers are asked about all completions once the last is written
                indices = [] if opened.unwritten else range(len(opened.group.completions))
            for index in indices:
                for role in opened.group.completions[index]:
                    if role != ROLLOUT:
                        self._ask(role, request.position, index)
        opened.unanswered -= 1
        if not opened.unanswered:
            del self._open[request.position]
            self._num_open[opened.machine] -= 1
            self._finished += 1
            self._kept += opened.group.teaches or not self.demand.dynamic
            self.yields.observe(taught=opened.group.teaches)
            self._draw()
