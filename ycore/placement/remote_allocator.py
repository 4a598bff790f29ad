"""The allocator of slots that several ranks share, over a unix socket: a JSON list on each line, both ways.

A rank sends `[method, call, *arguments]`, where `call` is null or a number that the reply repeats. It receives
`["reply", call, value]`, and the calls of `SlotListener` as `[method, *arguments]`.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ycore.errors import RunError
from ycore.placement.placement import Placement, SlotPool
from ycore.placement.shared_allocator import SlotListener

_RETRY_EVERY_S = 0.05
_GONE = "the allocator of this machine's slots is gone (see logs/allocator.log)"


class RemoteAllocator(asyncio.Protocol):
    """A `SharedAllocator` in another process. Its first message says which rank this is, and of which slots."""

    def __init__(
        self, socket: Path, pool: SlotPool, placement: Placement, *, rank: int, num_ranks: int
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.num_ranks = num_ranks
        self._socket = socket
        self._placement = placement
        self._fail: Callable[[BaseException], None] = lambda error: None
        self._transport: asyncio.WriteTransport | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._unread = b""
        self._is_closing = False

    def listen(self, listener: SlotListener, fail: Callable[[BaseException], None]) -> None:
        """Call `fail` once the allocator is gone."""
        self._listener = listener
        self._fail = fail

    async def open(self, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + timeout_s
        while self._transport is None:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                await loop.create_unix_connection(lambda: self, str(self._socket))
                return
            if time.monotonic() > deadline:
                raise RunError(
                    f"the allocator was not there after {timeout_s:.0f} s; see logs/allocator.log"
                )
            await asyncio.sleep(_RETRY_EVERY_S)

    def close(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def ask(self, request: int, role: str, length: float) -> None:
        self._send("ask", None, request, role, length)

    def ended(self, request: int, num_tokens: float) -> None:
        self._send("ended", None, request, num_tokens)

    def withdraw(self, request: int) -> None:
        self._send("withdraw", None, request)

    def swapped(self, slot: int) -> None:
        self._send("swapped", None, slot)

    async def begin_round(self, state: Mapping[str, Any] | None) -> tuple[list[str], bool]:
        awake, gathers = await self._call("begin_round", state)
        return awake, gathers

    def engines_awake(self) -> None:
        self._send("engines_awake", None)

    async def end_round(self) -> tuple[list[float], list[float]]:
        measurements, usage = await self._call("end_round")
        return measurements, usage

    async def learn(self, sums: list[float]) -> dict[str, Any]:
        state: dict[str, Any] = await self._call("learn", sums)
        return state

    async def _call(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(method, number, *arguments)
        return await reply

    def _send(self, method: str, call: int | None, *arguments: Any) -> None:
        if self._transport is None or self._transport.is_closing():
            raise RunError(_GONE)
        self._transport.write(encode([method, call, *arguments]))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send("join", None, self.rank, asdict(self.pool), str(self._placement))

    def data_received(self, data: bytes) -> None:
        messages, self._unread = decode(self._unread + data)
        for method, *arguments in messages:
            if method == "reply":
                number, value = arguments
                reply = self._replies.pop(number)
                if not reply.done():
                    reply.set_result(value)
            else:
                getattr(self._listener, method)(*arguments)

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_closing:
            return
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(RunError(_GONE))
        self._fail(RunError(_GONE))


def encode(message: list[Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(data: bytes) -> tuple[list[list[Any]], bytes]:
    """Return the whole messages, and the beginning of the next one."""
    *lines, unread = data.split(b"\n")
    return [json.loads(line) for line in lines], unread
