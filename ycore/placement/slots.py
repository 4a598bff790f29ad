"""The slots of a machine in a live run: each request to an engine holds a slot while it runs.

A slot has one engine for each role. The allocator of the machine decides which request goes where and which role is
awake (`placement.allocator`). Here a rank asks for slots, wakes and sleeps the engines of its home slots, and writes
the trace.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from ycore.errors import RunError
from ycore.placement.allocator import Allocator, usage_metrics
from ycore.placement.placement import ROLLOUT, SlotPool
from ycore.placement.service import RemoteAllocator, SharedAllocator
from ycore.run.trace import IN_FLIGHT, ROUND, SWAP, WAITING, Levels, Mark, Span, TraceWriter

E = TypeVar("E")
AddUp = Callable[[Sequence[float]], list[float]]
"""Returns the element-wise sum over all ranks."""


class Sleeper(Protocol):
    """An engine that can leave its device to another engine and come back."""

    async def sleep(self) -> None:
        """Free the device, and return once it is free. No request is sent to it meanwhile. It may sleep already."""

    async def wake(self) -> None:
        """Return once it answers again, with the weights it should have. It may be awake already."""


class SlotLease(int):
    """The number of the slot that a request holds. The holder sets `num_tokens`, the tokens of the answer.

    `seed` (`completion_seed`) says in the trace which completion the request is of.
    """

    num_slots: int = 1
    num_tokens: int = 0
    seed: int | None = None

    def pick(self, engines: Sequence[E]) -> E:
        """Return the engine of this slot, from one model's engines slot by slot; of several, the least busy."""
        engines_per_slot = len(engines) // self.num_slots
        first = self * engines_per_slot
        return min(
            engines[first : first + engines_per_slot],
            key=lambda engine: getattr(engine, "in_flight", 0),
        )


class Slots:
    """A machine's slots as one rank uses them: `async with slots.turn(ROLLOUT) as slot: slot.pick(engines)...`

    Without roles to place, a request goes to the slot with the fewest in flight. `gathers`: see `Allocator.gathers`.
    `state`: what the allocator has learned, for a checkpoint; None on ranks but the first of the machine.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        allocator: Allocator | RemoteAllocator | None = None,
        sleepers: Mapping[str, Mapping[int, Sleeper]] | None = None,
        trace: TraceWriter | None = None,
        rank: int = 0,
    ) -> None:
        """
        Args:
            allocator: one of this rank alone, or a connection to the one that the machine's ranks share.
            sleepers: by role and home slot of this rank, the engines that share a device in time. None: all engines
                stay awake.
            rank: of this process in the whole run.
        """
        self._trace = trace or TraceWriter(None)
        self._allocator = (
            allocator
            if isinstance(allocator, RemoteAllocator)
            else SharedAllocator(allocator or Allocator(SlotPool(num_slots)))
        )
        self._allocator.listen(self)
        self._pool = self._allocator.pool
        self._sleepers = sleepers
        self._rank = rank
        self._machine_rank = (
            rank - self._allocator.rank
        )  # of its first rank, which has the slots' lanes
        self._numbers = itertools.count(self._allocator.rank, self._allocator.num_ranks)
        self._granted: dict[int, asyncio.Future[int]] = {}
        self._swaps: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._awake: Sequence[str] = ()
        self._measured: tuple[list[float], list[float]] | None = None
        self._restored: dict[str, Any] | None = None
        self._began = time.perf_counter()
        self.gathers = False
        self.state: dict[str, Any] | None = None

    async def open(self, *, timeout_s: float) -> None:
        """Reach the allocator; RunError where it is not there in time."""
        if isinstance(self._allocator, RemoteAllocator):
            await self._allocator.open(self._fail, timeout_s=timeout_s)

    def close(self) -> None:
        if isinstance(self._allocator, RemoteAllocator):
            self._allocator.close()

    @asynccontextmanager
    async def turn(self, role: str, length: float = 0.0) -> AsyncIterator[SlotLease]:
        """Hold a slot of the placement for one request; wait until a slot has room.

        `length`: the expected length of the answer, in any unit. The longest waiting request comes first.
        """
        request = next(self._numbers)
        asked_at = time.perf_counter()
        self._raise_error()
        granted = self._granted[request] = asyncio.get_running_loop().create_future()
        try:
            self._allocator.ask(request, role if role in self._pool.roles else ROLLOUT, length)
            lease = SlotLease(await granted)
            lease.num_slots = self._pool.num_slots
            began = time.perf_counter()
            yield lease
        except BaseException:
            if self._error is None:
                with suppress(RunError):  # the allocator is gone
                    self._allocator.withdraw(request)
            raise
        finally:
            del self._granted[request]
        self._raise_error()
        self._allocator.ended(request)
        seed = {} if lease.seed is None else {"seed": lease.seed}
        self._record(
            role,
            lease,
            began,
            request=request,
            tokens=lease.num_tokens,
            waited_s=round(began - asked_at, 6),
            **seed,
            asked_by=self._rank,
        )

    def begin_phase(self, name: str) -> None:
        self._trace.add(Mark(name, self._rank, time.time()))
        self._trace.flush()

    @asynccontextmanager
    async def round(self, phase: str = ROUND) -> AsyncIterator[None]:
        """Hold a round on all ranks of the machine: it begins when all have come, and is over when all have ended.

        In between, one engine of each slot is awake where engines sleep. They sleep after a cancellation too, since a
        trainer that was asked to stop needs room to save. After an error they are left as they are.
        """
        self.begin_phase(phase)
        self._began = time.perf_counter()
        restored = self._restored
        self._restored = None
        self._awake, self.gathers = await self._allocator.begin_round(restored)
        async with self.awake():
            self._allocator.engines_awake()
            yield
            self._measured = await self._allocator.end_round()

    async def end_round(
        self, add_up: AddUp, *, step: int = 0, trains: bool = True
    ) -> dict[str, float]:
        """Return the round's metrics over all machines. What they learned decides how the next round starts on each.

        Every rank calls this once a round, since `add_up` is a collective.
        """
        seconds = time.perf_counter() - self._began
        began_at = time.time() - seconds
        assert self._measured is not None, "the round is over"
        measurements, usage = self._measured
        sums = [*measurements, *usage]
        leads = self._allocator.rank == 0
        if not leads:  # a machine's numbers are added once
            sums = [0.0] * len(sums)
        sums = add_up(sums)
        if leads:
            self.state = await self._allocator.learn(sums[: len(measurements)])
        if trains:
            idle_share = usage_metrics(usage)["ycore/idle_share"]
            details = {"step": step, "idle_share": round(idle_share, 4)}
            self._trace.add(Span(ROUND, self._rank, -1, began_at, seconds, details))
        self._trace.flush()
        return usage_metrics(sums[len(measurements) :])

    def state_dict(self) -> dict[str, Any] | None:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` was; it counts from the next round on."""
        if self._allocator.rank == 0:
            self.state = state
            self._restored = state

    @asynccontextmanager
    async def awake(self, role: str | None = None) -> AsyncIterator[None]:
        """Wake the placement's engines on this rank's home slots, or those of `role`; let all sleep afterwards."""
        try:
            if self._sleepers is not None:
                home_slots = self._sleepers[ROLLOUT]
                engines = [
                    self._sleepers[role or self._awake[slot]][slot] for slot in home_slots
                ]
                await asyncio.gather(*(engine.wake() for engine in engines))
            yield
        except asyncio.CancelledError:
            await self.sleep()
            raise
        await self.sleep()

    async def sleep(self) -> None:
        """Put all engines of this rank's home slots to sleep, once no swap is under way."""
        await asyncio.gather(*self._swaps, return_exceptions=True)
        if self._sleepers is not None:
            engines = [engine for slots in self._sleepers.values() for engine in slots.values()]
            await asyncio.gather(*(engine.sleep() for engine in engines))

    # -- what the allocator calls (`SlotListener`) -------------------------------------------------------------------

    def start(self, request: int, slot: int) -> None:
        granted = self._granted.get(request)
        if granted is not None and not granted.done():
            granted.set_result(slot)

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        task = asyncio.get_running_loop().create_task(self._swap(slot, asleep, awake))
        self._swaps.add(task)
        task.add_done_callback(self._swap_done)

    async def _swap(self, slot: int, asleep: str, awake: str) -> None:
        began = time.perf_counter()
        if self._sleepers is not None:
            await self._sleepers[asleep][slot].sleep()
            await self._sleepers[awake][slot].wake()
        self._allocator.swapped(slot)
        self._record(SWAP, slot, began, asleep=asleep, awake=awake)

    def _swap_done(self, task: asyncio.Task[None]) -> None:
        self._swaps.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def queues(
        self,
        waiting: Mapping[str, int],
        in_flight: Mapping[str, int],
        oldest_s: Mapping[str, float],
    ) -> None:
        now = time.time()
        self._trace.add(Levels(WAITING, self._machine_rank, now, waiting))
        self._trace.add(Levels(IN_FLIGHT, self._machine_rank, now, in_flight, oldest_s))
        self._trace.flush()

    def _fail(self, error: BaseException) -> None:
        """Fail all requests, now and later: a swap failed, or the allocator is gone."""
        self._error = error
        for granted in self._granted.values():
            if not granted.done():
                granted.set_exception(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _record(self, name: str, slot: int, began: float, **details: object) -> None:
        """Add what has taken from `began` until now."""
        seconds = time.perf_counter() - began
        began_at = time.time() - seconds
        self._trace.add(Span(name, self._machine_rank, int(slot), began_at, seconds, details))
