"""`Peers` over torch.distributed: counts and meetings in its store, groups as bytes from rank to rank.

The store is the one that torchrun, accelerate or DeepSpeed have opened already, so no new port is opened.
"""

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ycore.errors import PeerError, RunError
from ycore.round.peers import Counts, GroupSummary, Peers, Tally
from ycore.run.group_json import from_bytes, to_bytes
from ycore.types import Group

_FAILURE, _STOP = "failure", "stop"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.2
_PATIENCE = 0.05  # of the time waited so far, to the next look: waiting long costs little, waiting short ends soon
_FIELD = (
    1 << 20
)  # of a round's three counts, which share one 64-bit number so that one request reads and changes all


class TorchTally(Tally):
    def __init__(
        self, store: dist.Store, key: str, *, need: int, ready: int, starts: int
    ) -> None:
        self.need = need
        self._store = store
        self._key = key
        self._add(kept=ready, in_flight=starts, drawn=starts)

    async def add(self, *, kept: int = 0, in_flight: int = 0, drawn: int = 0) -> Counts:
        return self._add(kept=kept, in_flight=in_flight, drawn=drawn)

    async def look(self) -> Counts:
        return self._add()

    def _add(self, *, kept: int = 0, in_flight: int = 0, drawn: int = 0) -> Counts:
        total = int(self._store.add(self._key, kept + _FIELD * (in_flight + _FIELD * drawn)))
        return Counts(total % _FIELD, total // _FIELD % _FIELD, total // _FIELD**2)


class TorchPeers(Peers):
    """All ranks of a run, over the process group that training uses. `bytes_sent` counts the groups that it sent."""

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = 0
        self._store = dist.PrefixStore("ycore/", _get_default_store())
        # Groups live in host memory, whatever the devices.
        self._on_cpu = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._num_rounds = self._num_meetings = 0

    async def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        self._num_rounds += 1
        if self.rank == 0 and self._num_rounds > 2:
            self._store.delete_key(f"round{self._num_rounds - 2}")
        all_need = need * self.world
        tally = TorchTally(
            self._store, f"round{self._num_rounds}", need=all_need, ready=ready, starts=starts
        )
        with self._in_time("beginning a round"):
            dist.barrier(
                self._on_cpu
            )  # no rank reads counts to which another has not yet added
        return tally

    async def meet(self, *, stopping: bool) -> bool:
        self._num_meetings += 1
        number = self._num_meetings
        # One number for both counts, so that a rank arrives and says whether it is stopping at the same moment.
        arrived = int(self._store.add(f"meeting{number}", 1 + _FIELD * int(stopping)))
        began = time.monotonic()
        while arrived % _FIELD < self.world:
            self._check()
            await asyncio.sleep(
                min(_LAST_LOOK_S, max(_FIRST_LOOK_S, _PATIENCE * (time.monotonic() - began)))
            )
            arrived = int(self._store.add(f"meeting{number}", 0))
        if self.rank == 0 and number > 1:
            self._store.delete_key(
                f"meeting{number - 1}"
            )  # all have left it, since all have come to this one
        return arrived >= _FIELD

    def gather_summaries(self, summaries: Sequence[GroupSummary]) -> list[GroupSummary]:
        none = (math.nan, math.nan)
        rows = [[o.index, o.position, o.cost, o.teaches, *(o.stats or none)] for o in summaries]
        mine = torch.tensor(rows, dtype=torch.float64)
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(self.world)]
        with self._in_time("dealing out a round"):
            dist.all_gather(counts, torch.tensor([len(summaries)]), group=self._on_cpu)
        longest = max(int(count) for count in counts)
        padded = torch.zeros(longest, 6, dtype=torch.float64)
        padded[: len(summaries)] = mine.view(-1, 6)
        tables = [torch.zeros_like(padded) for _ in range(self.world)]
        with self._in_time("dealing out a round"):
            dist.all_gather(tables, padded, group=self._on_cpu)
        return [
            GroupSummary(
                rank,
                int(index),
                int(position),
                int(cost),
                bool(teaches),
                None if math.isnan(chance) else (chance, mean),
            )
            for rank, (table, count) in enumerate(zip(tables, counts, strict=True))
            for index, position, cost, teaches, chance, mean in table[: int(count)].tolist()
        ]

    def exchange(
        self, moves: Sequence[tuple[GroupSummary, int]], own: Sequence[Group]
    ) -> dict[tuple[int, int], Group]:
        received: dict[tuple[int, int], Group] = {}
        for (
            summary,
            receiver,
        ) in moves:  # the same order on every rank, so no two wait for each other
            if summary.rank == self.rank:
                with self._in_time(f"sending a group to rank {receiver}"):
                    self._send(to_bytes(own[summary.index]), receiver)
            elif receiver == self.rank:
                with self._in_time(f"receiving a group from rank {summary.rank}"):
                    received[summary.key] = from_bytes(self._receive(summary.rank))
        return received

    def add_up(self, values: Sequence[float]) -> list[float]:
        total = torch.tensor(list(values), dtype=torch.float64)
        with self._in_time("adding up"):
            dist.all_reduce(total, group=self._on_cpu)
        added: list[float] = total.tolist()
        return added

    @contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        """Around collectives: torch's error about a rank that does not take part becomes one that names the call."""
        try:
            yield
        except RuntimeError as error:
            with suppress(dist.DistError):  # the store is gone with the first rank
                self._check()
            reason = str(error).partition("\n")[0][:200]
            raise PeerError(
                f"rank {self.rank}: {what} did not end; another rank is gone, or did not come within "
                f"{self._timeout_s:.0f} s (collective_timeout_s): {reason}"
            ) from error

    def _send(self, data: bytes, receiver: int) -> None:
        dist.send(torch.tensor([len(data)]), receiver, group=self._on_cpu)
        dist.send(
            torch.frombuffer(bytearray(data), dtype=torch.uint8), receiver, group=self._on_cpu
        )
        self.bytes_sent += len(data)

    def _receive(self, sender: int) -> bytes:
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, sender, group=self._on_cpu)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(data, sender, group=self._on_cpu)
        self.bytes_received += len(data)
        return bytes(data.numpy())

    def ask_to_stop(self) -> None:
        self._store.set(_STOP, str(self.rank))

    def stop_asked(self) -> bool:
        self._check()
        return bool(self._store.check([_STOP]))

    def fail(self, message: str) -> None:
        if not self._store.check([_FAILURE]):
            self._store.set(_FAILURE, f"rank {self.rank}: {message}")

    def _check(self) -> None:
        if self._store.check([_FAILURE]):
            raise RunError(f"another rank failed: {self._store.get(_FAILURE).decode()}")
