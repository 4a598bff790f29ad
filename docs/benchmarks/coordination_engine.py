"""A stub engine for `coordination`: a process that reads a whole request from a unix socket and makes up a completion.

It speaks only as much HTTP as ycore's client needs. It searches the end of the request for the seed instead of parsing
it, because the work of an engine is not measured. Its answers have the shape of vLLM's.
"""

import asyncio
import json
import re
from pathlib import Path

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_SEED = re.compile(rb'"seed": ?(\d+)')


def serve(path: Path, rounds: int) -> None:
    """Serve until killed."""
    asyncio.run(_serve(path))


async def _serve(path: Path) -> None:
    server = await asyncio.start_unix_server(_talk, path=str(path), limit=2**22)
    async with server:
        await server.serve_forever()


async def _talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            body = await reader.readexactly(int(length[1])) if length else b""
            _answer(writer, _completion(body) if body else {})
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _completion(body: bytes) -> dict[str, object]:
    seed = _SEED.search(body, max(0, len(body) - 1000))
    number = int(seed[1]) if seed else 0
    tokens = [number % 1000] * (1 + number % 64)  # unequal, so that there is something to deal
    choice = {
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        "text": "made up",
    }
    return {"choices": [{**choice, "finish_reason": "stop"}]}


def _answer(writer: asyncio.StreamWriter, value: object) -> None:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
