"""trace.json: every turn, swap and round of a run, in the format that Perfetto and chrome://tracing open.

Beside these spans it has moments: how many requests wait and are in flight, once a second, and when a phase of a step
begins. Whoever looks at a run that goes on needs them, since a span is told when it is over.

It is JSON's array form, an event a line. The format lets the closing bracket be missing, so a run that is killed leaves
a file that opens all the same. Ranks append to one file, whole lines at a time.

Following metrics.jsonl and trace.json while another process writes them.

Not here: what a turn is (`controller.dispatch`), and the picture (`timeline`).
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ycore.run.metrics import parse_rows

MAX_BYTES = 256 * 2**20
"""A trace that has grown to this takes no more events; its last one says so."""

_FLUSH_EVERY = 200
_OPENING, _CLOSING = "[\n", "\n]\n"

SWAP, ROUND = "swap", "round"
SYNC = "sync"
WAITING, IN_FLIGHT = "waiting", "in flight"
FULL = "trace is full"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. `rank` and `slot` are its lane; seconds are since the epoch."""

    name: str
    rank: int
    slot: int
    began: float
    seconds: float
    told: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Levels:
    """How many there are at a moment, by name, and for how long the oldest of them has been there.

    Of WAITING the names are roles, of IN_FLIGHT a role and a slot: `judge 3`.
    """

    name: str
    rank: int
    at: float
    values: Mapping[str, int]
    oldest_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """A phase of the step, SYNC or ROUND, begins on a rank."""

    name: str
    rank: int
    at: float


Event = Span | Levels | Mark


class NullTrace:
    """For runs and tests that keep none."""

    is_kept = False

    def add(self, event: Event) -> None:
        """Forget it."""

    def flush(self) -> None:
        """Nothing to bring to disk."""


class TraceWriter(NullTrace):
    """Appends events; those of a round reach the disk with `flush`, or some hundred at a time."""

    is_kept = True

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: list[str] = []

    def add(self, event: Event) -> None:
        self._lines.append(json.dumps(_written(event)))
        if len(self._lines) >= _FLUSH_EVERY:
            self.flush()

    def flush(self) -> None:
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks write to one file
            size = _end_of_events(file)
            if size >= self._max_bytes:
                return
            if size + sum(map(len, lines)) >= self._max_bytes:
                lines = [json.dumps({"name": FULL, "ph": "i", "ts": 0, "pid": 0, "tid": 0, "s": "g"})]
                lines[0] = lines[0].ljust(max(0, self._max_bytes - size))
            file.seek(size)
            file.truncate()
            file.write((("" if size else _OPENING) + "".join(line + ",\n" for line in lines)).encode())


def finish_trace(path: Path) -> None:
    """Close the array, so that strict readers of JSON take it too; a later run of the folder opens it again."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = _end_of_events(file)
        if size <= len(_OPENING):
            return
        file.seek(size - len(",\n"))
        file.truncate()
        file.write(_CLOSING.encode())


def read_trace(path: Path) -> list[Span]:
    """Every whole span of a trace, also of one that was cut off; none where there is no file."""
    if not path.is_file():
        return []
    events = map(parse_event, path.read_text(encoding="utf-8").splitlines())
    return [event for event in events if isinstance(event, Span)]


def busy_stretches(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(began, seconds) of the stretches in which at least one of the spans lasts."""
    return joined((span.began, span.seconds) for span in spans)


def joined(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(began, seconds) in order, those that touch or overlap made one."""
    whole: list[tuple[float, float]] = []
    for began, seconds in sorted(stretches):
        if whole and began <= whole[-1][0] + whole[-1][1]:
            first, so_far = whole[-1]
            whole[-1] = (first, max(so_far, began + seconds - first))
        else:
            whole.append((began, seconds))
    return whole


def parse_event(line: str) -> Event | None:
    """The event of one line; None where it holds none, or none of ours."""
    try:
        told = json.loads(line.rstrip().rstrip(","))
        name, rank, at = told["name"], told["pid"], told["ts"] / 1e6
        match told["ph"]:
            case "X":
                return Span(name, rank, told["tid"], at, told["dur"] / 1e6, told["args"])
            case "C":
                return Levels(name, rank, at, told["args"], told["oldest_s"])
            case "i":
                return Mark(name, rank, at)
    except (ValueError, TypeError, KeyError):
        pass
    return None


def _written(event: Event) -> dict[str, Any]:
    match event:
        case Span():
            ended = {"dur": round(event.seconds * 1e6), "tid": event.slot, "args": dict(event.told)}
            return {"name": event.name, "ph": "X", "ts": round(event.began * 1e6), "pid": event.rank, **ended}
        case Levels():  # viewers pass over a key that they do not know, as `oldest_s`
            counted = {"args": dict(event.values), "oldest_s": dict(event.oldest_s)}
            return {"name": event.name, "ph": "C", "ts": round(event.at * 1e6), "pid": event.rank, **counted}
        case Mark():
            return {"name": event.name, "ph": "i", "ts": round(event.at * 1e6), "pid": event.rank, "tid": -1, "s": "t"}


def _end_of_events(file: Any) -> int:
    """Where the next event goes: behind the last whole line, before a closing bracket; 0 in an empty file."""
    size: int = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    tail_size = min(size, 1 << 16)
    file.seek(size - tail_size)
    tail: bytes = file.read()
    if tail.endswith(_CLOSING.encode()):
        end = size - len(_CLOSING)
        file.seek(end)
        file.write(b",\n")
        file.truncate()
        return end + len(",\n")
    return size - tail_size + tail.rfind(b"\n") + 1


_TAIL_BYTES = 2**21


class MetricsFollower:
    """Example: `for row in follower.read(): ...`, again and again; each whole row comes once.

    Nor do rows come that were there before: they were shown when they were new. The trainer of a run that goes on puts
    a shorter file in the place of the old one; a step that is taken again has another row, which comes. Whoever looks
    at a run from outside takes all of them: `from_the_start`.
    """

    def __init__(self, path: Path, *, from_the_start: bool = False) -> None:
        self._path = path
        before = path.read_bytes() if path.is_file() and not from_the_start else b""
        self._told = set(map(hash, before.split(b"\n")))
        self._file_number = 0
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The rows that were completed since the last call; from the start where another file is in its place."""
        try:
            with self._path.open("rb") as file:
                self._look_whether_it_is_another(file.fileno(), size=file.seek(0, os.SEEK_END))
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        lines = [line for line in data[:whole].split(b"\n") if hash(line) not in self._told]
        self._told.update(map(hash, lines))
        return parse_rows(lines)

    def _look_whether_it_is_another(self, descriptor: int, *, size: int) -> None:
        number = os.fstat(descriptor).st_ino
        if number != self._file_number or size < self._offset:
            self._file_number, self._offset = number, 0


class TraceFollower:
    """Example: `for event in follower.read(): ...`, again and again; each whole event comes once.

    A trace may be large, so the first look begins where its last `tail_bytes` do. Every later one costs what was
    written meanwhile.
    """

    def __init__(self, path: Path, *, tail_bytes: int = _TAIL_BYTES) -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        self._file_number = 0
        self._offset = 0

    def read(self) -> list[Event]:
        """The events that were completed since the last call; none where there is no file."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                number = os.fstat(file.fileno()).st_ino
                if number != self._file_number:
                    self._file_number, self._offset = number, max(0, size - self._tail_bytes)
                file.seek(min(self._offset, size))
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset = min(self._offset, size) + whole
        lines = data[:whole].decode(errors="replace").splitlines()
        return [event for line in lines if (event := parse_event(line)) is not None]
