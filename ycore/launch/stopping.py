"""Ctrl-C and its like while a run goes on: counted, so that the run can end in order.

Not here: what one or two of them mean once the trainer runs (`supervise`).
"""

import os
import signal
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from ycore.errors import Interrupted

_STREAMS = (0, 1, 2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Within it, SIGINT, SIGTERM and SIGHUP only add to `count`; after it, they mean what they meant before."""

    def __init__(self) -> None:
        self.count = 0
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}
        self._terminals = [descriptor for descriptor in _STREAMS if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            heard = [number for number in _SIGNALS if number != signal.SIGHUP or not _outlives_its_terminal()]
            self._before = {number: signal.signal(number, self._count) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around work that cannot look at `count`, such as a download: a signal raises Interrupted in its midst."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go_of_a_closed_terminal(self._terminals)
        self.count += 1
        if self._at_once:
            self._at_once = False
            raise Interrupted("stopped before the first step; the same command starts again with --resume")


def _outlives_its_terminal() -> bool:
    """Whether this process was started under `nohup`, or by something else that ignores a closed terminal."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _let_go_of_a_closed_terminal(terminals: list[int]) -> None:
    """What is shown goes nowhere from here on: to write to a terminal that is gone is an error, also in a save."""
    for descriptor in terminals:
        try:
            termios.tcgetattr(descriptor)
        except termios.error:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
