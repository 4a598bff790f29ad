"""Slots in a live run: each request to an engine is one turn of a role on a slot.

A slot has one engine per role. The allocator (`placement.allocator`) decides whose turn it is and which role is awake;
it has no clock and does no I/O. This file carries its decisions out in asyncio, and writes them to the trace.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from ycore.placement.allocator import Allocator
from ycore.placement.placement import ROLLOUT, SlotPool, Start, Swap
from ycore.round.peers import AddUp
from ycore.run.trace import IN_FLIGHT, ROUND, SWAP, WAITING, Levels, Mark, Span, TraceWriter

_DEPTHS_EVERY_S = 1.0


class Sleeper(Protocol):
    """An engine that can leave its device to another engine and come back."""

    async def sleep(self) -> None:
        """Free the device, and return once it is free. No request is sent to it meanwhile. It may sleep already."""

    async def wake(self) -> None:
        """Return once it answers again, with the weights it should have. It may be awake already."""


class Turn(int):
    """The slot's number. Its holder sets `num_tokens`, the answer's tokens, for the measured speed and the trace."""

    num_tokens: int = 0


class Slots:
    """The slots of one rank: `async with slots.turn(ROLLOUT) as slot: await engines[slot].complete(...)`.

    Without an allocator there are no roles to place: a request goes to the slot with the fewest in flight.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        allocator: Allocator | None = None,
        sleepers: Mapping[str, Sequence[Sleeper]] | None = None,
        trace: TraceWriter | None = None,
        rank: int = 0,
    ) -> None:
        """`sleepers[role][slot]`: the engines that share a device in time. Without them all engines stay awake."""
        self.allocator = allocator or Allocator(SlotPool(num_slots))
        self._roles = self.allocator.pool.roles
        self._sleepers, self._rank = sleepers, rank
        self._trace = trace or TraceWriter(None)
        self._depths = Depths(self.allocator, self._trace, rank)
        self._numbers = itertools.count()
        self._granted: dict[int, asyncio.Future[int]] = {}
        self._swaps: set[asyncio.Task[None]] = set()
        self._is_due = False
        self._began = time.perf_counter()
        self._since_epoch = time.time() - time.perf_counter()
        assert self.allocator.pool.num_slots == num_slots

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[Turn]:
        """A turn on the slot that the placement gives this request; waits until a slot has room."""
        request, placed = next(self._numbers), role if role in self._roles else ROLLOUT
        granted = self._granted[request] = asyncio.get_running_loop().create_future()
        asked = time.perf_counter()
        self.allocator.ask(request, placed)
        self._decide_soon()
        try:
            turn = Turn(await granted)
            began = time.perf_counter()
            yield turn
        except BaseException:
            self.allocator.withdraw(request, placed, time.perf_counter())
            raise
        else:
            now = time.perf_counter()
            self.allocator.ended(request, now, size=float(turn.num_tokens or 1))
            waited_s = round(began - asked, 6)
            self._record(role, turn, began, now, request=request, tokens=turn.num_tokens, waited_s=waited_s)
        finally:
            self._granted.pop(request, None)
            self._decide_soon()

    def begin_phase(self, name: str) -> None:
        self._trace.add(Mark(name, self._rank, time.time()))
        self._trace.flush()

    def begin_round(self) -> None:
        """Apply the starting division. Requests of an earlier round that are still in flight keep their places."""
        self.begin_phase(ROUND)
        self._began = time.perf_counter()
        self._since_epoch = time.time() - self._began  # measured anew: over days the two clocks drift apart
        if self.allocator.is_idle and not self._swaps:
            self.allocator.begin_round(self._began)

    def end_round(self, add_up: AddUp, *, step: int = 0) -> dict[str, float]:
        """The round's metrics over all ranks. What all ranks learned decides how the next round starts on each.

        Every rank calls this once a round, since `add_up` is a collective.
        """
        now = time.perf_counter()
        usage = self.allocator.end_round(now)
        own = self.allocator.numbers()
        spent = [usage.seconds * len(usage.busy_s), sum(usage.busy_s), sum(usage.swap_s), float(usage.swaps)]
        sums = add_up([*own, *spent])
        self.allocator.learn(sums[: len(own)])
        self._record(ROUND, -1, self._began, now, step=step, idle_share=round(usage.idle_share, 4))
        self._depths.write()
        return usage_metrics(sums[len(own) :])

    @asynccontextmanager
    async def awake(self, role: str | None = None) -> AsyncIterator[None]:
        """Wake the engines of the placement, or of `role`, and put all engines to sleep afterwards.

        They sleep after a cancellation too, since a trainer that was asked to stop needs room to save. After an error
        they are left as they are. Without sleepers nothing happens.
        """
        try:
            if self._sleepers is not None:
                awake = enumerate(self.allocator.awake)
                await asyncio.gather(*(self._sleepers[role or placed][slot].wake() for slot, placed in awake))
            yield
        except asyncio.CancelledError:
            await self.sleep()
            raise
        await self.sleep()

    async def sleep(self) -> None:
        """Put all engines of all slots to sleep, once no swap is under way."""
        await asyncio.gather(*self._swaps, return_exceptions=True)
        sleepers = (self._sleepers or {}).values()
        await asyncio.gather(*(engine.sleep() for engines in sleepers for engine in engines))

    def _decide_soon(self) -> None:
        """Decide at once with one role; with several, after everything that happens at this moment."""
        self._depths.write_soon()
        if len(self._roles) == 1:
            self._decide()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._is_due = False
        for action in self.allocator.decide(time.perf_counter()):
            if isinstance(action, Start):
                granted = self._granted.get(action.request)
                if granted is not None and not granted.done():
                    granted.set_result(action.slot)
            elif self._sleepers is None:
                self._end_swap(action, time.perf_counter())
            else:
                task = asyncio.get_running_loop().create_task(self._swap(action, self._sleepers))
                self._swaps.add(task)
                task.add_done_callback(self._swap_done)

    async def _swap(self, swap: Swap, sleepers: Mapping[str, Sequence[Sleeper]]) -> None:
        began = time.perf_counter()
        await sleepers[swap.asleep][swap.slot].sleep()
        await sleepers[swap.awake][swap.slot].wake()
        self._end_swap(swap, began)

    def _end_swap(self, swap: Swap, began: float) -> None:
        now = time.perf_counter()
        self.allocator.swapped(swap.slot, now)
        self._record(SWAP, swap.slot, began, now, asleep=swap.asleep, awake=swap.awake)
        self._decide_soon()

    def _swap_done(self, task: asyncio.Task[None]) -> None:
        """A swap that failed fails every waiting turn: none of them can count on its slot."""
        self._swaps.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            for granted in self._granted.values():
                if not granted.done():
                    granted.set_exception(error)

    def _record(self, name: str, slot: int, began: float, ended: float, **details: object) -> None:
        self._trace.add(Span(name, self._rank, int(slot), began + self._since_epoch, ended - began, details))


class Depths:
    """Queue depths in the trace: requests that wait, by role, and requests in flight, by role and slot."""

    def __init__(self, allocator: Allocator, trace: TraceWriter, rank: int) -> None:
        self._allocator, self._trace, self._rank = allocator, trace, rank
        self._due: asyncio.TimerHandle | None = None

    def write_soon(self) -> None:
        """Something has changed: write within a second, together with what else changes until then."""
        if self._due is None and self._trace.path is not None:
            self._due = asyncio.get_running_loop().call_later(_DEPTHS_EVERY_S, self.write)

    def write(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        now, moment = time.time(), time.perf_counter()
        in_flight = {f"{role} {slot}": depth for (role, slot), depth in self._allocator.in_flight().items()}
        pool = self._allocator.pool
        counts = {f"{role} {slot}": 0 for role in pool.roles for slot in range(pool.num_slots)}
        counts |= {name: count for name, (count, _) in in_flight.items()}
        oldest = {name: round(moment - began, 3) for name, (_, began) in in_flight.items()}
        self._trace.add(Levels(WAITING, self._rank, now, self._allocator.waiting()))
        self._trace.add(Levels(IN_FLIGHT, self._rank, now, counts, oldest))
        self._trace.flush()


def usage_metrics(sums: Sequence[float]) -> dict[str, float]:
    """A step's metrics from sums over ranks: slot seconds, busy seconds, swap seconds, number of swaps.

    `ycore/bound_ratio` is slot seconds over busy seconds: 1 is a round in which no slot was ever idle.
    """
    slot_s, busy_s, swap_s, swaps = sums
    return {
        "ycore/idle_share": max(0.0, 1 - (busy_s + swap_s) / slot_s) if slot_s > 0 else 0.0,
        "ycore/bound_ratio": slot_s / busy_s if busy_s > 0 else 1.0,
        "ycore/swaps": swaps,
        "ycore/swap_s": swap_s,
    }
