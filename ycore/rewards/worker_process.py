"""A confined process that answers requests, as its parent knows it: its start, what connects the two, and its end.

Requests go to its standard input. Answers come on a socket of their own, in lines of bounded length. What it prints
comes on a pipe. The process may run any code by now, so that nothing that comes from it is believed (`replies`).
"""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress

from ycore.run.process_tree import kill_tree
from ycore.sandbox import Confinement
from ycore.sandbox.confine import Launch, PipeReader, launch_of
from ycore.sandbox.watch import Watch

_REAP_TIMEOUT_S = 5.0


class Replies:
    """Lines on a socket, none of them longer than it may be; what comes unasked is kept as a sign that it came."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._has_more = end, False
        end.setblocking(False)

    @property
    def is_silent(self) -> bool:
        """Whether the other end is open, and has said nothing since the last line."""
        if self._has_more:
            return False
        try:
            self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    async def line(self, most: int) -> bytes | None:
        """The next line; None where it is too long, IncompleteReadError where the end was closed before it came."""
        held = bytearray()
        while b"\n" not in held and len(held) <= most:
            part = await asyncio.get_running_loop().sock_recv(self._end, most + 1 - len(held))
            if not part:
                raise asyncio.IncompleteReadError(bytes(held), None)
            held += part
        line, end, more = bytes(held).partition(b"\n")
        self._has_more = bool(more)
        return line if end else None

    def close(self) -> None:
        self._end.close()


class WorkerProcess:
    """A started process, its pipes and its watch."""

    def __init__(
        self, launch: Launch, process: Process, replies: Replies, output: PipeReader, watch: Watch
    ) -> None:
        self.launch, self.process, self.replies = launch, process, replies
        self._output, self._watch = output, watch

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        held: Confinement,
        name: str,
        printed: Callable[[bytes], None],
    ) -> "WorkerProcess":
        answers, to_answers = socket.socketpair()
        output, to_output = os.pipe()
        launch = None
        try:
            launch = launch_of(module, [str(to_answers.fileno()), *arguments], held, name=name)
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=PIPE,
                stdout=to_output,
                stderr=to_output,
                env=launch.environment,
                cwd=launch.working,
                pass_fds=(to_answers.fileno(),),
                start_new_session=True,
            )
        except BaseException:
            answers.close()
            os.close(output)
            if launch is not None:
                launch.clear()
            raise
        finally:
            to_answers.close()
            os.close(to_output)
        scratch = None if launch.scratch is None else str(launch.scratch)
        watch = Watch(process.pid, held.limits, lambda: launch.end(process.pid), scratch=scratch)
        watch.start()
        return cls(launch, process, Replies(answers), PipeReader(output, printed), watch)

    @property
    def is_clean(self) -> bool:
        """Whether it lives, and has said nothing that it was not asked."""
        return self._is_alive and self.replies.is_silent

    @property
    def _is_alive(self) -> bool:
        """As the kernel knows it: the event loop learns of an end a moment later."""
        if sys.platform != "linux":
            return self.process.returncode is None
        try:
            return (
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
            )
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
