"""The process of one reward worker as its parent knows it: how it is started, its three pipes, and how it ends.

Requests go to its standard input. Answers come on a pipe of its own, in lines of bounded length. What it prints comes
on a third pipe. The process may run any code by now, so that nothing that comes on a pipe is believed (`replies`).
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

from ycore.rewards.confinement import Confinement
from ycore.run.process_tree import kill_tree
from ycore.sandbox.confine import Launch, launch_of
from ycore.sandbox.watch import Watch

_REAP_TIMEOUT_S = 5.0


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


class WorkerProcess:
    """A started process, its pipes and its watch."""

    def __init__(self, launch: Launch, process: Process, replies: Replies, output: Output, watch: Watch) -> None:
        self.launch, self.process, self.replies = launch, process, replies
        self._output, self._watch = output, watch

    @classmethod
    async def start(cls, held: Confinement, name: str, printed: Callable[[bytes], None]) -> "WorkerProcess":
        loop = asyncio.get_running_loop()
        pipes = [os.pipe() for _ in range(2)]  # answers, output
        (answers, to_answers), (output, to_output) = pipes
        launch = None
        try:
            launch = launch_of(
                "ycore.rewards.worker",
                [str(to_answers)],
                level=held.level,
                view=held.view,
                limits=held.limits,
                run_id=held.run_id,
                name=name,
                own_user=held.own_user,
            )
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=PIPE,
                stdout=to_output,
                stderr=to_output,
                env=launch.environment,
                cwd=launch.working,
                pass_fds=(to_answers,),
                start_new_session=True,
            )
        except BaseException:
            for end in (answers, output):
                os.close(end)
            if launch is not None:
                launch.clear()
            raise
        finally:
            for end in (to_answers, to_output):
                os.close(end)
        scratch = None if launch.scratch is None else str(launch.scratch)
        watch = Watch(process.pid, held.limits, lambda: launch.end(process.pid), scratch=scratch)
        watch.start()
        _, replies = await loop.connect_read_pipe(Replies, _file(answers))
        _, shown = await loop.connect_read_pipe(lambda: Output(printed), _file(output))
        return cls(launch, process, replies, shown, watch)

    @property
    def is_clean(self) -> bool:
        """Whether it lives, and has said nothing that it was not asked."""
        return self._is_alive and self.replies.is_empty and not self.replies.ended.is_set()

    @property
    def _is_alive(self) -> bool:
        """As the kernel knows it: the event loop learns of an end a moment later."""
        if sys.platform != "linux":
            return self.process.returncode is None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    async def how_it_ended(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 1.0)
        code = self.process.returncode
        if self._watch.excess is not None:
            return f"it held {self._watch.excess}"
        if code is None:
            return "it closed its output"
        code = 128 - code if code > 128 else code  # bwrap reports a signal as a shell does
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        self._watch.stop()
        self.launch.end(self.process.pid)

    async def reap(self) -> None:
        # Bounded: what a reward detached from its group may hold the pipes that these wait for.
        with suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await self.process.wait()
                await self._output.ended.wait()
        if self.process.returncode is None:
            kill_tree(self.process.pid)
        self.replies.close()
        self._output.close()
        self.launch.clear()


def _file(descriptor: int) -> BinaryIO:
    return os.fdopen(descriptor, "rb", buffering=0)
