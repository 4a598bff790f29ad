"""Ctrl-C and other stop signals, and a reader of the output who leaves: what must not break off a process of ycore.

The command ends with one line and exit status 130 from its first instruction on. A launcher counts the requests, and a
trainer is told of them; both then end in order.
"""

import errno
import io
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

_EXIT_STATUS = (
    130  # of `ycore.errors.Interrupted`; this module is imported before anything else
)


def end_at_once(number: int, frame: object) -> None:
    """End the command while it is being imported: an exception could be lost in an import, or become another one."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(_EXIT_STATUS)


def end_while_importing() -> None:
    """Install `end_at_once` for Ctrl-C, unless it is ignored, as by a background job."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)


def run_command(command: Callable[[], int]) -> int:
    """Run a command and return its exit status, which is 130 after Ctrl-C, whatever that has broken."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupts.append(number)
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)
        status = command()
    except BaseException:  # only after Ctrl-C; else it is raised again
        if not interrupts:
            raise
        status = _EXIT_STATUS  # an import that Ctrl-C broke fails in its own way
        print("interrupted", file=sys.stderr)
    if interrupts and status:
        status = _EXIT_STATUS
    if status:
        # A Ctrl-C in Python's own shutdown would hide the status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


class _Output(io.FileIO):
    """A standard stream whose writes never fail: what is printed is not worth a run."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EPIPE:  # `ycore grpo | head -1` has read what it wants
                self.error = error
            return memoryview(data).nbytes


def keep_printing() -> Callable[[], OSError | None]:
    """Let no failed write to the standard streams end this process.

    Returns:
        A function that returns why standard output is not whole, unless its reader left.
    """
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Output(stream.fileno())),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream is sys.stderr or stream.isatty(),
        )
        for stream in (sys.stdout, sys.stderr)
    )
    output = sys.stdout.buffer.raw

    def problem() -> OSError | None:
        sys.stdout.flush()
        return output.error

    return problem


class StopRequests:
    """A context in which SIGINT, SIGTERM and SIGHUP only add to `count`; the old handlers come back after it."""

    def __init__(self) -> None:
        self.count = 0
        self._raises = False
        self._previous: dict[signal.Signals, Any] = {}
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        # Python allows handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            # Under nohup the run outlives its terminal.
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            self._previous = {number: signal.signal(number, self._count) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise Interrupted in work that cannot look at `count`, such as a download."""
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def wake(self) -> None:
        """End what `at_once` surrounds, as a signal would, from another thread."""
        if self._raises:
            os.kill(os.getpid(), signal.SIGINT)

    def _count(self, number: int, frame: FrameType | None) -> None:
        from ycore.errors import Interrupted

        if number == signal.SIGHUP:
            self._leave_closed_terminals()
        self.count += 1
        if self._raises:
            self._raises = False
            raise Interrupted(
                "stopped before the first step; the same command with --resume starts again"
            )

    def _leave_closed_terminals(self) -> None:
        """Send what is printed to nowhere: writing to a closed terminal is an error, which must not end a save."""
        for terminal in self._terminals:
            try:
                termios.tcgetattr(terminal)
            except termios.error:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, terminal)
                os.close(nowhere)


def on_stop(callback: Callable[[], None]) -> None:
    """From now on SIGINT and SIGTERM only call `callback`, as a trainer needs it that finishes its step."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda signum, frame: callback())
