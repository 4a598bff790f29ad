"""Queue depths for the trace: how many requests of each role wait, and how many are in flight on each slot.

A second passes between one look and the next, whatever happens meanwhile, so a look costs little: a line for what
waits, one for what is in flight.

Not here: turns and swaps, of which each is recorded (`dispatch`), and who reads this (`telemetry.activity`).
"""

import asyncio
import time

from ycore.placement.allocator import Allocator
from ycore.telemetry.trace import IN_FLIGHT, WAITING, Levels, NullTrace

_EVERY_S = 1.0


class Depths:
    """Example: `depths.tell_soon()` at every turn's begin and end, `depths.tell()` at the end of a round."""

    def __init__(self, allocator: Allocator, trace: NullTrace, rank: int) -> None:
        self._allocator = allocator
        self._trace = trace
        self._rank = rank
        self._due: asyncio.TimerHandle | None = None

    def tell_soon(self) -> None:
        """Something has changed: it is told within a second, together with what else changes until then."""
        if self._due is None and self._trace.is_kept:
            self._due = asyncio.get_running_loop().call_later(_EVERY_S, self.tell)

    def tell(self) -> None:
        """As it is now, and on disk."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        now, moment = time.time(), time.perf_counter()
        flying = {f"{role} {slot}": told for (role, slot), told in self._allocator.in_flight().items()}
        hall = self._allocator.hall
        counts = {f"{role} {slot}": 0 for role in hall.roles for slot in range(hall.num_slots)}
        counts |= {name: count for name, (count, _) in flying.items()}
        oldest = {name: round(moment - began, 3) for name, (_, began) in flying.items()}
        self._trace.add(Levels(WAITING, self._rank, now, self._allocator.waiting()))
        self._trace.add(Levels(IN_FLIGHT, self._rank, now, counts, oldest))
        self._trace.flush()
