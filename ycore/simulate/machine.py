"""One slot in virtual time: engines with continuous batching, each request a token a step of its engine.

All requests of an engine advance alike, so one number says how far they are: the tokens each would have got since the
round began. A request of n tokens ends when that number has grown by n; finding the next end is a heap's top. While an
engine reads a new request's prompt, the others in it wait.

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
