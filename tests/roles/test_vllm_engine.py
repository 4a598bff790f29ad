"""VllmEngine against servers that misbehave: real ones, on real sockets, that answer what the test says.

Not here: a real vLLM server (`test_real_engine`).
"""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ycore.errors import EngineError, SyncError
from ycore.roles.engine import Sampling
from ycore.roles.vllm_engine import VllmEngine

SAMPLING = Sampling(max_tokens=12, stop_token_ids=(2,))
Answer = Callable[[str], Awaitable[tuple[int, bytes]]]


@pytest.fixture
def socket() -> Iterator[Path]:
    """In a folder of its own with a short name: a socket's path holds about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="yc-") as folder:
        yield Path(folder) / "e.sock"


@asynccontextmanager
async def serving(socket: Path, answer: Answer) -> AsyncIterator[None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                length = 0
                while (header := await reader.readline()).strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                await reader.readexactly(length)
                status, body = await answer(line.split()[1].decode())
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(handle, socket)
    try:
        yield
    finally:
        server.close()


def engine_at(socket: Path, *, timeout_s: float = 5.0, sampling: Sampling = SAMPLING) -> VllmEngine:
    return VllmEngine("rollout-7", socket, sampling, request_timeout_s=timeout_s)


async def says_version(told: str, path: str) -> tuple[int, bytes]:
    return 200, json.dumps({"weight_version": told}).encode() if path == "/weight_info" else b""


@pytest.mark.parametrize("told", ["2", "4", "", "default"])
def test_an_engine_that_names_another_version_is_a_sync_error(socket: Path, told: str) -> None:
    async def work() -> None:
        async with serving(socket, lambda path: says_version(told, path)):
            engine = engine_at(socket)
            with pytest.raises(SyncError, match=f"rollout-7: holds policy version {told}, not 3"):
                await engine.load_weights(Path("/nowhere"), 3)
            assert engine.version == 0
            await engine.close()

    asyncio.run(work())


def test_the_version_read_back_is_taken(socket: Path) -> None:
    async def work() -> None:
        async with serving(socket, lambda path: says_version("3", path)):
            engine = engine_at(socket)
            await engine.load_weights(Path("/nowhere"), 3)
            assert engine.version == 3
            await engine.close()

    asyncio.run(work())


async def refuses(path: str) -> tuple[int, bytes]:
    return 500, b'{"error": "no such token"}'


async def babbles(path: str) -> tuple[int, bytes]:
    return 200, b"<html>"


async def hangs(path: str) -> tuple[int, bytes]:
    await asyncio.sleep(60)
    return 200, b""


async def hangs_up(path: str) -> tuple[int, bytes]:
    raise ConnectionResetError


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refuses, "rollout-7: /v1/completions answered 500: .*no such token"),
        (babbles, "rollout-7: /v1/completions answered '<html>', which is not JSON"),
        (hangs, "rollout-7: no answer to /v1/completions within 1 s"),
        (hangs_up, "rollout-7: /v1/completions failed"),
        (None, "rollout-7: /v1/completions failed"),
    ],
    ids=["refuses", "babbles", "hangs", "hangs-up", "dead"],
)
def test_whatever_goes_wrong_is_an_engine_error_in_time(socket: Path, answer: Answer | None, said: str) -> None:
    async def ask() -> None:
        engine = engine_at(socket, timeout_s=1.0)
        started = time.monotonic()
        with pytest.raises(EngineError, match=said):
            await engine.complete([9, 8], 1)
        assert time.monotonic() - started < 5
        await engine.close()

    async def work() -> None:
        if answer is None:
            return await ask()
        async with serving(socket, answer):
            await ask()

    asyncio.run(work())


def test_waiting_ends_when_the_engine_comes_or_the_time_is_over(socket: Path) -> None:
    async def work() -> None:
        engine = engine_at(socket)
        with pytest.raises(EngineError, match=r"rollout-7: not ready after 1 s; see logs/rollout-7\.log"):
            await engine.wait_ready(timeout_s=1)
        waiting = asyncio.create_task(engine.wait_ready(timeout_s=20))
        await asyncio.sleep(0.3)
        async with serving(socket, lambda path: says_version("0", path)):
            await waiting
        await engine.close()

    asyncio.run(work())
