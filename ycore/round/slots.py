"""Slots: whose turn it is on which slot, request by request and role by role.

Every request to an engine is one turn of a role on a slot. A slot has one engine a role; which of them is asked is for
whoever takes the turn. Decisions come from the allocator, which has no clock and no I/O; this is its shell in asyncio.

Queue depths for the trace: how many requests of each role wait, and how many are in flight on each slot.

From a run's configuration and its engines to the Slots of one rank, and to who sleeps there.

Not here: the decisions (`placement.allocator`), the engines, and what is asked of them (`round`).
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from ycore.config.schema import RunConfig
from ycore.engine import Engine
from ycore.engine.server import Server
from ycore.engine.sleeping import SleepingEngine, SleepTogether
from ycore.engine.vllm_engine import VllmEngine
from ycore.placement.allocator import Allocator
from ycore.placement.learning import SleepLevels
from ycore.placement.load import Usage
from ycore.placement.placement import ROLLOUT, SlotPool, Start, Swap, in_order, parse_placement
from ycore.round.peers import AddUp
from ycore.run.paths import RunFolder
from ycore.run.trace import IN_FLIGHT, ROUND, SWAP, WAITING, Levels, Mark, NullTrace, Span, TraceWriter

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
        pool = self._allocator.pool
        counts = {f"{role} {slot}": 0 for role in pool.roles for slot in range(pool.num_slots)}
        counts |= {name: count for name, (count, _) in flying.items()}
        oldest = {name: round(moment - began, 3) for name, (_, began) in flying.items()}
        self._trace.add(Levels(WAITING, self._rank, now, self._allocator.waiting()))
        self._trace.add(Levels(IN_FLIGHT, self._rank, now, counts, oldest))
        self._trace.flush()


__all__ = ["ROLLOUT", "Sleeper", "Slots", "Turn", "usage_metrics"]


class Sleeper(Protocol):
    """An engine that can leave its device to another and come back."""

    async def sleep(self) -> None:
        """Free the device; returns once it is free. It is asked for nothing while it sleeps. It may sleep already."""

    async def wake(self) -> None:
        """Return once it can be asked again, with the weights it should have. It may be awake already."""


class Turn(int):
    """The slot's number. Whoever knows how many tokens the answer has says so in `num_tokens`, for speed and trace."""

    num_tokens: int = 0


class Slots:
    """Example: `async with slots.turn(ROLLOUT) as slot: await engines[slot].complete(...)`.

    Without an allocator there are no roles to place: the slot with the fewest in flight is asked, whatever the role.
    `sleepers[role][slot]` are the engines that take turns on a device; without them all stay up.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        allocator: Allocator | None = None,
        sleepers: Mapping[str, Sequence[Sleeper]] | None = None,
        trace: NullTrace | None = None,
        rank: int = 0,
    ) -> None:
        self._allocator = allocator or Allocator(SlotPool(num_slots))
        self._roles = self._allocator.pool.roles
        self._sleepers = sleepers
        self._trace = trace or NullTrace()
        self._rank = rank
        self._depths = Depths(self._allocator, self._trace, rank)
        self._numbers = itertools.count()
        self._granted: dict[int, asyncio.Future[int]] = {}
        self._swaps: set[asyncio.Task[None]] = set()
        self._is_due = False
        self._began = time.perf_counter()
        self._since_epoch = time.time() - time.perf_counter()
        assert self._allocator.pool.num_slots == num_slots

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[Turn]:
        """A turn on the slot that the placement gives this request; waits until there is room on one."""
        request, placed = next(self._numbers), role if role in self._roles else ROLLOUT
        granted = self._granted[request] = asyncio.get_running_loop().create_future()
        asked = time.perf_counter()
        self._allocator.ask(request, placed)
        self._decide_soon()
        try:
            turn = Turn(await granted)
            began = time.perf_counter()
            yield turn
        except BaseException:
            self._allocator.withdraw(request, placed, time.perf_counter())
            raise
        else:
            now = time.perf_counter()
            self._allocator.ended(request, now, size=float(turn.num_tokens or 1))
            told = {"request": request, "tokens": turn.num_tokens, "waited_s": round(began - asked, 6)}
            self._record(role, turn, began, now, **told)
        finally:
            self._granted.pop(request, None)
            self._decide_soon()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def begin_phase(self, name: str) -> None:
        """Tell the trace, and whoever follows it, what the step is at from now on."""
        self._trace.add(Mark(name, self._rank, time.time()))
        self._trace.flush()

    def begin_round(self) -> None:
        """The starting division applies; requests of an earlier round that were not given up yet keep their places."""
        self.begin_phase(ROUND)
        self._began = time.perf_counter()
        self._since_epoch = time.time() - self._began  # anew: over days the two clocks drift apart
        if self._allocator.is_idle and not self._swaps:
            self._allocator.begin_round(self._began)

    def end_round(self, add_up: AddUp, *, step: int = 0) -> dict[str, float]:
        """The round's metrics over all ranks; what all ranks learned decides how the next one starts on each.

        Every rank calls this once a round, since `add_up` is a collective.
        """
        now = time.perf_counter()
        usage = self._allocator.end_round(now)
        own = self._allocator.numbers()
        added = add_up([*own, *_as_numbers(usage)])
        self._allocator.learn(added[: len(own)])
        self._record(ROUND, -1, self._began, now, step=step, idle_share=round(usage.idle_share, 4))
        self._depths.tell()
        return usage_metrics(added[len(own) :])

    @asynccontextmanager
    async def awake(self, role: str | None = None) -> AsyncIterator[None]:
        """Around a round: before it each slot's engine of the placement, or of `role`, wakes; after it all sleep.

        Also where it is cancelled: who was asked to stop wants room to save. Nothing happens where engines stay up.
        """
        try:
            await self._wake(role)
            yield
        except asyncio.CancelledError:
            await self.sleep()
            raise
        await self.sleep()

    async def _wake(self, role: str | None) -> None:
        if self._sleepers is not None:
            placed = enumerate(self._allocator.awake)
            await asyncio.gather(*(self._sleepers[role or other][slot].wake() for slot, other in placed))

    async def sleep(self) -> None:
        """All engines of all slots, once no swap is under way."""
        await asyncio.gather(*self._swaps, return_exceptions=True)
        sleepers = (self._sleepers or {}).values()
        await asyncio.gather(*(engine.sleep() for engines in sleepers for engine in engines))

    @property
    def allocator(self) -> Allocator:
        return self._allocator

    @property
    def gathers(self) -> bool:
        """Whether a group's scorers are better asked together."""
        return self._allocator.gathers

    # -- carrying out ----------------------------------------------------------------------------------------------

    def _decide_soon(self) -> None:
        """At once where there is nothing to weigh; else after all that happens at this moment."""
        self._depths.tell_soon()
        if len(self._roles) == 1:
            self._decide()
        elif not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._is_due = False
        for action in self._allocator.decide(time.perf_counter()):
            if isinstance(action, Start):
                granted = self._granted.get(action.request)
                if granted is not None and not granted.done():
                    granted.set_result(action.slot)
            else:
                self._start_swap(action)

    def _start_swap(self, swap: Swap) -> None:
        if self._sleepers is None:
            self._end_swap(swap, time.perf_counter())
            return
        task = asyncio.get_running_loop().create_task(self._swap(swap, self._sleepers))
        self._swaps.add(task)
        task.add_done_callback(self._swap_done)

    async def _swap(self, swap: Swap, sleepers: Mapping[str, Sequence[Sleeper]]) -> None:
        began = time.perf_counter()
        await sleepers[swap.asleep][swap.slot].sleep()
        await sleepers[swap.awake][swap.slot].wake()
        self._end_swap(swap, began)

    def _end_swap(self, swap: Swap, began: float) -> None:
        now = time.perf_counter()
        self._allocator.swapped(swap.slot, now)
        self._record(SWAP, swap.slot, began, now, asleep=swap.asleep, awake=swap.awake)
        self._decide_soon()

    def _swap_done(self, task: asyncio.Task[None]) -> None:
        """A swap that failed fails every turn that waits: none of them could count on its slot."""
        self._swaps.discard(task)
        error = None if task.cancelled() else task.exception()
        for granted in self._granted.values() if error is not None else ():
            if not granted.done():
                granted.set_exception(error or RuntimeError("unreachable"))

    def _record(self, name: str, slot: int, began: float, ended: float, **told: object) -> None:
        self._trace.add(Span(name, self._rank, int(slot), began + self._since_epoch, ended - began, told))


def _as_numbers(usage: Usage) -> list[float]:
    busy_s, swap_s = sum(usage.busy_s), sum(usage.swap_s)
    return [usage.seconds * usage.num_slots, busy_s, swap_s, float(usage.swaps)]


def usage_metrics(added: Sequence[float]) -> dict[str, float]:
    """From sums over ranks of slot seconds, busy seconds, swap seconds and swaps: a step's metrics."""
    slot_s, busy_s, swap_s, swaps = added
    return {
        "ycore/idle_share": max(0.0, 1 - (busy_s + swap_s) / slot_s) if slot_s > 0 else 0.0,
        "ycore/bound_ratio": slot_s / busy_s if busy_s > 0 else 1.0,
        "ycore/swaps": swaps,
        "ycore/swap_s": swap_s,
    }


_AT_ONCE = 64
"""Requests a slot holds of a role, where the engines' own limit is not known."""


def placed_slots(
    config: RunConfig,
    scorers: Sequence[str],
    *,
    num_slots: int,
    max_num_seqs: int | None,
    trace: Path,
    rank: int = 0,
    sleepers: Mapping[str, Sequence[Sleeper]] | None = None,
) -> Slots:
    """This rank's slots under the run's placement. `scorers`: the roles that have an engine beside each rollout engine.

    Without `sleepers`, engines of all roles stay up, so a change of role is one of who gets requests; with rollouts
    only nothing changes. With them one role of a slot is awake at a time, and a change of role is a sleep and a wake.
    """
    roles = in_order([ROLLOUT, *scorers])
    capacity = None if len(roles) == 1 else dict.fromkeys(roles, max_num_seqs or _AT_ONCE)
    pool = SlotPool(num_slots, roles, capacity, exclusive=sleepers is not None)
    allocator = Allocator(pool, parse_placement(config.placement))
    return Slots(num_slots, allocator=allocator, sleepers=sleepers, trace=TraceWriter(trace), rank=rank)


def slot_sleepers(
    folder: RunFolder, engines: Sequence[Engine], scorers: Sequence[tuple[str, Sequence[Server]]]
) -> dict[str, list[Sleeper]]:
    """Who sleeps on this rank's slots, by role and slot. `scorers`: each model's role, and its servers slot by slot.

    A policy's weights are sent anew, so they are dropped; of a frozen model the level is learned, on all slots at once.
    """
    by_role: dict[str, list[list[SleepingEngine]]] = {}
    for role, servers in scorers:
        levels = SleepLevels()
        beds = [SleepingEngine(server, folder.socket(server.name), levels=levels) for server in servers]
        by_role.setdefault(role, []).append(beds)
    rollouts: list[Sleeper] = [
        engine.sleeper for engine in engines if isinstance(engine, VllmEngine) and engine.sleeper is not None
    ]
    frozen: dict[str, list[Sleeper]] = {
        role: [SleepTogether(on_slot) for on_slot in zip(*models, strict=True)] for role, models in by_role.items()
    }
    return {ROLLOUT: rollouts, **frozen}
