"""The allocator's process: `python -m ycore.placement.service SOCKET NUM_RANKS`, one on a machine with several ranks.

It decides for the slots of the machine, and ends when all ranks have gone. The requests of a rank that is gone are
withdrawn.
"""

import asyncio
import inspect
import signal
import sys
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

from ycore.placement.allocator import Allocator
from ycore.placement.placement import SlotPool, parse_placement
from ycore.placement.remote_allocator import decode, encode
from ycore.placement.shared_allocator import SharedAllocator
from ycore.run.reports import dump_stacks_on_signal


class Service:
    """The shared allocator and the ranks that are connected. The first rank to join says which slots there are."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.is_over = asyncio.Event()
        self._ranks: set[int] = set()
        self._slots: tuple[dict[str, Any], str] | None = None
        self._shared: SharedAllocator | None = None

    def join(
        self, rank: int, pool: dict[str, Any], placement: str, connection: "Connection"
    ) -> SharedAllocator:
        if self._shared is None:
            slot_pool = SlotPool(**{**pool, "roles": tuple(pool["roles"])})
            allocator = Allocator(slot_pool, parse_placement(placement))
            self._shared = SharedAllocator(allocator, self.num_ranks)
            self._slots = (pool, placement)
        if (pool, placement) != self._slots or rank in self._ranks:
            raise ValueError(
                f"rank {rank} comes with {pool} and {placement}; the slots are {self._slots}"
            )
        self._ranks.add(rank)
        self._shared.listen(connection, rank)
        return self._shared

    def leave(self, rank: int) -> None:
        assert self._shared is not None
        self._ranks.remove(rank)
        self._shared.leave(rank)
        if not self._ranks:
            self.is_over.set()


class Connection(asyncio.Protocol):
    """One rank, as the shared allocator calls it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._rank: int | None = None
        self._shared: SharedAllocator | None = None
        self._unread = b""
        self._calls: set[asyncio.Future[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        messages, self._unread = decode(self._unread + data)
        for method, call, *arguments in messages:
            if self._shared is None:
                self._rank, pool, placement = arguments
                self._shared = self._service.join(self._rank, pool, placement, self)
                continue
            result = getattr(self._shared, method)(*arguments)
            if inspect.isawaitable(result):
                task = asyncio.ensure_future(self._reply(call, result))
                self._calls.add(task)
                task.add_done_callback(self._reply_done)

    async def _reply(self, call: int, result: Awaitable[Any]) -> None:
        self._send("reply", call, await result)

    def _reply_done(self, task: asyncio.Future[None]) -> None:
        self._calls.discard(task)
        task.result()  # an error goes to the loop's handler, which ends the process

    def start(self, request: int, slot: int) -> None:
        self._send("start", request, slot)

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        self._send("swap", slot, asleep, awake)

    def queues(self, *counts: Any) -> None:
        self._send("queues", *counts)

    def _send(self, method: str, *arguments: Any) -> None:
        if not self._transport.is_closing():
            self._transport.write(encode([method, *arguments]))

    def connection_lost(self, error: Exception | None) -> None:
        if self._rank is not None:
            self._service.leave(self._rank)


async def serve(socket: Path, num_ranks: int) -> None:
    """Return when all ranks have come and gone; raise where a decision or a message fails."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its ranks
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))


if __name__ == "__main__":
    main()
