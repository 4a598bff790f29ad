"""Requests to a vLLM server over its unix socket that survive a restart of the server.

The launcher restarts a dead engine behind the same socket. A request that was in flight is sent again to the new
process, with the same seed: its first answer never came, so there is no second one. The socket's file identifies the
process, as every process creates its own. An answer counts where the file of the process that was prepared before the
request is still there. An engine on another machine has a link, which leads to another engine while it is lost.

A request has one deadline, however often it is sent: `request_timeout_s`, and `restart_timeout_s` more where its
process is lost meanwhile.

`SleepingEngine` puts an engine to sleep, so that others may use its device, and wakes it (vLLM's `/sleep`, `/wake_up`).
Level 1 keeps the weights in host memory, level 2 drops them. A policy's weights are dropped, since new ones are sent
anyway. A frozen model's are kept or read from disk again, whichever was measured to be cheaper. On waking, weights come
first and the KV cache second, so that the cache and what is sent never compete for the device.

A file beside the socket says that the engine sleeps, and at which level. The launcher reads it too: it leaves an engine
alone that dies asleep. A restarted trainer finds from it how the last one left the engines. A restarted engine is awake,
so its start removes the file. While an engine falls asleep or wakes, the file has another name: a trainer that is killed
then may leave weights dropped, so the next sleep is at least as deep.
"""

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket
from typing import Any, NamedTuple

from ycore.config.schema import EngineSettings
from ycore.errors import EngineError
from ycore.placement.slots import Sleeper


class Process(NamedTuple):
    """A process by its socket's file."""

    socket: Path
    inode: int
    modified_ns: int


def process_at(socket: Path) -> Process | None:
    """Return the process that a socket leads to, if there is one."""
    with contextlib.suppress(OSError):
        socket = socket.resolve()
        status = socket.stat()
        return Process(socket, status.st_ino, status.st_mtime_ns)
    return None


_RETRY_PAUSES_S = (
    0.05,
    0.2,
    0.5,
    1.0,
    2.0,
)  # between requests to one process that keeps failing


class NoAnswer(EngineError):
    """The connection was lost, or the server failed (status 500 and above): a retry may help."""


class BadRequest(EngineError):
    """The server rejects this request (status 400), for example as too long; it may accept another."""


def is_healthy(socket: Path) -> bool:
    """Tell whether the server is ready or asleep."""
    return request_succeeds(socket, "GET", "/health", timeout_s=1.0)


def request_succeeds(socket: Path, method: str, path: str, *, timeout_s: float) -> bool:
    """Send one request without a body, for callers without an event loop; True for status 200.

    `timeout_s` limits each step (connecting, reading). httpx would leave every answer in a cycle, which a launcher that
    waits for days collects late.
    """
    connection = HTTPConnection("engine")
    connection.sock = Socket(AF_UNIX)
    connection.sock.settimeout(timeout_s)
    with contextlib.suppress(OSError, HTTPException), contextlib.closing(connection):
        connection.sock.connect(str(socket))
        connection.request(method, path)
        return connection.getresponse().status == 200
    return False


def restart_timeout_s(settings: EngineSettings) -> float:
    """Return how long to wait for a restarted process; the launcher gives up before that, and says why."""
    return 2 * settings.start_timeout_s + settings.health_timeout_s


class Server:
    """Example: `await Server("judge-0", socket, request_timeout_s=60).request("POST", "/v1/completions", body)`.

    Args:
        request_timeout_s: Deadline of a request, retries included.
        restart_timeout_s: How much longer a request waits where its process was lost.

    Attributes:
        restarts: How often a new process has replaced the one before, each counted by one rank's client.
        in_flight: Requests of this client without an answer.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        *,
        request_timeout_s: float,
        restart_timeout_s: float = 900.0,
    ) -> None:
        self.name = name
        self.socket = socket
        self.restarts = self.in_flight = 0
        self._timeout_s = request_timeout_s
        self._restart_timeout_s = restart_timeout_s
        self._last_seen: Process | None = None
        self._prepared: Process | None = None
        self._is_suspect = False
        self._lock = asyncio.Lock()
        self._clients: dict[Path, Any] = {}  # by socket

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the server is healthy; EngineError where it is not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_healthy()
        except TimeoutError:
            way_out = f"see logs/{self.name}.log, or raise engine.start_timeout_s"
            raise EngineError(
                f"{self.name}: not ready after {timeout_s:.0f} s; {way_out}"
            ) from None

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Any:
        """Send a request, and again after a restart, until a prepared process answers; return its JSON, None if empty.

        Raises:
            BadRequest: The server rejects this request.
            EngineError: Another status that a retry cannot change, or no answer before the deadline.
        """
        process = self._process()
        failures = list[str]()
        answer = asyncio.ensure_future(self._retry(method, path, body, failures))
        self.in_flight += 1
        try:
            await asyncio.wait([answer], timeout=self._timeout_s)
            is_lost = process is None or self._process() != process
            if is_lost:
                await asyncio.wait([answer], timeout=self._restart_timeout_s)
            if answer.done():
                return answer.result()
        finally:
            self.in_flight -= 1
            answer.cancel()
        within = f"{self._timeout_s:.0f} s (engine.request_timeout_s)"
        if is_lost:
            within += f", and from another process within {self._restart_timeout_s:.0f} s more"
        if failures:
            within += f", sent {len(failures) + 1} times; first failure: {failures[0]}"
        raise EngineError(
            f"{self.name}: no answer to {path} within {within}; see logs/{self.name}.log"
        )

    async def request_once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        content: AsyncIterable[bytes] | None = None,
        is_json: bool = True,
        process: Process | None = None,
    ) -> Any:
        """Send one request to a process, or whichever is there; NoAnswer where a retry may help, else EngineError.

        Returns the answer's JSON, None where it is empty; its text with `is_json=False`.
        """
        import httpx

        client = self._client(process.socket if process else self.socket.resolve())
        try:
            response = await client.request(method, path, json=body, content=content)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise NoAnswer(
                f"{self.name}: {path} failed, {why}; see logs/{self.name}.log"
            ) from error
        if response.is_error:
            problem = (
                f"{self.name}: {path} answered {response.status_code}: {response.text[:300]}"
            )
            if response.is_server_error:
                raise NoAnswer(problem)
            if response.status_code == httpx.codes.BAD_REQUEST:
                raise BadRequest(problem)
            raise EngineError(problem)
        if not is_json:
            return response.text
        try:
            return response.json() if response.content else None
        except ValueError:
            raise EngineError(
                f"{self.name}: {path} answered {response.text[:300]!r}, which is not JSON"
            ) from None

    async def prepare(self) -> bool:
        """Prepare a new process for its first request, with `request_once`; nothing, unless overridden.

        Returns whether this client prepared it, and not another rank's.
        """
        return True

    def prepare_again(self) -> None:
        self._prepared = None

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    def _client(self, socket: Path) -> Any:
        import httpx

        if socket not in self._clients:
            # Each request in flight is a connection, and the usual limit of open files is 1,024.
            most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
            # The server closes a connection after 5 s without a request, as in a training step; ours are dropped before.
            self._clients[socket] = httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(
                    uds=str(socket),
                    limits=httpx.Limits(max_connections=None, keepalive_expiry=1.0),
                    verify=False,
                ),
                base_url=f"http://{self.name}",
                timeout=None,  # `request` has the deadline
            )
        return self._clients[socket]

    async def _retry(
        self, method: str, path: str, body: Mapping[str, Any] | None, failures: list[str]
    ) -> Any:
        """Send the request until it is answered, without a deadline; appends each failure to `failures`."""
        pauses = iter(_RETRY_PAUSES_S)
        while True:
            before = self._process()
            try:
                prepared = await self._prepared_process()
                answer = await self.request_once(method, path, body, process=prepared)
            except NoAnswer as error:
                failures.append(str(error))
                self._is_suspect = True
                if self._process() == before:
                    pause = next(pauses, None)
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)
                continue
            if process_at(prepared.socket) == prepared:
                return answer

    async def _prepared_process(self) -> Process:
        process = self._process()
        if process is not None and process == self._prepared and not self._is_suspect:
            return process
        async with self._lock:
            await self._wait_healthy()
            process = self._process()
            was_mine = await self.prepare() if process != self._prepared else True
            if process is None or process != self._process():
                raise NoAnswer(f"{self.name}: gone again; see logs/{self.name}.log")
            self.restarts += int(was_mine and self._last_seen not in (None, process))
            self._last_seen = self._prepared = process
            self._is_suspect = False
            return process

    def _process(self) -> Process | None:
        return process_at(self.socket)

    async def _wait_healthy(self) -> Any:
        while True:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(5):
                    return await self.request_once("GET", "/health")
            await asyncio.sleep(0.2)


SLEEP = "/sleep?level={level}"
KEEP = 1
"""vLLM's sleep level that keeps an engine's weights in host memory."""
DROP = 2
"""vLLM's sleep level that drops an engine's weights."""
_CHANGING = ".between"  # suffix of the file while the engine falls asleep or wakes


def asleep_file(socket: Path) -> Path:
    """Return the file that exists while the engine behind the socket sleeps; it holds the level."""
    return socket.with_suffix(".asleep")


def own_socket(socket: Path) -> Path:
    """Return the socket of an engine on another machine, to which `socket` leads unless the engine is lost."""
    return socket.with_suffix(".host")


def mark_asleep(socket: Path, level: int) -> None:
    """Record that the engine behind the socket sleeps at this level; a reader never sees half a file."""
    changing = socket.with_suffix(_CHANGING)
    changing.write_text(str(level))
    changing.replace(asleep_file(socket))


class SleepingEngine:
    """An engine that can sleep.

    Args:
        refill: Loads weights that were dropped; by default the engine reads its model from disk.
        level: DROP, or KEEP, which needs memory of the machine and no refill.

    Attributes:
        has_weights: False from falling asleep until weights may be loaded again.
    """

    def __init__(
        self,
        server: Server,
        *,
        refill: Callable[[], Awaitable[None]] | None = None,
        level: int = DROP,
    ) -> None:
        self._server = server
        self._asleep = asleep_file(server.socket)
        self._changing = server.socket.with_suffix(_CHANGING)
        self._refill = refill or partial(reload_from_disk, server)
        self._level = level
        self.has_weights = not self._asleep.exists()

    async def sleep(self) -> None:
        """Free the device, unless the engine sleeps already; requests in flight are aborted."""
        if self._asleep.exists():
            return
        level = self._level
        if (
            self._changing.exists()
        ):  # a change was cut off; the deepest level if its file is empty
            level = max(level, int(self._changing.read_text() or DROP))
        self._changing.write_text(str(level))
        await self._server.request("POST", SLEEP.format(level=level))
        self.has_weights = False
        self._changing.replace(self._asleep)

    async def wake(self) -> None:
        """Bring weights and KV cache back, unless the engine is awake already."""
        if not self._asleep.exists():
            return
        level = int(self._asleep.read_text())
        # First: from now on the launcher restarts the engine if it has died.
        self._asleep.replace(self._changing)
        await self._server.request("POST", "/wake_up?tags=weights")
        self.has_weights = True
        if level == DROP:
            await self._refill()
        await self._server.request("POST", "/wake_up?tags=kv_cache")
        self._changing.unlink()


@dataclass(frozen=True)
class SleepTogether:
    """The engines of one role on one slot, by model. Models change in turn. A model's engines have devices of their
    own, and change together.
    """

    models: Sequence[Sequence[Sleeper]]

    async def sleep(self) -> None:
        for engines in self.models:
            await asyncio.gather(*(engine.sleep() for engine in engines))

    async def wake(self) -> None:
        for engines in self.models:
            await asyncio.gather(*(engine.wake() for engine in engines))


async def reload_from_disk(server: Server) -> None:
    """Have the engine load the model that it was started with."""
    await server.request("POST", "/collective_rpc", {"method": "reload_weights"})
