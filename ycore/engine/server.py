"""One engine's server over a unix socket: asked with a deadline, and asked again where its process died.

The launcher starts a dead engine again, behind the same socket. A request that was under way goes to the new process,
with the same seed; its first answer never came, so there is no second one. Which process answered is told by the
socket's file, which is another one for each: an answer counts only if that is still the file of the process that was
made ready before.

One question has one deadline, however often it is asked again: `request_timeout_s`, and `restart_timeout_s` more where
the process that was there is lost meanwhile.

Not here: what is asked (`vllm_engine`), and starting anything (`launch`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ycore.config.schema import EngineSettings
from ycore.errors import EngineError

Process = tuple[int, int]
"""A process, by the inode and the time of the socket that it listens on."""

# The server closes a connection that was idle for 5 s, which a training step is; ours are given up well before that.
_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
_PAUSES_S = (0.05, 0.2, 0.5, 1.0, 2.0)  # before asking a process again that is there and gave no good answer


class NoAnswer(EngineError):
    """The connection was lost, or the server failed (a status of 500 and above): it may be asked again."""


class BadRequest(EngineError):
    """The server will not take this request (status 400), as too long perhaps; it may take another."""


def restart_timeout_s(settings: EngineSettings) -> float:
    """How long to wait for another process; the launcher gives up first, and says why."""
    return 2 * settings.start_timeout_s + settings.health_timeout_s


async def _as_it_is() -> None:
    """Nothing is to be done to a new process."""


class Server:
    """Example: `await Server("judge-0", socket, request_timeout_s=60).ask("POST", "/v1/completions", body)`.

    `prepare` is called with every new process before it is asked anything, and may `call` it. `restarts` counts the
    processes that took the place of another.
    """

    def __init__(
        self,
        name: str,
        socket: Path,
        *,
        request_timeout_s: float,
        restart_timeout_s: float = 900.0,
        prepare: Callable[[], Awaitable[None]] = _as_it_is,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._socket = socket
        self._timeout_s = request_timeout_s
        self._restart_timeout_s = restart_timeout_s
        self._prepare = prepare
        self._ready: Process | None = None
        self._known: Process | None = None
        self._in_doubt = False
        self._lock = asyncio.Lock()
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(socket), limits=_LIMITS),
            base_url=f"http://{name}",
            timeout=httpx.Timeout(request_timeout_s, pool=None),
        )

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Return once the server answers for the first time; EngineError when it does not in time."""
        if not await self._answers_within(timeout_s):
            raise EngineError(
                f"{self.name}: not ready after {timeout_s:.0f} s; "
                f"see logs/{self.name}.log, or raise engine.start_timeout_s"
            )

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer of a process that was prepared; EngineError for what asking again cannot mend, or not in time."""
        first, failures = self._process(), list[str]()
        answer = asyncio.ensure_future(self._ask(method, path, body, failures))
        allowed_s = self._timeout_s
        try:
            await asyncio.wait([answer], timeout=self._timeout_s)
            is_lost = first is None or self._process() != first
            if not answer.done() and is_lost:
                allowed_s += self._restart_timeout_s
                await asyncio.wait([answer], timeout=self._restart_timeout_s)
            if answer.done():
                return answer.result()
        finally:
            answer.cancel()
        if is_lost:
            raise EngineError(
                f"{self.name}: lost, and no answer to {path} from another process within {allowed_s:.0f} s; "
                f"see logs/{self.name}.log"
            )
        raise EngineError(self._too_late(path, failures))

    def _too_late(self, path: str, failures: list[str]) -> str:
        """The line for a process that is there and gave no good answer in time."""
        why = f", asked {len(failures) + 1} times; at first: {failures[0]}" if failures else ""
        return f"{self.name}: no answer to {path} within {self._timeout_s:.0f} s (engine.request_timeout_s){why}"

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, failures: list[str]) -> Any:
        """The same without a deadline; what it failed with on the way is left in `failures`."""
        pauses = iter(_PAUSES_S)
        while True:
            before = self._process()
            try:
                prepared = await self._prepared()
                answer = await self.call(method, path, body)
            except NoAnswer as error:
                failures.append(str(error))
                self._in_doubt = True
                if self._process() == before and await _is_over(pauses):
                    raise
                continue
            if self._process() == prepared:
                return answer

    def forget(self) -> None:
        """Prepare the process again before it is asked the next time: what it was prepared with is out of date."""
        self._ready = None

    async def _prepared(self) -> Process:
        now = self._process()
        if now is not None and now == self._ready and not self._in_doubt:
            return now
        async with self._lock:
            await self._until_it_answers()
            now = self._process()
            if now is None:
                raise NoAnswer(f"{self.name}: gone again; see logs/{self.name}.log")
            self.restarts += int(self._known not in (None, now))
            self._known = now
            if now != self._ready:
                await self._prepare()
                self._ready = now
            self._in_doubt = False
            return now

    def _process(self) -> Process | None:
        try:
            status = self._socket.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    async def _answers_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_it_answers()
        except TimeoutError:
            return False
        return True

    async def _until_it_answers(self) -> None:
        while not await self._is_healthy():
            await asyncio.sleep(0.2)

    async def _is_healthy(self) -> bool:
        if not self._socket.exists():
            return False
        try:
            return (await self._client.get("/health", timeout=5)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One request to whatever process is there; NoAnswer where another try may help, else EngineError."""
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.TimeoutException:
            raise EngineError(self._too_late(path, [])) from None
        except httpx.HTTPError as error:
            raise NoAnswer(
                f"{self.name}: {path} failed, {error or type(error).__name__}; see logs/{self.name}.log"
            ) from error
        if response.status_code >= httpx.codes.BAD_REQUEST:
            refused = BadRequest if response.status_code == httpx.codes.BAD_REQUEST else EngineError
            kind = NoAnswer if response.is_server_error else refused
            raise kind(f"{self.name}: {path} answered {response.status_code}: {response.text[:300]}")
        try:
            return response.json() if response.content else None
        except ValueError:
            raise EngineError(f"{self.name}: {path} answered {response.text[:300]!r}, which is not JSON") from None

    async def close(self) -> None:
        await self._client.aclose()


async def _is_over(pauses: Iterator[float]) -> bool:
    """Wait for the next pause; True where there is none left."""
    pause = next(pauses, None)
    if pause is not None:
        await asyncio.sleep(pause)
    return pause is None
