"""Health checks without an event loop, against real servers on unix sockets; retries are in test_vllm_engine."""

import asyncio
import gc
import http.server
import os
import resource
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ycore.engine.server import Server, is_healthy, request_succeeds


@pytest.fixture
def socket() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="yc-") as folder:
        yield Path(folder) / "e.sock"


@contextmanager
def serving(socket: Path, status: int, *, after_s: float = 0.0) -> Iterator[list[str]]:
    """A server that answers everything with `status`; yields the requests that it got."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path}")
            time.sleep(after_s)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

        def address_string(self) -> str:
            return "test"

    class ThreadingServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that gave up is no error here."""

    with ThreadingServer(str(socket), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield seen
        finally:
            server.shutdown()


@pytest.mark.parametrize(("status", "expected"), [(200, True), (503, False), (404, False)])
def test_a_server_is_healthy_when_it_says_so(socket: Path, status: int, expected: bool) -> None:
    with serving(socket, status) as seen:
        assert is_healthy(socket) is expected
    assert seen == ["GET /health"]


def test_a_request_without_a_body_succeeds_with_status_200(socket: Path) -> None:
    with serving(socket, 200) as seen:
        assert request_succeeds(socket, "POST", "/sleep?level=2", timeout_s=5)
    assert seen == ["POST /sleep?level=2"]


def test_requests_leave_nothing_that_waits_for_a_collection(socket: Path) -> None:
    with serving(socket, 200):
        assert is_healthy(socket)
        gc.collect()
        gc.disable()
        try:
            assert all(is_healthy(socket) for _ in range(10))
            assert gc.collect() < 100  # objects; every answer of httpx left 61
        finally:
            gc.enable()


def test_a_server_that_hangs_is_not_healthy_and_costs_no_more_than_the_timeout(
    socket: Path,
) -> None:
    with serving(socket, 200, after_s=30.0):
        began = time.monotonic()
        assert not is_healthy(socket)
        assert time.monotonic() - began < 30


def test_no_socket_and_nobody_behind_it_are_not_healthy(socket: Path) -> None:
    assert not is_healthy(socket)
    with serving(socket, 200):
        pass
    assert socket.exists() and not is_healthy(socket)


def test_a_request_in_flight_counts_once_where_a_lost_engine_comes_back(socket: Path) -> None:
    """Its socket has led to another engine, whose process is still there."""
    back, other = socket.with_name("back.sock"), socket.with_name("other.sock")
    socket.symlink_to(other)

    async def work(seen: list[str]) -> Any:
        server = Server("rollout-0", socket, request_timeout_s=60)
        request = asyncio.ensure_future(server.request("POST", "/v1/completions"))
        while "POST /v1/completions" not in seen:
            await asyncio.sleep(0.01)
        link = socket.with_suffix(".link")
        link.symlink_to(back)
        link.replace(socket)
        assert await request is None
        await server.request("POST", "/later")
        await server.close()

    with serving(other, 200, after_s=0.5) as seen_there, serving(back, 200) as seen_back:
        asyncio.run(work(seen_there))
    assert seen_there == ["GET /health", "POST /v1/completions"]
    assert seen_back == ["GET /health", "POST /later"]


def test_as_many_requests_are_in_flight_as_the_machine_allows(socket: Path) -> None:
    """Each is a connection; with a shell's usual limit of open files a large round's requests failed."""
    num_requests = 200
    num_arrived = 0
    all_arrived = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_arrived
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/completions" in request:
            num_arrived += 1
            if num_arrived == num_requests:
                all_arrived.set()
            await all_arrived.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async def work() -> None:
        server = Server("rollout-0", socket, request_timeout_s=60)
        async with await asyncio.start_unix_server(answer, socket, backlog=num_requests):
            requests = (server.request("POST", "/v1/completions") for _ in range(num_requests))
            assert await asyncio.gather(*requests) == [None] * num_requests
        await server.close()

    usual, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
    try:
        asyncio.run(work())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, most))
