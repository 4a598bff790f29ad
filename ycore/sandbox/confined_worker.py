"""`ConfinedWorker`: a confined process that answers one request after the other, such as a person's reward functions.

The parent is trusted and holds nonces, deadlines, restarts and the log. The process may run any code, so its answers
are read by their shape alone. A socket, its standard input, takes requests and brings replies in lines of bounded
length. What it prints comes on a pipe and reaches the log up to a limit.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from ycore.errors import RewardError
from ycore.foreign import ForeignRefused, foreign_json, foreign_line
from ycore.run.reports import kill_tree
from ycore.sandbox import END_S, EXIT_EXCESS, MIB, Confinement, Limits
from ycore.sandbox.confine import Launch, confined_launch
from ycore.sandbox.watch import Watch
from ycore.types import JsonObject, Record

START_TIMEOUT_S = 120.0
MAX_STARTS = 3
_MAX_START_REPLY = 64 * 1024  # bytes of the first reply
_NONCE_BYTES = 16
_TAIL = 1000  # bytes of output, of which an error shows the last line
_REAP_TIMEOUT_S = 5.0
MAX_LOG_BYTES = 32 * MIB  # of all processes of a kind in a run

R = TypeVar("R")


class CallFailed(Exception):
    """A request that was not answered as it must be; the message says why, in one line."""


class ConfinedWorker(Generic[R]):
    """A confined process that answers requests. It has no process until `ready`, and none after `close`.

    Subclasses name the module that it runs and their requests.
    """

    module: str
    arguments: Sequence[str] = ()
    kind: str
    """Names the process in messages."""

    def __init__(
        self,
        first: Record,
        read_ready: Callable[[Any], R],
        confinement: Confinement,
        *,
        log: Path | None,
        name: str = "0",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            first: the first request to each new process; `read_ready` reads what it is `ready` with.
            log: takes what the process prints; None drops it.
            name: tells the processes of a run apart.
        """
        self.restarts = 0
        self._first = first
        self._read_ready = read_ready
        self._confinement = confinement
        self._name = name
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._log_bytes_left = confinement.limits.output
        self._tail = b""
        self._running: WorkerProcess | None = None
        self._killed: WorkerProcess | None = None
        self._first_reply: R | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether the process of the last request is still there, with its state."""
        return self._running is not None and self._running.is_clean

    @property
    def last_line(self) -> str:
        """The last line that the process printed, as `foreign_line` shows it."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return foreign_line(lines[-1]) if lines else "nothing was printed"

    async def ready(self) -> R:
        """Return the reply to `first`, of a new process where none runs.

        Raises:
            RewardError: several starts in a row failed.
        """
        if self._first_reply is not None and self.is_running:
            return self._first_reply
        self._kill()
        reason = ""
        for attempt in range(MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                was_ready = self._first_reply is not None
                self._first_reply = await self.start()
                self.restarts += was_ready
                return self._first_reply
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a {self.kind} did not start in {MAX_STARTS} attempts: {reason}; its output is in {self._log}"
        )

    async def start(self) -> R:
        """Start a process and return its reply to `first`; CallFailed where it gives none."""
        await self._reap()
        self._require_open()
        launch = confined_launch(
            self.module, self.arguments, self._confinement, name=self._name
        )
        self._running = await WorkerProcess.start(
            launch, self._confinement.limits, self._write_log
        )
        self._require_open()  # it may have been closed while the process was being made
        level = self._confinement.level
        self._write_log(
            f"{self.kind} {self._running.process.pid}: sandbox level {level}\n".encode()
        )
        try:
            reply = await self.exchange(
                self._first, max_bytes=_MAX_START_REPLY, timeout_s=self._start_timeout_s
            )
            return self._read_ready(reply.get("ready"))
        except CallFailed:
            self._kill()
            raise

    async def exchange(
        self, request: Record, *, max_bytes: int, timeout_s: float
    ) -> JsonObject:
        """Send one line and return the object that answers it.

        A process that gave no answer is killed, and CallFailed says why.
        """
        running = self._running
        assert running is not None, f"ask a {self.kind} only when it is ready"
        nonce = secrets.token_hex(_NONCE_BYTES)
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                await running.send_line(json.dumps({**request, "nonce": nonce}))
                line = await running.read_line(max_bytes)
            is_answered = line.startswith(b"{") and nonce.encode() in line
            return reply_in(line, nonce)
        except TimeoutError:
            raise CallFailed(f"timeout after {timeout_s:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise CallFailed(f"worker died ({await running.exit_reason()})") from None
        finally:
            if not is_answered:
                self._kill()

    async def close(self) -> None:
        """Kill the process with all that it started, and wait until it is gone."""
        self._is_closed = True
        self._kill()
        await self._reap()

    def _require_open(self) -> None:
        if self._is_closed:
            self._kill()
            raise RuntimeError(f"this {self.kind} is closed")

    def _write_log(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL:]
        if self._log is None or self._log_bytes_left <= 0:
            return
        self._log_bytes_left -= len(data)
        if self._log_bytes_left <= 0:
            limit = self._confinement.limits.output
            data += f"\n{self.kind}: what it prints beyond {limit} bytes is dropped\n".encode()
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a+b") as log:
                log.write(data)
                if log.tell() > MAX_LOG_BYTES:
                    _drop_older_half(log)

    def _kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._killed = self._running
            self._running = None

    async def _reap(self) -> None:
        if self._killed is not None:
            await self._killed.reap()
            self._killed = None


def _drop_older_half(log: BinaryIO) -> None:
    """Keep what was written last, behind a line that says so; where writers append, none has to know of this."""
    log.seek(-MAX_LOG_BYTES // 2, os.SEEK_END)
    log.readline()
    newest = log.read()
    log.truncate(0)
    log.write(f"older lines are gone: a log keeps {MAX_LOG_BYTES >> 20} MiB at most\n".encode())
    log.write(newest)


class WorkerProcess:
    """A started process, the socket to it, what it prints, and its watch."""

    def __init__(
        self,
        launch: Launch,
        process: Process,
        end: socket.socket,
        limits: Limits,
        on_output: Callable[[bytes], None],
    ) -> None:
        self.launch = launch
        self.process = process
        self._end = end
        self._has_more = False
        self._output = asyncio.create_task(_pass_on(process.stdout, on_output))
        self._watch = Watch(
            process.pid, limits, lambda: launch.end(process.pid), scratch=launch.scratch
        )
        self._watch.start()

    @classmethod
    async def start(
        cls, launch: Launch, limits: Limits, on_output: Callable[[bytes], None]
    ) -> "WorkerProcess":
        """Start what is launched, whose standard input is the socket."""
        end, child_end = socket.socketpair()
        end.setblocking(False)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=child_end.fileno(),
                stdout=PIPE,
                stderr=STDOUT,
                env=launch.environment,
                cwd=launch.working,
                start_new_session=True,
            )
        except BaseException:
            end.close()
            launch.clear()
            raise
        finally:
            child_end.close()
        return cls(launch, process, end, limits, on_output)

    @property
    def is_clean(self) -> bool:
        """Whether it lives, and has sent nothing since the last line."""
        if self._has_more:
            return False
        try:
            # The kernel knows of an end before the event loop does, and before all hold of the socket is gone.
            if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def send_line(self, line: str) -> None:
        await asyncio.get_running_loop().sock_sendall(self._end, line.encode() + b"\n")

    async def read_line(self, max_bytes: int) -> bytes:
        """Return the next line; CallFailed where it is too long, IncompleteReadError where it closes its end before."""
        received = bytearray()
        while b"\n" not in received:
            if len(received) > max_bytes:
                raise CallFailed(
                    f"no answer of a worker: more than {max_bytes / 2**20:.1f} MiB"
                )
            part = await asyncio.get_running_loop().sock_recv(
                self._end, max_bytes + 1 - len(received)
            )
            if not part:
                raise asyncio.IncompleteReadError(bytes(received), None)
            received += part
        line, _, more = bytes(received).partition(b"\n")
        self._has_more = bool(more)
        return line

    async def exit_reason(self) -> str:
        """Say how the process ended: by its limits, a signal or an exit status."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 1.0)
        code = self.process.returncode
        if self._watch.excess is not None:
            return f"it held {self._watch.excess}"
        if code is None:
            return "it closed its output"
        if code == EXIT_EXCESS and self.launch.scratch is not None:
            return "it held too much; its log says of what"
        code = 128 - code if code > 128 else code  # bwrap reports a signal as a shell does
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        self._watch.stop()
        self.launch.end(self.process.pid)

    async def reap(self) -> None:
        """Wait for the end, bounded: a detached child may hold the pipes that this waits for.

        A stage that is killed earlier would leave what it is about to end.
        """
        more_s = END_S if self.launch.scratch is not None else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S + more_s):
                await self.process.wait()
                await self._output
        if self.process.returncode is None:
            kill_tree(self.process.pid)
        self._end.close()
        self.launch.clear()


async def _pass_on(
    stream: asyncio.StreamReader | None, on_data: Callable[[bytes], None]
) -> None:
    assert stream is not None, "the process was started with a pipe"
    while data := await stream.read(65536):
        on_data(data)


_FAILURES = {"error": 600, "failed": 300}  # characters that are shown


def reply_in(line: bytes, nonce: str) -> JsonObject:
    """Return the JSON object of a line that answers the request of this nonce.

    Raises:
        CallFailed: It says that the start ended in an `error`, or that the call `failed`; or it is anything else.
    """
    try:
        reply = foreign_json(line, strict=True)
    except ForeignRefused as problem:
        raise CallFailed(f"no answer of a worker: {problem}") from None
    reply_nonce = reply.get("nonce") if isinstance(reply, dict) else None
    if not isinstance(reply_nonce, str) or not hmac.compare_digest(
        reply_nonce.encode(errors="replace"), nonce.encode()
    ):
        raise CallFailed("no answer of a worker: it does not belong to this call")
    for key, max_characters in _FAILURES.items():
        if isinstance(reply.get(key), str):
            raise CallFailed(foreign_line(reply[key], max_characters=max_characters))
    return reply  # type: ignore[no-any-return]
