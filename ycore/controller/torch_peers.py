"""Peers over torch.distributed: counts in its store, groups from rank to rank as bytes.

The store is the one that torchrun, accelerate or DeepSpeed have opened already, so nothing new listens.

Not here: what is counted and moved (`peers`).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ycore.controller.wire import from_bytes, to_bytes
from ycore.errors import RunError
from ycore.sampling.balance import Offer
from ycore.types import Group

_FAILURE = "failure"


class TorchTally:
    """One round's counters in the store. Each is the sum over all ranks."""

    def __init__(self, store: dist.Store, number: int, *, need: int, ready: int) -> None:
        self.need = need
        self._store = store
        self._prefix = f"round{number}/"
        self._add("kept", ready)

    def start(self) -> None:
        self._add("drawn", 1)
        self._add("in_flight", 1)

    def finish(self, *, teaches: bool) -> None:
        self._add("kept", int(teaches))
        self._add("in_flight", -1)

    def kept(self) -> int:
        return self._add("kept", 0)

    def in_flight(self) -> int:
        return self._add("in_flight", 0)

    def drawn(self) -> int:
        return self._add("drawn", 0)

    def _add(self, name: str, amount: int) -> int:
        return int(self._store.add(self._prefix + name, amount))


class TorchPeers:
    """All ranks of the run, meeting in the process group that training uses.

    `bytes_sent` counts what this rank has given to others.
    """

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.bytes_sent = 0
        self._store = dist.PrefixStore("ycore/", _get_default_store())
        self._on_cpu = dist.new_group(backend="gloo")  # groups live in host memory, whatever the devices
        self._num_rounds = 0

    def open_tally(self, *, need: int, ready: int) -> TorchTally:
        self._num_rounds += 1
        tally = TorchTally(self._store, self._num_rounds, need=need * self.world, ready=ready)
        dist.barrier(self._on_cpu)  # nobody judges by counts that another has not yet made
        return tally

    def my_part(self, wanted: int) -> int:
        return math.ceil(wanted / self.world)

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        mine = torch.tensor([[o.index, o.position, o.num_tokens, o.teaches] for o in offers], dtype=torch.long)
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(self.world)]
        dist.all_gather(counts, torch.tensor([len(offers)]), group=self._on_cpu)
        longest = max(int(count) for count in counts)
        padded = torch.zeros(longest, 4, dtype=torch.long)
        padded[: len(offers)] = mine.view(-1, 4)
        tables = [torch.zeros_like(padded) for _ in range(self.world)]
        dist.all_gather(tables, padded, group=self._on_cpu)
        return [
            Offer(rank, index, position, num_tokens, bool(teaches))
            for rank, (table, count) in enumerate(zip(tables, counts, strict=True))
            for index, position, num_tokens, teaches in table[: int(count)].tolist()
        ]

    def exchange(self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]) -> dict[tuple[int, int], Group]:
        came: dict[tuple[int, int], Group] = {}
        for offer, receiver in moves:  # the same order on every rank, so no two wait for each other
            if offer.rank == self.rank:
                self._send(to_bytes(own[offer.index]), receiver)
            elif receiver == self.rank:
                came[offer.rank, offer.index] = from_bytes(self._receive(offer.rank))
        return came

    def _send(self, data: bytes, receiver: int) -> None:
        dist.send(torch.tensor([len(data)]), receiver, group=self._on_cpu)
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), receiver, group=self._on_cpu)
        self.bytes_sent += len(data)

    def _receive(self, sender: int) -> bytes:
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, sender, group=self._on_cpu)
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.recv(data, sender, group=self._on_cpu)
        return bytes(data.numpy())

    def check(self) -> None:
        if self._store.check([_FAILURE]):
            raise RunError(f"another rank failed: {self._store.get(_FAILURE).decode()}")

    def fail(self, message: str) -> None:
        if not self._store.check([_FAILURE]):
            self._store.set(_FAILURE, f"rank {self.rank}: {message}")
