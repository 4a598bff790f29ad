"""A rank's line to the allocator of its machine: messages go one way, and letters come back.

The only rank of a machine has the allocator in its own event loop (`OwnLine`). Several ranks share one, which is a
process of its own (`placement.service`), over a unix socket (`SocketLine`). Both speak the messages of
`placement.slot_pool`.
"""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from ycore.errors import RunError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import Placement, SlotPool
from ycore.placement.slot_pool import Message, Pool

_DEPTHS_EVERY_S = 1.0
_LOOK_EVERY_S = 0.05
GONE = "the allocator of this machine's slots is gone (see logs/allocator.log)"

Receive = Callable[[Message], None]
Lose = Callable[[BaseException], None]


class Line(Protocol):
    """`rank` of `num_ranks` on this machine."""

    pool: SlotPool
    rank: int
    num_ranks: int

    def listen(self, receive: Receive, lose: Lose) -> None:
        """Call `receive` with each letter, of whatever kind, and `lose` once the line is lost. There may be several."""

    async def open(self, *, timeout_s: float) -> None:
        """Return once messages can be sent; RunError where the allocator is not there in time."""

    def send(self, message: Message) -> None: ...

    def close(self) -> None: ...


class Desk:
    """A pool with a clock, in an event loop: decides after everything that happens at one moment.

    `shows_depths`: send the queues' depths to the first rank, a second at most after they change.
    """

    def __init__(
        self, pool: Pool, deliver: Callable[[int, Message], None], *, shows_depths: bool = True
    ) -> None:
        self._pool, self._deliver, self._shows_depths = pool, deliver, shows_depths
        self._is_due = False
        self._depths_due: asyncio.TimerHandle | None = None

    def receive(self, rank: int, message: Message) -> None:
        for receiver, letter in self._pool.receive(rank, message, time.perf_counter()):
            self._deliver(receiver, letter)
        self._decide_soon()

    def lost(self, rank: int) -> None:
        self._pool.lost(rank, time.perf_counter())
        self._decide_soon()

    def _decide_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._decide)
        if self._shows_depths and self._depths_due is None:
            self._depths_due = asyncio.get_running_loop().call_later(
                _DEPTHS_EVERY_S, self._show_depths
            )

    def _decide(self) -> None:
        self._is_due = False
        for receiver, letter in self._pool.decide(time.perf_counter()):
            self._deliver(receiver, letter)

    def _show_depths(self) -> None:
        self._depths_due = None
        self._deliver(0, self._pool.depths(time.perf_counter()))


class OwnLine:
    """To an allocator in the same event loop, of a machine with one rank."""

    rank, num_ranks = 0, 1

    def __init__(self, allocator: Allocator, *, shows_depths: bool = False) -> None:
        self.pool = allocator.pool
        self._receive: Receive = lambda letter: None
        self._desk = Desk(
            Pool(allocator), lambda rank, letter: self._receive(letter), shows_depths=shows_depths
        )

    def listen(self, receive: Receive, lose: Lose) -> None:
        self._receive = receive

    async def open(self, *, timeout_s: float) -> None:
        pass

    def send(self, message: Message) -> None:
        self._desk.receive(0, message)

    def close(self) -> None:
        pass


class SocketLine(asyncio.Protocol):
    """To the allocator's process: a JSON list a line, both ways. The first message says which rank this is."""

    def __init__(
        self, socket: Path, pool: SlotPool, placement: Placement, *, rank: int, num_ranks: int
    ) -> None:
        self.pool, self.rank, self.num_ranks = pool, rank, num_ranks
        self._socket = socket
        self._hello: Message = ["hello", rank, asdict(pool), str(placement)]
        self._listeners: list[tuple[Receive, Lose]] = []
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""
        self._is_closing = False

    def listen(self, receive: Receive, lose: Lose) -> None:
        self._listeners.append((receive, lose))

    async def open(self, *, timeout_s: float) -> None:
        if self._transport is not None:
            return
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + timeout_s
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                await loop.create_unix_connection(lambda: self, str(self._socket))
                return
            if time.monotonic() > deadline:
                raise RunError(
                    f"the allocator was not there after {timeout_s:.0f} s; see logs/allocator.log"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    def send(self, message: Message) -> None:
        if self._transport is None or self._transport.is_closing():
            raise RunError(GONE)
        self._transport.write(encode(message))

    def close(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self.send(self._hello)

    def data_received(self, data: bytes) -> None:
        letters, self._rest = decode(self._rest + data)
        for letter in letters:
            for receive, _ in self._listeners:
                receive(letter)

    def connection_lost(self, error: Exception | None) -> None:
        for _, lose in self._listeners if not self._is_closing else ():
            lose(RunError(GONE))


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(data: bytes) -> tuple[list[Message], bytes]:
    """The whole messages, and the beginning of the next one."""
    *lines, rest = data.split(b"\n")
    return [json.loads(line) for line in lines], rest
