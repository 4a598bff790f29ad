"""The allocator of a machine's slots, shared by all ranks of the machine: an `Allocator` with a clock and listeners.

It runs in the event loop of the machine's only rank, or in a process of its own that several ranks reach over a socket
(`placement.service`). Ranks name roles, request numbers, sizes and slots, and never a prompt or a completion. Request n
is of rank n modulo the number of ranks. Slot k is swapped by rank k modulo that number (`home_rank`): it alone wakes the
slot's engines, puts them to sleep and sends them weights.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ycore.placement.allocator import Allocator
from ycore.placement.placement import StartRequest

_REPORT_EVERY_S = 1.0


class SlotListener(Protocol):
    """The calls that a rank gets from the allocator."""

    def start(self, request: int, slot: int) -> None:
        """Send this request to the slot's engine now."""

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        """Put the role `asleep` of a home slot to sleep, wake the role `awake`, then report `swapped`."""

    def queues(
        self,
        waiting: Mapping[str, int],
        in_flight: Mapping[str, int],
        oldest_s: Mapping[str, float],
    ) -> None:
        """Record how many requests wait by role, how many run by role and slot, and the age of the oldest of these."""


class SharedAllocator:
    """Decides after everything that happens at one moment, and reports the queues at most once a second."""

    rank = 0

    def __init__(self, allocator: Allocator, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.allocator = allocator
        self.pool = allocator.pool
        self._listeners: dict[int, SlotListener] = {}
        self._roles: dict[int, str] = {}  # of every request that was asked and has not ended
        self._arrived: dict[str, list[asyncio.Future[Any]]] = {}
        self._num_awake = 0
        self._is_waking = False
        self._decision_due = False
        self._report_due: asyncio.TimerHandle | None = None

    def listen(self, listener: SlotListener, rank: int = 0) -> None:
        self._listeners[rank] = listener

    def leave(self, rank: int) -> None:
        """Withdraw the requests of a rank that is gone."""
        del self._listeners[rank]
        for request in [request for request in self._roles if request % self.num_ranks == rank]:
            self.withdraw(request)

    def ask(self, request: int, role: str, length: float) -> None:
        """Queue a request. `length`: the expected length of its answer, 0 where unknown."""
        self._roles[request] = role
        self.allocator.ask(request, role, request % self.num_ranks, length=length)
        self._decide_soon()

    def ended(self, request: int) -> None:
        del self._roles[request]
        self.allocator.ended(request, time.perf_counter())
        self._decide_soon()

    def withdraw(self, request: int) -> None:
        role = self._roles.pop(request)
        self.allocator.withdraw(request, role, time.perf_counter(), request % self.num_ranks)
        self._decide_soon()

    def swapped(self, slot: int) -> None:
        self.allocator.swapped(slot, time.perf_counter())
        self._decide_soon()

    async def begin_round(self, state: Mapping[str, Any] | None) -> tuple[list[str], bool]:
        """Wait until all ranks begin a round; return the role to wake on each slot, and `Allocator.gathers`.

        `state`: what a checkpoint knows of the placement.
        """
        if state is not None:
            self.allocator.restore(state)
        begun: tuple[list[str], bool] = await self._when_all_arrive("begin", self._begin)
        return begun

    def _begin(self) -> tuple[list[str], bool]:
        self._is_waking = True
        if self.allocator.is_idle:  # else requests of an earlier round keep their places
            self.allocator.begin_round(time.perf_counter())
        return list(self.allocator.awake), self.allocator.gathers

    def engines_awake(self) -> None:
        """Let requests start once all ranks have called this."""
        self._num_awake += 1
        if self._num_awake == self.num_ranks:
            self._num_awake = 0
            self._is_waking = False
            self._decide_soon()

    async def end_round(self) -> tuple[list[float], list[float]]:
        """Wait until all ranks end the round; return `Allocator.measurements` and `Usage.sums`."""
        ended: tuple[list[float], list[float]] = await self._when_all_arrive("end", self._end)
        return ended

    def _end(self) -> tuple[list[float], list[float]]:
        usage = self.allocator.end_round(time.perf_counter())
        self._report_queues()
        return self.allocator.measurements(), usage.sums()

    async def learn(self, sums: list[float]) -> dict[str, Any]:
        """Learn from the measurements of all machines, added up; return the state for the next checkpoint."""
        self.allocator.learn(sums)
        return self.allocator.state()

    async def _when_all_arrive(self, event: str, act: Callable[[], Any]) -> Any:
        """Return what `act` returns once the last rank has come."""
        arrived = self._arrived.setdefault(event, [])
        future = asyncio.get_running_loop().create_future()
        arrived.append(future)
        if len(arrived) == self.num_ranks:
            del self._arrived[event]
            result = act()
            for waiting in arrived:
                if not waiting.done():
                    waiting.set_result(result)
        return await future

    def _decide_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._decision_due:
            self._decision_due = True
            loop.call_soon(self._decide)
        if self._report_due is None:
            self._report_due = loop.call_later(_REPORT_EVERY_S, self._report_queues)

    def _decide(self) -> None:
        self._decision_due = False
        if self._is_waking:
            return
        for action in self.allocator.decide(time.perf_counter()):
            if isinstance(action, StartRequest):
                rank = action.request % self.num_ranks
                self._listeners[rank].start(action.request, action.slot)
            elif (rank := home_rank(action.slot, self.num_ranks)) in self._listeners:
                self._listeners[rank].swap(action.slot, action.asleep, action.awake)

    def _report_queues(self) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        first = self._listeners.get(0)
        if first is None:
            return
        now = time.perf_counter()
        in_flight = {
            f"{role} {slot}": 0
            for role in self.pool.roles
            for slot in range(self.pool.num_slots)
        }
        oldest_s = {}
        for (role, slot), (number, began) in self.allocator.in_flight().items():
            in_flight[f"{role} {slot}"] = number
            oldest_s[f"{role} {slot}"] = round(now - began, 3)
        first.queues(self.allocator.waiting(), in_flight, oldest_s)


def home_rank(slot: int, num_ranks: int) -> int:
    return slot % num_ranks
