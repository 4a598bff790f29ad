"""Requests to a vLLM server over its unix socket that survive a restart of the server.

The launcher restarts a dead engine behind the same socket. A request that was in flight is sent again to the new
process, with the same seed: its first answer never came, so there is no second one. The socket's file identifies the
process, as every process creates its own. An answer counts only while the file is still that of the process that was
prepared before the request.

A request has one deadline, however often it is sent: `request_timeout_s`, and `restart_timeout_s` more where its
process is lost meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from ycore.config.schema import EngineSettings
from ycore.errors import EngineError

Process = tuple[int, int]  # the inode and the modification time of its socket

# The server closes a connection after 5 s without a request, as in a training step; ours are dropped well before.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
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


def is_healthy(socket: Path, *, timeout_s: float = 1.0) -> bool:
    """Tell whether the server is ready or asleep. `timeout_s` limits each step (connecting, reading)."""
    return socket.exists() and request_succeeds(socket, "GET", "/health", timeout_s=timeout_s)


def request_succeeds(socket: Path, method: str, path: str, *, timeout_s: float) -> bool:
    """Send one request without a body, for callers without an event loop; True for status 200."""
    # `verify=False`, since loading certificates would take 0.1 s.
    transport = httpx.HTTPTransport(uds=str(socket), verify=False)
    try:
        with httpx.Client(transport=transport, timeout=timeout_s) as client:
            return client.request(method, f"http://engine{path}").status_code == httpx.codes.OK
    except httpx.HTTPError:
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
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=_LIMITS, verify=False),
            base_url=f"http://{name}",
            timeout=None,  # `request` has the deadline
        )

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
        if is_lost:
            within = (
                f"{self._timeout_s + self._restart_timeout_s:.0f} s; see logs/{self.name}.log"
            )
            raise EngineError(
                f"{self.name}: lost, and no answer to {path} from another process within {within}"
            )
        why = (
            f", sent {len(failures) + 1} times; first failure: {failures[0]}"
            if failures
            else ""
        )
        within = f"{self._timeout_s:.0f} s (engine.request_timeout_s)"
        raise EngineError(f"{self.name}: no answer to {path} within {within}{why}")

    async def request_once(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        is_json: bool = True,
    ) -> Any:
        """Send one request to whatever process is there; NoAnswer where a retry may help, else EngineError.

        Returns the answer's JSON, None where it is empty; its text with `is_json=False`.
        """
        try:
            response = await self._client.request(method, path, json=body)
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
        await self._client.aclose()

    async def _retry(
        self, method: str, path: str, body: Mapping[str, Any] | None, failures: list[str]
    ) -> Any:
        """Send the request until it is answered, without a deadline; appends each failure to `failures`."""
        pauses = iter(_RETRY_PAUSES_S)
        while True:
            before = self._process()
            try:
                prepared = await self._prepared_process()
                answer = await self.request_once(method, path, body)
            except NoAnswer as error:
                failures.append(str(error))
                self._is_suspect = True
                if self._process() == before:
                    pause = next(pauses, None)
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)
                continue
            if self._process() == prepared:
                return answer

    async def _prepared_process(self) -> Process:
        process = self._process()
        if process is not None and process == self._prepared and not self._is_suspect:
            return process
        async with self._lock:
            await self._wait_healthy()
            process = self._process()
            if process is None:
                raise NoAnswer(f"{self.name}: gone again; see logs/{self.name}.log")
            was_mine = await self.prepare() if process != self._prepared else True
            self.restarts += int(was_mine and self._last_seen not in (None, process))
            self._last_seen = self._prepared = process
            self._is_suspect = False
            return process

    def _process(self) -> Process | None:
        with contextlib.suppress(OSError):
            status = self.socket.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    async def _wait_healthy(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (
                    self.socket.exists()
                    and (await self._client.get("/health", timeout=5)).is_success
                ):
                    return
            await asyncio.sleep(0.2)
