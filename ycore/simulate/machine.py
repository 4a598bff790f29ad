"""One slot in virtual time: engines with continuous batching, each request a token a step of its engine.

All requests of an engine advance alike, so one number says how far they are: the tokens each would have got since the
round began. A request of n tokens ends when that number has grown by n; finding the next end is a heap's top.

Not here: which request comes to which slot (`placement.allocator`).
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from ycore.placement.load import Speed


@dataclass(slots=True)
class _Engine:
    role: str
    speed: Speed
    tokens: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)


class VirtualSlot:
    """The engines of all roles on one slot. Those that have work share the slot evenly, as processes share a core."""

    __slots__ = ("_busy", "_engines", "_now")

    def __init__(self, speeds: Mapping[str, Speed]) -> None:
        self._engines = {role: _Engine(role, speed) for role, speed in speeds.items()}
        self._busy: list[_Engine] = []
        self._now = 0.0

    def start(self, request: int, role: str, size: float, now: float) -> None:
        self._advance(now)
        engine = self._engines[role]
        if not engine.ends:
            self._busy.append(engine)
        heapq.heappush(engine.ends, (engine.tokens + size, request))

    def next_end(self) -> tuple[float, int, str] | None:
        """(when, request, role) of the request that ends first if nothing else comes."""
        first = None
        for engine in self._busy:
            tokens, request = engine.ends[0]
            found = (self._now + (tokens - engine.tokens) * self._step_s(engine), request, engine.role)
            first = found if first is None or found < first else first
        return first

    def end(self, role: str, now: float) -> None:
        """Take out what `next_end` told."""
        self._advance(now)
        engine = self._engines[role]
        engine.tokens, _ = heapq.heappop(engine.ends)  # exactly there, whatever the rounding
        if not engine.ends:
            self._busy.remove(engine)

    def _advance(self, now: float) -> None:
        passed = now - self._now
        if passed:
            for engine in self._busy:
                engine.tokens += passed / self._step_s(engine)
        self._now = now

    def _step_s(self, engine: _Engine) -> float:
        return (engine.speed.base + engine.speed.each * len(engine.ends)) * len(self._busy)
