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
    speed: Speed
    tokens: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)


class VirtualSlot:
    """The engines of all roles on one slot. Those that have work share the slot evenly, as processes share a core."""

    def __init__(self, speeds: Mapping[str, Speed]) -> None:
        self._engines = {role: _Engine(speed) for role, speed in speeds.items()}
        self._now = 0.0

    def start(self, request: int, role: str, size: float, now: float) -> None:
        self._advance(now)
        engine = self._engines[role]
        heapq.heappush(engine.ends, (engine.tokens + size, request))

    def next_end(self) -> tuple[float, int, str] | None:
        """(when, request, role) of the request that ends first if nothing else comes."""
        busy = [(role, engine) for role, engine in self._engines.items() if engine.ends]
        found = [
            (self._now + (engine.ends[0][0] - engine.tokens) * _step_s(engine, len(busy)), engine.ends[0][1], role)
            for role, engine in busy
        ]
        return min(found, default=None)

    def end(self, role: str, now: float) -> None:
        """Take out what `next_end` told."""
        self._advance(now)
        engine = self._engines[role]
        engine.tokens, _ = heapq.heappop(engine.ends)  # exactly there, whatever the rounding

    def _advance(self, now: float) -> None:
        busy = [engine for engine in self._engines.values() if engine.ends]
        for engine in busy:
            engine.tokens += (now - self._now) / _step_s(engine, len(busy))
        self._now = now


def _step_s(engine: _Engine, num_busy: int) -> float:
    return engine.speed.step_s(len(engine.ends)) * num_busy
