"""Say what a process is busy with: something moves within 2 s of a command's start, and then every 5 s.

Whoever works says `with working("writing sums.gguf", total=num_bytes, unit="MB") as work: work.add(num_bytes)`. A
`Pulse` shows it: a bar in a terminal, elsewhere a plain line that begins with `now`. A process of a run publishes it
to a file.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self, TextIO

from ycore.run.files import read_tail
from ycore.run.text import as_duration, printable

FIRST_S = 1.5  # the command itself takes a while to start
EVERY_S = 5.0
_LOOK_S = 0.2
_PUBLISH_S = 0.5
_BAR_COLUMNS = 24
_COUNTS = re.compile(rb"(\d+)/(\d+) \[")  # as tqdm counts

Count = Callable[[], tuple[float, float] | None]
"""Returns how much is done and of how much; None while nobody knows."""


@dataclass
class Work:
    """Something that takes its time. `began` is a time of day in seconds; the unit MB counts bytes."""

    words: str
    total: float | None = None
    unit: str = ""
    done: float = 0.0
    began: float = field(default_factory=time.time)
    count: Count | None = None

    def add(self, amount: float = 1.0) -> None:
        self.done += amount
        _publish(within_s=_PUBLISH_S)

    def share(self) -> float | None:
        """Return the part that is done, from 0 to 1; None where nobody knows of how much."""
        if self.count is not None and (counts := self.count()) is not None:
            self.done, self.total = counts
        return min(1.0, self.done / self.total) if self.total else None

    def line(self, now: float) -> str:
        """Return `writing sums.gguf for 12 s, 120 of 270 MB, 10.0 MB/s, 15 s left`, as far as it is known."""
        seconds = max(0.0, now - self.began)
        words = f"{self.words} for {as_duration(seconds)}"
        if self.share() is None or self.total is None:
            return words
        scale = 1e6 if self.unit == "MB" else 1.0
        words += f", {self.done / scale:.0f} of {self.total / scale:.0f} {self.unit}".rstrip()
        if not self.done or not seconds:
            return words
        rate = self.done / seconds
        of_bytes = " MB" if self.unit == "MB" else ""
        left = as_duration(max(0.0, self.total - self.done) / rate)
        return f"{words}, {rate / scale:.3g}{of_bytes}/s, {left} left"


_open: list[Work] = []
_board: Path | None = None
_published = 0.0


@contextmanager
def working(
    words: str, *, total: float | None = None, unit: str = "", count: Count | None = None
) -> Iterator[Work]:
    """Say what this process does until the context ends; of several, the innermost is shown."""
    work = Work(words, total, unit, count=count)
    _open.append(work)
    _publish()
    try:
        yield work
    finally:
        _open.remove(work)
        _publish()


def current() -> Work | None:
    return _open[-1] if _open else None


def counted_in(log: Path, *, begin: int = 0) -> tuple[float, float] | None:
    """Return the last `3/8 [` of a progress bar in a log, after the byte `begin`."""
    try:
        counts = _COUNTS.findall(read_tail(log, 8192, begin=begin))
    except OSError:
        return None
    if not counts:
        return None
    done, total = counts[-1]
    return float(done), float(total)


# -- between processes -------------------------------------------------------------------------------------------------


def publish_work(board: Path) -> None:
    """Let this process say in a file, from now on, what it is busy with."""
    global _board
    _board = board
    _publish()


def _publish(*, within_s: float = 0.0) -> None:
    """Write the innermost work down, unless it was within the last seconds."""
    global _published
    if _board is None or time.monotonic() - _published < within_s:
        return
    _published = time.monotonic()
    with suppress(OSError):  # a view is not worth a run
        if (work := current()) is None:
            _board.unlink(missing_ok=True)
            return
        work.share()
        partial = _board.with_name(f".{_board.name}")
        partial.write_text(json.dumps(asdict(replace(work, count=None))))
        partial.replace(_board)


# -- on a screen -------------------------------------------------------------------------------------------------------


class Pulse:
    """Shows what goes on, from a thread of its own: 2 s after it opens, and 5 s after the last line.

    Of several pulses that are open, the newest alone speaks.

    Args:
        stream: a terminal gets a bar that goes when the work ends; anything else gets plain lines.
        words: returns what goes on now; nothing is shown while it is empty, nor with `YCORE_PROGRESS=off`.
    """

    _open: ClassVar[list["Pulse"]] = []

    def __init__(self, stream: TextIO, words: Callable[[], str]) -> None:
        self._stream = stream
        self._words = words
        self._is_off = os.environ.get("YCORE_PROGRESS") == "off"
        self._lock = threading.Lock()
        self._due = time.monotonic() + FIRST_S - _LOOK_S
        self._ended = threading.Event()
        self._live: Any = None

    def __enter__(self) -> Self:
        Pulse._open.append(self)
        for older in Pulse._open[:-1]:
            older.hide()
        threading.Thread(target=self._run, name="ycore-pulse", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.hide()
        Pulse._open.remove(self)

    def end_silence(self, now: float) -> None:
        """Tell it that a line was printed."""
        self._due = now + EVERY_S - _LOOK_S

    def hide(self) -> None:
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None

    def look(self, now: float) -> None:
        """Show what goes on, if it is time to."""
        with self._lock:
            if self._ended.is_set() or Pulse._open[-1] is not self:
                return
            if self._is_off or now < self._due or not (words := self._words()):
                return
            if not self._stream.isatty():
                print(f"now  {printable(words, one_line=True)}", file=self._stream, flush=True)
                self.end_silence(now)
            elif self._live is None:
                self._live = _open_live(self._stream, self._words)

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the stream is closed
            while not self._ended.wait(_LOOK_S):
                self.look(time.monotonic())


def quiet() -> Pulse:
    """Return a pulse that says nothing: it leaves the terminal to another, such as a person who types."""
    return Pulse(sys.stderr, str)


def command_pulse(stream: TextIO, command: str) -> Pulse:
    """Return the pulse of a whole command, which shows the work at hand, or else the command and its seconds."""
    whole = Work(command)
    return Pulse(stream, lambda: (current() or whole).line(time.time()))


def progress_bar(share: float, columns: int) -> str:
    """Draw a bar of text: `━━━━━━━━────`."""
    num_full = round(share * columns)
    return "━" * num_full + "─" * (columns - num_full)


def spinning_row(spinner: Any, words: str, *, columns: int) -> Any:
    """Return a row of rich: a spinner, a bar where the work at hand is counted, and words."""
    from rich.table import Table
    from rich.text import Text

    cells = [spinner, Text(printable(words, one_line=True), no_wrap=True, overflow="ellipsis")]
    work = current()
    share = None if work is None else work.share()
    if share is not None and columns >= 3 * _BAR_COLUMNS:
        cells.insert(1, Text(progress_bar(share, _BAR_COLUMNS), style="green"))
    row = Table.grid(padding=(0, 1))
    row.add_row(*cells)
    return row


def _open_live(stream: TextIO, words: Callable[[], str]) -> Any:
    """Show the words in a terminal, redrawn as they change, beneath what else is printed there."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner

    console = Console(file=stream)
    spinner = Spinner("dots")
    live = Live(
        console=console,
        get_renderable=lambda: spinning_row(spinner, words(), columns=console.width),
        refresh_per_second=5,
        transient=True,
        redirect_stdout=os.isatty(1),
        redirect_stderr=stream.isatty(),
    )
    live.start(refresh=True)
    return live
