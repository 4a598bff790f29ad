"""Slots in a live run: each request to an engine is one turn of a role on a slot.

A slot has one engine per role. The allocator of the machine decides whose turn it is and which role is awake
(`placement.allocator`); it has no clock and does no I/O. This file is what a rank does about it, in asyncio: it asks
for turns, wakes the engines of its own slots and puts them to sleep, and writes the trace.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from ycore.errors import RunError
from ycore.placement.allocator import Allocator
from ycore.placement.line import Line, OwnLine
from ycore.placement.placement import ROLLOUT, SlotPool
from ycore.placement.slot_pool import Message
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


class Turn(int):
    """The slot's number. Its holder sets `num_tokens`, the answer's tokens, for the measured speed and the trace.

    `seed`, in the trace too, tells which completion's turn it was (`completion_seed`).
    """

    num_slots: int = 1
    num_tokens: int = 0
    seed: int | None = None

    def pick(self, engines: Sequence[E]) -> E:
        """Of one model's engines, slot by slot: that of this slot; of several there, the one least busy with us."""
        each = len(engines) // self.num_slots
        return min(
            engines[self * each : (self + 1) * each],
            key=lambda engine: getattr(engine, "in_flight", 0),
        )


class Slots:
    """A machine's slots, as one of its ranks has them: `async with slots.turn(ROLLOUT) as turn: turn.pick(engines)...`

    Without roles to place, a request goes to the slot with the fewest in flight. `gathers`: see `Allocator.gathers`.
    `state`: what the allocator has learned, for a checkpoint; None on ranks but the first of the machine.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        allocator: Allocator | None = None,
        line: Line | None = None,
        sleepers: Mapping[str, Mapping[int, Sleeper]] | None = None,
        trace: TraceWriter | None = None,
        rank: int = 0,
    ) -> None:
        """
        Args:
            allocator: of slots that are this rank's alone.
            line: to the allocator of slots that several ranks share; `rank` is this one's number in the run.
            sleepers: by role and slot, the engines that share a device in time, of the slots whose home this rank is.
                Without them all engines stay awake.
        """
        self._trace = trace or TraceWriter(None)
        allocator = allocator or Allocator(SlotPool(num_slots))
        self._line = line or OwnLine(allocator, shows_depths=self._trace.path is not None)
        self._line.listen(self._receive, self._fail)
        self._roles = self._line.pool.roles
        self._sleepers, self._rank, self._lanes = sleepers, rank, rank - self._line.rank
        self._numbers = itertools.count(self._line.rank, self._line.num_ranks)
        self._granted: dict[int, asyncio.Future[int]] = {}
        self._answers: dict[
            str, asyncio.Future[Message]
        ] = {}  # by the kind of letter that is waited for
        self._swaps: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._awake: Sequence[str] = ()
        self._over: tuple[list[float], list[float]] | None = None
        self._restored: dict[str, Any] | None = None
        self._began = time.perf_counter()
        self._since_epoch = time.time() - time.perf_counter()
        self.gathers = False
        self.state: dict[str, Any] | None = None
        assert self._line.pool.num_slots == num_slots

    async def open(self, *, timeout_s: float) -> None:
        """Reach the allocator; RunError where it is not there in time."""
        await self._line.open(timeout_s=timeout_s)

    def close(self) -> None:
        self._line.close()

    @asynccontextmanager
    async def turn(self, role: str, length: float = 0.0) -> AsyncIterator[Turn]:
        """A turn on the slot that the placement gives this request; waits until a slot has room.

        `length`: how long its answer likely is, in any unit. Of what waits, the longest comes first.
        """
        request, placed = next(self._numbers), role if role in self._roles else ROLLOUT
        asked = time.perf_counter()
        self._tell(["ask", request, placed, length])
        granted = self._granted[request] = asyncio.get_running_loop().create_future()
        try:
            turn = Turn(await granted)
            turn.num_slots = self._line.pool.num_slots
            began = time.perf_counter()
            yield turn
        except BaseException:
            with suppress(RunError):  # without an allocator there is nobody to give it back to
                self._tell(["withdraw", request])
            raise
        finally:
            self._granted.pop(request, None)
        now = time.perf_counter()
        self._tell(["ended", request, float(turn.num_tokens or 1)])
        details = {
            "request": request,
            "tokens": turn.num_tokens,
            "waited_s": round(began - asked, 6),
        }
        details |= {} if turn.seed is None else {"seed": turn.seed}
        self._record(role, turn, began, now, **details, asked_by=self._rank)

    def begin_phase(self, name: str) -> None:
        self._trace.add(Mark(name, self._rank, time.time()))
        self._trace.flush()

    @asynccontextmanager
    async def round(self, phase: str = ROUND) -> AsyncIterator[None]:
        """A round, on all ranks of the machine: it begins when all have come, and is over when all have ended.

        In between, one engine of each slot is awake where they sleep. They sleep after a cancellation too, since a
        trainer that was asked to stop needs room to save. After an error they are left as they are.
        """
        self.begin_phase(phase)
        self._began = time.perf_counter()
        self._since_epoch = (
            time.time() - self._began
        )  # measured anew: over days the two clocks drift apart
        restored, self._restored = self._restored, None
        _, self._awake, self.gathers = await self._ask(["begin", restored], "begun")
        async with self.awake():
            self._tell(["awake"])
            yield
            _, numbers, spent = await self._ask(["end"], "over")
            self._over = numbers, spent

    async def end_round(
        self, add_up: AddUp, *, step: int = 0, trains: bool = True
    ) -> dict[str, float]:
        """The round's metrics over all machines. What all of them learned decides how the next round starts on each.

        Every rank calls this once a round, since `add_up` is a collective.
        """
        now = time.perf_counter()
        assert self._over is not None, "the round is over"
        numbers, spent = self._over
        slot_s, busy_s, swap_s, _ = spent
        leads = self._line.rank == 0  # a machine's numbers are added once
        sums = add_up([*numbers, *spent] if leads else [0.0] * (len(numbers) + len(spent)))
        if leads:
            _, self.state = await self._ask(["learn", sums[: len(numbers)]], "learned")
        idle_share = max(0.0, 1 - (busy_s + swap_s) / slot_s) if slot_s > 0 else 0.0
        if trains:
            shown = {"step": step, "idle_share": round(idle_share, 4)}
            self._trace.add(self._span(ROUND, self._rank, -1, self._began, now, **shown))
        self._trace.flush()
        return usage_metrics(sums[len(numbers) :])

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take what `state` was; it counts from the next round on."""
        if state is not None and self._line.rank == 0:
            self.state = self._restored = state

    @asynccontextmanager
    async def awake(self, role: str | None = None) -> AsyncIterator[None]:
        """Wake the engines of the placement on this rank's own slots, or those of `role`; let all sleep afterwards."""
        try:
            if self._sleepers is not None:
                slots = self._sleepers[ROLLOUT]
                awake = {slot: self._awake[slot] if role is None else role for slot in slots}
                await asyncio.gather(
                    *(self._sleepers[placed][slot].wake() for slot, placed in awake.items())
                )
            yield
        except asyncio.CancelledError:
            await self.sleep()
            raise
        await self.sleep()

    async def sleep(self) -> None:
        """Put all engines of this rank's own slots to sleep, once no swap is under way."""
        await asyncio.gather(*self._swaps, return_exceptions=True)
        sleepers = (self._sleepers or {}).values()
        await asyncio.gather(
            *(engine.sleep() for engines in sleepers for engine in engines.values())
        )

    def _tell(self, message: Message) -> None:
        if self._error is not None:
            raise self._error
        self._line.send(message)

    async def _ask(self, message: Message, answer: str) -> Message:
        """Send a message, and wait for the letter of this kind."""
        waited_for: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[answer] = waited_for
        self._tell(message)
        return await waited_for

    def _receive(self, letter: Message) -> None:
        match letter:
            case ["start", request, slot]:
                granted = self._granted.get(request)
                if granted is not None and not granted.done():
                    granted.set_result(slot)
            case ["swap", slot, asleep, awake]:
                task = asyncio.get_running_loop().create_task(self._swap(slot, asleep, awake))
                self._swaps.add(task)
                task.add_done_callback(self._swap_done)
            case ["depths", waiting, in_flight, oldest_s]:
                now = time.time()
                self._trace.add(Levels(WAITING, self._lanes, now, waiting))
                self._trace.add(Levels(IN_FLIGHT, self._lanes, now, in_flight, oldest_s))
                self._trace.flush()
            case [kind, *_] if kind in self._answers and not self._answers[kind].done():
                self._answers[kind].set_result(letter)

    async def _swap(self, slot: int, asleep: str, awake: str) -> None:
        began = time.perf_counter()
        if self._sleepers is not None:
            await self._sleepers[asleep][slot].sleep()
            await self._sleepers[awake][slot].wake()
        self._tell(["swapped", slot])
        self._record(SWAP, slot, began, time.perf_counter(), asleep=asleep, awake=awake)

    def _swap_done(self, task: asyncio.Task[None]) -> None:
        self._swaps.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """A swap failed, or the allocator is gone: nothing that waits can count on its slot, now or later."""
        self._error = error
        waiting: list[asyncio.Future[Any]] = [*self._granted.values(), *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)

    def _record(self, name: str, slot: int, began: float, ended: float, **details: object) -> None:
        """What happened on a slot; all slots of a machine are lanes of its first rank."""
        self._trace.add(self._span(name, self._lanes, slot, began, ended, **details))

    def _span(
        self, name: str, rank: int, slot: int, began: float, ended: float, **details: object
    ) -> Span:
        return Span(name, rank, int(slot), began + self._since_epoch, ended - began, details)


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
