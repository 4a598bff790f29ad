"""`ConfinedWorker`: a confined process that answers one request after the other, such as a person's reward functions.

The parent is trusted and holds nonces, deadlines, restarts and the log. The process may run any code, so its answers
are read by their shape alone. Requests go to its standard input, replies come on a socket of their own in lines of
bounded length, and what it prints comes on a pipe and reaches the log up to a limit.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from ycore.errors import RewardError
from ycore.foreign import ForeignRefused, foreign_json, foreign_line
from ycore.run.reports import kill_tree
from ycore.sandbox import END_S, MIB, Confinement
from ycore.sandbox.confine import Launch, confined_launch
from ycore.sandbox.stage import EXIT_EXCESS
from ycore.sandbox.watch import Watch

START_TIMEOUT_S = 120.0
MAX_STARTS = 3
_MAX_START_REPLY = 64 * 1024  # bytes of the first reply
_NONCE_BYTES = 16
_TAIL = 1000  # bytes of output, of which an error shows the last line
_REAP_TIMEOUT_S = 5.0
MAX_LOG_BYTES = 32 * MIB  # of all processes of a kind in a run

R = TypeVar("R")
T = TypeVar("T")


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
        first: Mapping[str, Any],
        read_first: Callable[[bytes, str], R],
        confinement: Confinement,
        *,
        log: Path | None,
        name: str = "0",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            first: the first request to each new process; `read_first` reads its reply.
            log: takes what the process prints; None drops it.
            name: tells the processes of a run apart.
        """
        self.restarts = 0
        self._first = first
        self._read_first = read_first
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
        self._running = await WorkerProcess.start(
            self.module, self.arguments, self._confinement, self._name, self._write_log
        )
        self._require_open()  # it may have been closed while the process was being made
        self._write_log(
            f"{self.kind} {self._running.process.pid}: {self._running.launch.description}\n".encode()
        )
        try:
            return await self.exchange(
                self._first,
                self._read_first,
                max_bytes=_MAX_START_REPLY,
                timeout_s=self._start_timeout_s,
            )
        except CallFailed:
            self._kill()
            raise

    async def exchange(
        self,
        request: Mapping[str, Any],
        read: Callable[[bytes, str], T],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> T:
        """Send one line and read the line that answers it; `read` gets it with the nonce of the request.

        A process that gave no answer is killed, and CallFailed says why.
        """
        running = self._running
        assert running is not None and running.process.stdin is not None, (
            f"ask a {self.kind} only when it is ready"
        )
        stdin = running.process.stdin
        nonce = secrets.token_hex(_NONCE_BYTES)
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(json.dumps({**request, "nonce": nonce}).encode() + b"\n")
                await stdin.drain()
                line = await running.replies.read_line(max_bytes)
            if line is None:
                raise CallFailed(
                    f"no answer of a worker: more than {max_bytes / 2**20:.1f} MiB"
                )
            is_answered = line.startswith(b"{") and nonce.encode() in line
            return read(line, nonce)
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


class ReplySocket:
    """Lines of bounded length on a socket. What comes beyond the awaited line marks the process as unclean."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._has_more = False
        end.setblocking(False)

    @property
    def is_silent(self) -> bool:
        """Whether the other end is open and has sent nothing since the last line."""
        if self._has_more:
            return False
        try:
            self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def read_line(self, max_bytes: int) -> bytes | None:
        """Return the next line; None where it is too long, IncompleteReadError where the end closes before it."""
        received = bytearray()
        while b"\n" not in received and len(received) <= max_bytes:
            part = await asyncio.get_running_loop().sock_recv(
                self._end, max_bytes + 1 - len(received)
            )
            if not part:
                raise asyncio.IncompleteReadError(bytes(received), None)
            received += part
        line, end, more = bytes(received).partition(b"\n")
        self._has_more = bool(more)
        return line if end else None

    def close(self) -> None:
        self._end.close()


class PipeReader:
    """Passes on what a confined process writes to a pipe, as it comes, on the event loop in which it is made."""

    def __init__(self, descriptor: int, on_data: Callable[[bytes], object]) -> None:
        self.ended = asyncio.Event()
        self._descriptor = descriptor
        self._on_data = on_data
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def close(self) -> None:
        if not self.ended.is_set():
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        if data:
            self._on_data(data)
        else:
            self.close()


class WorkerProcess:
    """A started process, its pipes and its watch."""

    def __init__(
        self,
        launch: Launch,
        process: Process,
        replies: ReplySocket,
        output: PipeReader,
        watch: Watch,
    ) -> None:
        self.launch = launch
        self.process = process
        self.replies = replies
        self._output = output
        self._watch = watch

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        confinement: Confinement,
        name: str,
        on_output: Callable[[bytes], None],
    ) -> "WorkerProcess":
        """Start `python -m module DESCRIPTOR arguments...`, which replies on the descriptor."""
        replies, child_replies = socket.socketpair()
        output, child_output = os.pipe()
        launch = None
        try:
            launch = confined_launch(
                module, [str(child_replies.fileno()), *arguments], confinement, name=name
            )
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=PIPE,
                stdout=child_output,
                stderr=child_output,
                env=launch.environment,
                cwd=launch.working,
                pass_fds=(child_replies.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            replies.close()
            os.close(output)
            if launch is not None:
                launch.clear()
            raise
        finally:
            child_replies.close()
            os.close(child_output)
        watch = Watch(
            process.pid,
            confinement.limits,
            lambda: launch.end(process.pid),
            scratch=None if launch.scratch is None else str(launch.scratch),
        )
        watch.start()
        return cls(launch, process, ReplySocket(replies), PipeReader(output, on_output), watch)

    @property
    def is_clean(self) -> bool:
        """Whether it lives, and has sent nothing that it was not asked for."""
        return self._is_alive and self.replies.is_silent

    @property
    def _is_alive(self) -> bool:
        # The kernel knows; the event loop learns of an end a moment later.
        try:
            return (
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                is None
            )
        except ChildProcessError:
            return False

    async def exit_reason(self) -> str:
        """Say how the process ended: by its limits, a signal or an exit status."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 1.0)
        code = self.process.returncode
        if self._watch.excess is not None:
            return f"it held {self._watch.excess}"
        if code is None:
            return "it closed its output"
        if self.launch.has_stage and code == EXIT_EXCESS:
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
        more_s = END_S if self.launch.has_stage else 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S + more_s):
                await self.process.wait()
                await self._output.ended.wait()
        if self.process.returncode is None:
            kill_tree(self.process.pid)
        self.replies.close()
        self._output.close()
        self.launch.clear()


_FAILURES = {"error": 600, "failed": 300}  # characters that are shown


def reply_in(line: bytes, nonce: str) -> dict[str, Any]:
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
