"""Slots: whose turn it is on which slot, request by request and role by role.

Every request to an engine is one turn of a role on a slot. A slot has one engine a role; which of them is asked is for
whoever takes the turn.

Not here: the engines, and what is asked of them (`round`).
"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ROLLOUT = "rollout"


class Slots:
    """Example: `async with slots.turn(ROLLOUT) as slot: await engines[slot].complete(...)`."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._in_flight: Counter[int] = Counter()

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[int]:
        """The slot with the fewest requests in flight, for one request of this role."""
        slot = min(range(self._num_slots), key=lambda slot: self._in_flight[slot])
        self._in_flight[slot] += 1
        try:
            yield slot
        finally:
            self._in_flight[slot] -= 1
