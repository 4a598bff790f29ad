"""The allocator's process: `python -m ycore.placement.service SOCKET NUM_RANKS`, one on a machine with several ranks.

It decides for the slots of the machine, and ends when all ranks have gone. A rank that is lost gives its turns back.
"""

import asyncio
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ycore.placement.allocator import Allocator
from ycore.placement.line import Desk, decode, encode
from ycore.placement.placement import SlotPool, parse_placement
from ycore.placement.slot_pool import Message, Pool
from ycore.run.reports import dump_stacks_on_signal


class Service:
    """The desk, and the ranks that are connected. The first rank to come says which slots there are."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.is_over = asyncio.Event()
        self._ranks: dict[int, asyncio.WriteTransport] = {}
        self._slots: tuple[Any, str] | None = None
        self._desk: Desk | None = None

    def come(
        self, rank: int, pool: dict[str, Any], placement: str, transport: asyncio.WriteTransport
    ) -> Desk:
        """The desk, for a rank that has just connected."""
        if self._desk is None:
            slots = SlotPool(**{**pool, "roles": tuple(pool["roles"])})
            whole = Pool(Allocator(slots, parse_placement(placement)), self.num_ranks)
            self._slots, self._desk = (pool, placement), Desk(whole, self.deliver)
        if (pool, placement) != self._slots or rank in self._ranks:
            raise ValueError(
                f"rank {rank} comes with {pool} and {placement}; the slots are {self._slots}"
            )
        self._ranks[rank] = transport
        return self._desk

    def deliver(self, rank: int, letter: Message) -> None:
        transport = self._ranks.get(rank)
        if transport is not None and not transport.is_closing():
            transport.write(encode(letter))

    def go(self, rank: int) -> None:
        del self._ranks[rank]
        assert self._desk is not None
        self._desk.lost(rank)
        if not self._ranks:
            self.is_over.set()


class Connection(asyncio.Protocol):
    """One rank's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rank: int | None = None
        self._desk: Desk | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        messages, self._rest = decode(self._rest + data)
        for message in messages:
            if self._rank is None or self._desk is None:
                _, self._rank, pool, placement = message
                self._desk = self._service.come(self._rank, pool, placement, self._transport)
            else:
                self._desk.receive(self._rank, message)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rank is not None:
            self._service.go(self._rank)


async def serve(socket: Path, num_ranks: int) -> None:
    """Until all ranks have come and gone, or one sends what cannot be."""
    loop = asyncio.get_running_loop()
    failed = loop.create_future()

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if not failed.done():
            failed.set_exception(context.get("exception") or RuntimeError(context["message"]))

    loop.set_exception_handler(fail)  # a decision that fails ends the process, and with it the run
    socket.unlink(missing_ok=True)
    service = Service(num_ranks)
    server = await loop.create_unix_server(partial(Connection, service), str(socket))
    async with server:
        over = asyncio.ensure_future(service.is_over.wait())
        await asyncio.wait([over, failed], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        failed.result()


def main() -> None:
    dump_stacks_on_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes with its ranks
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
