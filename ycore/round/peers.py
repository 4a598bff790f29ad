"""Exchange between the ranks of a run: counts while a round runs, the deal at its end, and the groups that move.

A rank sees no prompt or completion of another rank but those dealt to it. Every rank computes the same deal from the
same numbers, so no rank leads.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ycore.errors import Interrupted, PeerError
from ycore.run.tasks import ending
from ycore.types import Group, Metrics, from_bytes, to_bytes

T = TypeVar("T")
LOOK_S = 0.1
"""How long to wait to the next look at what other ranks have done."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One finished group as other ranks see it: numbers only."""

    rank: int
    index: int
    position: int
    cost: int  # of training on it: `Rules.cost_of`
    teaches: bool
    stats: tuple[float, float] | None = None
    """For the curriculum, of a group of this round: `sampling.stats_of`."""

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.index


class Counts(NamedTuple):
    """A round over all ranks: groups that count towards the need, groups in flight, groups drawn so far."""

    kept: int
    in_flight: int
    drawn: int

    @property
    def finished(self) -> int:
        return self.drawn - self.in_flight


_STOP = "stop"
_FIRST_LOOK_S = 0.005
_LAST_LOOK_S = 0.2
_PATIENCE = 0.05  # of the time waited so far, to the next look: waiting long costs little, waiting short ends soon
_FIELD = (
    1 << 20
)  # of a round's three counts, which share one 64-bit number so that one request reads and changes all


def _pause_s(began: float) -> float:
    """Return how long to wait to the next look at what others have done, after having waited since `began`."""
    return min(_LAST_LOOK_S, max(_FIRST_LOOK_S, _PATIENCE * (time.monotonic() - began)))


class Tally(NamedTuple):
    """One round's counts over all ranks. `need`: groups that all ranks need together."""

    store: dist.Store
    key: str
    need: int

    def add(self, *, kept: int = 0, in_flight: int = 0, drawn: int = 0) -> Counts:
        """Add what this rank has done; returns all three counts at that moment."""
        total = int(self.store.add(self.key, kept + _FIELD * (in_flight + _FIELD * drawn)))
        return Counts(total % _FIELD, total // _FIELD % _FIELD, total // _FIELD**2)


class Peers:
    """The ranks of a run, in the store of torch.distributed in which they met; one alone has a store in its memory.

    All ranks call these methods in the same order. `bytes_sent` counts the groups that this one sent. A process group of
    its own would connect all ranks to each other once more.
    """

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        self.rank = 0
        self.world = 1
        store: dist.Store = dist.HashStore()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.world = dist.get_world_size()
            store = _get_default_store()
        self._timeout_s = timeout_s
        self.bytes_sent = 0
        self._store = dist.PrefixStore("ycore/", store)
        self._num_rounds = self._num_gathered = 0
        self._num_meetings: Counter[str] = Counter()

    def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        """Begin a round in which every rank needs `need` groups; this one has `ready` of them and starts `starts`.

        Interrupted where another rank, which then does not come, was asked to stop.
        """
        self._num_rounds += 1
        if self.rank == 0 and self._num_rounds > 2:
            self._store.delete_key(f"round{self._num_rounds - 2}")
        tally = Tally(self._store, f"round{self._num_rounds}", need=need * self.world)
        tally.add(kept=ready, in_flight=starts, drawn=starts)
        # No rank reads counts to which another has not yet added.
        self._gather("beginning a round", None, may_stop=True)
        return tally

    async def meet(self, *, stopping: bool, name: str = "meeting") -> bool:
        """Wait until every rank calls this; returns whether any of them is stopping, the same on all ranks.

        Unlike a collective it does not block the event loop. Threads meet those of other ranks under another `name`.
        """
        self._num_meetings[name] += 1
        number = self._num_meetings[name]
        # One number for both counts, so that a rank arrives and says whether it is stopping at the same moment.
        arrived = int(self._store.add(f"{name}{number}", 1 + _FIELD * int(stopping)))
        began = time.monotonic()
        while arrived % _FIELD < self.world:
            await asyncio.sleep(_pause_s(began))
            arrived = int(self._store.add(f"{name}{number}", 0))
        if self.rank == 0 and number > 1:
            self._store.delete_key(
                f"{name}{number - 1}"
            )  # all have left it, since all have come to this one
        return arrived >= _FIELD

    def gather_summaries(self, summaries: Sequence[GroupSummary]) -> list[GroupSummary]:
        """Every rank's summaries; all ranks get the same list."""
        tables = self._gather("dealing out a round", list(map(astuple, summaries)))
        return [GroupSummary(*row) for rows in tables for row in rows]

    def exchange(self, deal: "Deal", groups: Sequence[Group]) -> list[Group]:
        """Send and receive the groups that change ranks; return those that this rank trains on, as the deal has them.

        A summary's `index` counts in `groups`, its rank's.
        """
        moves = deal.moves
        for summary, _ in moves:
            if summary.rank == self.rank:
                data: Any = to_bytes(groups[summary.index])  # the store takes bytes too
                self._store.set(f"group{summary.key}", data)
                self.bytes_sent += len(data)
        if moves:
            self._gather("exchanging groups", None)
        dealt = []
        for summary in deal.chosen[self.rank]:
            if summary.rank == self.rank:
                dealt.append(groups[summary.index])
            else:
                dealt.append(from_bytes(self._store.get(f"group{summary.key}")))
                self._store.delete_key(f"group{summary.key}")
        return dealt

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks."""
        tables = self._gather("adding up", list(values))
        return [float(sum(column)) for column in zip(*tables, strict=True)]

    def _gather(self, doing: str, value: Any, *, may_stop: bool = False) -> list[Any]:
        """Wait until every rank has come, and return the values of all; PeerError where one does not come."""
        self._num_gathered += 1
        key = f"gathered{self._num_gathered}"
        began = time.monotonic()
        try:
            self._store.set(f"{key}/{self.rank}", json.dumps(value))
            self._store.add(key, 1)
            while int(self._store.add(key, 0)) < self.world:
                time.sleep(_pause_s(began))
                if may_stop and self.stop_asked():
                    raise Interrupted(f"a rank was asked to stop, {doing}")
                if time.monotonic() - began > self._timeout_s:
                    raise PeerError(
                        f"rank {self.rank}: {doing} did not end: another rank did not come within "
                        f"{self._timeout_s:.0f} s (collective_timeout_s)"
                    )
            keys = [f"{key}/{rank}" for rank in range(self.world)]
            tables = [json.loads(table) for table in self._store.multi_get(keys)]
            if self._num_gathered > 1:  # all have read it, since all have come to this one
                old = f"gathered{self._num_gathered - 1}"
                self._store.delete_key(f"{old}/{self.rank}")
                if self.rank == 0:
                    self._store.delete_key(old)
        except dist.DistError as error:
            reason = str(error).partition("\n")[0][:200]
            raise PeerError(
                f"rank {self.rank}: {doing} did not end: the first rank is gone: {reason}"
            ) from error
        return tables

    def ask_to_stop(self) -> None:
        """Make `stop_asked` true on every rank."""
        self._store.set(_STOP, str(self.rank))

    def stop_asked(self) -> bool:
        """Whether any rank called `ask_to_stop`."""
        return bool(self._store.check([_STOP]))


# -- the deal ----------------------------------------------------------------------------------------------------------

_EVEN_ENOUGH = 1.02  # imbalance below which moving another group is not worth it
_MAX_SWAPS = 1000


class Deal(NamedTuple):
    """`chosen[rank]`: the summaries that this rank trains on. All other groups stay where they are."""

    chosen: tuple[tuple[GroupSummary, ...], ...]

    @property
    def moves(self) -> list[tuple[GroupSummary, int]]:
        """(summary, receiving rank) of every group that changes ranks, in an order that all ranks share."""
        return [
            (summary, rank)
            for rank, summaries in enumerate(self.chosen)
            for summary in summaries
            if summary.rank != rank
        ]

    def metrics(self) -> Metrics:
        """Groups that fill up the step without teaching, and the imbalance of costs before and after the deal."""
        chosen = [summary for rank_groups in self.chosen for summary in rank_groups]
        metrics = {
            "ycore/sampling/filled": float(sum(not summary.teaches for summary in chosen))
        }
        if len(self.chosen) > 1:
            before = [
                sum(o.cost for o in chosen if o.rank == rank)
                for rank in range(len(self.chosen))
            ]
            metrics["ycore/balance/before"] = imbalance(before)
            metrics["ycore/balance/after"] = imbalance(
                [sum(o.cost for o in rank_groups) for rank_groups in self.chosen]
            )
        return metrics


def imbalance(costs: Sequence[int]) -> float:
    """The busiest rank's cost over the mean of all ranks; 1.0 is perfect."""
    return max(costs) * len(costs) / max(1, sum(costs))


def choose(summaries: Sequence[GroupSummary], num_wanted: int) -> list[GroupSummary]:
    """The groups to train on: those that can teach in the order of their draws, then, if too few, the others.

    The order of draws, not of finishing: otherwise short completions would be preferred to long ones.
    """
    return sorted(summaries, key=lambda summary: (not summary.teaches, summary.position))[
        :num_wanted
    ]


def deal_groups(summaries: Sequence[GroupSummary], *, world: int, per_rank: int) -> Deal:
    """Deal `world * per_rank` groups so that training costs every rank about the same.

    Each rank first keeps its own groups. What it has too many goes to the lightest rank with room, the costliest first.
    Then groups are swapped until the loads are even enough. So few groups travel. `summaries` are those of all ranks.
    """
    assigned: list[list[GroupSummary]] = [[] for _ in range(world)]
    over: list[GroupSummary] = []
    for summary in choose(summaries, world * per_rank):
        (assigned[summary.rank] if len(assigned[summary.rank]) < per_rank else over).append(
            summary
        )
    loads = [sum(summary.cost for summary in rank_groups) for rank_groups in assigned]
    for summary in sorted(over, key=lambda summary: (-summary.cost, summary.position)):
        rank = min(
            (rank for rank in range(world) if len(assigned[rank]) < per_rank),
            key=lambda r: (loads[r], r),
        )
        assigned[rank].append(summary)
        loads[rank] += summary.cost
    _swap_while_it_helps(assigned, loads)
    return Deal(
        tuple(
            tuple(sorted(rank_groups, key=lambda summary: summary.position))
            for rank_groups in assigned
        )
    )


def _swap_while_it_helps(assigned: list[list[GroupSummary]], loads: list[int]) -> None:
    """Swap a group of the heaviest rank for a lighter one elsewhere, as long as the larger load of the two falls."""
    for _ in range(_MAX_SWAPS):
        heavy = loads.index(max(loads))
        if imbalance(loads) <= _EVEN_ENOUGH:
            return
        swaps = [
            (max(loads[heavy] - delta, loads[rank] + delta), rank, ours, theirs)
            for rank in range(len(assigned))
            for ours, summary in enumerate(assigned[heavy])
            for theirs, other in enumerate(assigned[rank])
            if (delta := summary.cost - other.cost) > 0
        ]
        peak, rank, ours, theirs = min(swaps, default=(loads[heavy], heavy, 0, 0))
        if peak >= loads[heavy]:
            return
        group = assigned[heavy][ours]
        lighter = assigned[rank][theirs]
        assigned[heavy][ours] = lighter
        assigned[rank][theirs] = group
        loads[heavy] -= group.cost - lighter.cost
        loads[rank] += group.cost - lighter.cost


# -- one event loop a rank ---------------------------------------------------------------------------------------------


class RankEventLoop:
    """Runs a rank's work until every rank has its own result, or any is to stop.

    `ends_at`: what ends the work under way; `stop` by default.
    """

    def __init__(self, peers: Peers) -> None:
        self.stop = threading.Event()
        self.ends_at = self.stop
        self._peers = peers
        self._runner = asyncio.Runner()
        self._thread: threading.Thread | None = None

    def start_thread(self) -> None:
        """Keep the loop running in a thread of its own: what is in flight goes on while nobody waits for it."""
        loop = self._runner.get_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="rounds", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def on_all_ranks() -> T:
            try:
                result = await self._until_stopped(work)
            except Interrupted:
                await self._peers.meet(stopping=True)
                raise
            if await self._peers.meet(stopping=False):
                raise Interrupted(
                    "another rank was interrupted; the last finished step is kept"
                )
            return result

        return self.run_alone(on_all_ranks())

    def run_alone(self, work: Coroutine[Any, Any, T]) -> T:
        """Run without regard to other ranks."""
        if self._thread is None:
            return self._runner.run(work)
        return asyncio.run_coroutine_threadsafe(work, self._runner.get_loop()).result()

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this last work, and close the loop."""
        self.run_alone(work)
        if self._thread is not None:
            loop = self._runner.get_loop()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
        self._runner.close()

    async def _until_stopped(self, work: Awaitable[T]) -> T:
        """Return the work's result; Interrupted as soon as any rank is to stop."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        async with ending([task, watch]):
            done, _ = await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task in done else watch.result()

    async def _watch(self) -> Any:
        while not self.ends_at.is_set():
            if self._peers.stop_asked():
                self.ends_at.set()
            await asyncio.sleep(LOOK_S)
        self._peers.ask_to_stop()
        raise Interrupted("interrupted while generating; the last finished step is kept")
