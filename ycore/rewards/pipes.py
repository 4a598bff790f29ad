"""The reading ends of a confined process's pipes: bounded lines of answers, and what it prints."""

import asyncio
from collections.abc import Callable


class _Pipe(asyncio.Protocol):
    """The reading end of a pipe."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Output(_Pipe):
    """What the process prints, handed on as it comes."""

    def __init__(self, printed: Callable[[bytes], None]) -> None:
        super().__init__()
        self._printed = printed

    def data_received(self, data: bytes) -> None:
        self._printed(data)


class Replies(_Pipe):
    """Lines, none of them longer than it may be; what comes unasked is kept as a sign that it came."""

    def __init__(self) -> None:
        super().__init__()
        self._held = bytearray()
        self._most = 0
        self._news = asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._held

    def data_received(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > self._most and self._transport is not None:
            self._transport.pause_reading()
        self._news.set()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._news.set()

    async def line(self, most: int) -> bytes | None:
        """The next line; None where it is too long, IncompleteReadError where the pipe was closed before it came."""
        self._most = most
        try:
            while True:
                end = self._held.find(b"\n")
                if end >= 0 or len(self._held) > most:
                    break
                if self.ended.is_set():
                    raise asyncio.IncompleteReadError(bytes(self._held), None)
                self._news.clear()
                await self._news.wait()
            if not 0 <= end <= most:
                return None
            line = bytes(self._held[:end])
            del self._held[: end + 1]
            return line
        finally:
            self._most = 0
