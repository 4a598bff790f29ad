"""Write and read trace.json: requests, swaps and rounds of a run, for Perfetto and chrome://tracing.

A span is written when it is over; levels are written once a second. The file is a JSON array, an event a line. The
format lets the closing bracket be missing, so the file of a killed run opens too. Ranks append whole lines to it.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ycore.run.files import LineFollower

_OPENING = "[\n"
_CLOSING = "\n]\n"

SWAP = "swap"
ROUND = "round"
SYNC = "sync"
EVALUATION = "eval"
TRAIN = "train"
WAITING = "waiting"
IN_FLIGHT = "in flight"
FULL = "trace is full"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time: a role's turn on a slot, a SWAP or a ROUND. `began` is in seconds since the epoch."""

    name: str
    rank: int
    slot: int
    began: float
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Levels:
    """How many requests are WAITING (by role) or IN_FLIGHT (by role and slot, as `judge 3`), and the oldest's age."""

    name: str
    rank: int
    at: float
    values: Mapping[str, int]
    oldest_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mark:
    """A phase of the step, SYNC, ROUND, EVALUATION or TRAIN, begins on a rank."""

    name: str
    rank: int
    at: float


Event = Span | Levels | Mark


class TraceWriter:
    """Appends events, which reach the disk with `flush`, or some hundred at a time; no `path` keeps no trace.

    A file of `max_bytes` takes no more events; its last one says so.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = 256 * 2**20) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._lines: list[str] = []

    def add(self, event: Event) -> None:
        if self.path is None:
            return
        self._lines.append(json.dumps(_to_json(event)))
        if len(self._lines) >= 200:
            self.flush()

    def flush(self) -> None:
        if self.path is None or not self._lines:
            return
        lines = self._lines
        self._lines = []
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks write to one file
            size = _end_of_events(file)
            if size >= self._max_bytes:
                return
            if size + sum(map(len, lines)) >= self._max_bytes:
                full = json.dumps(
                    {"name": FULL, "ph": "i", "ts": 0, "pid": 0, "tid": 0, "s": "g"}
                )
                lines = [full.ljust(max(0, self._max_bytes - size))]
            file.seek(size)
            file.truncate()
            file.write(
                (("" if size else _OPENING) + "".join(line + ",\n" for line in lines)).encode()
            )


def finish_trace(path: Path) -> None:
    """Close the array, so that strict readers of JSON take it too; a later run of the folder opens it again."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = _end_of_events(file)
        if size > len(_OPENING):
            file.seek(size - len(",\n"))
            file.truncate()
            file.write(_CLOSING.encode())


def read_trace(path: Path) -> list[Span]:
    """Return every whole span of a trace, also of one that was cut off; none where there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    events = map(parse_event, text.split("\n"))
    return [event for event in events if isinstance(event, Span)]


class TraceFollower:
    """Reads a trace while ranks write it; each whole event comes once. A large one is read from its end only."""

    def __init__(self, path: Path, *, tail_bytes: int = 2**21) -> None:
        self._lines = LineFollower(path, tail_bytes=tail_bytes)

    def read(self) -> list[Event]:
        """Return the events that were completed since the last call."""
        events = (parse_event(line.decode(errors="replace")) for line in self._lines.read())
        return [event for event in events if event is not None]


def busy_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return (began, seconds) of the intervals in which at least one of the spans lasts."""
    return merge_intervals((span.began, span.seconds) for span in spans)


def merge_intervals(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (began, seconds) in order; intervals that touch or overlap become one."""
    merged: list[tuple[float, float]] = []
    for began, seconds in sorted(intervals):
        if merged and began <= merged[-1][0] + merged[-1][1]:
            first, length = merged[-1]
            merged[-1] = (first, max(length, began + seconds - first))
        else:
            merged.append((began, seconds))
    return merged


def parse_event(line: str) -> Event | None:
    """Return the event on one line; None where there is none of ycore's."""
    try:
        event = json.loads(line.rstrip().rstrip(","))
        name = str(event["name"])
        rank = int(event["pid"])
        at = _seconds(event["ts"] / 1e6)
        match event["ph"]:
            case "X":
                slot = int(event["tid"])
                return Span(
                    name, rank, slot, at, _seconds(event["dur"] / 1e6), {**event["args"]}
                )
            case "C":
                counts = {key: int(count) for key, count in event["args"].items()}
                ages = {key: _seconds(age) for key, age in event["oldest_s"].items()}
                return Levels(name, rank, at, counts, ages)
            case "i":
                return Mark(name, rank, at)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        pass
    return None


def _seconds(value: float) -> float:
    """Check that a value of a file, which may be damaged, can be seconds; else ValueError."""
    if not abs(value) < 1e12:
        raise ValueError(value)
    return value


def _to_json(event: Event) -> dict[str, Any]:
    at = event.began if isinstance(event, Span) else event.at
    common = {"name": event.name, "ts": round(at * 1e6), "pid": event.rank}
    match event:
        case Span():
            duration = round(event.seconds * 1e6)
            return {
                **common,
                "ph": "X",
                "dur": duration,
                "tid": event.slot,
                "args": dict(event.details),
            }
        case Levels():  # viewers ignore a key that they do not know, as `oldest_s`
            return {
                **common,
                "ph": "C",
                "args": dict(event.values),
                "oldest_s": dict(event.oldest_s),
            }
        case Mark():
            return {**common, "ph": "i", "tid": -1, "s": "t"}


def _end_of_events(file: Any) -> int:
    """Return where the next event goes: behind the last whole line, before a closing bracket; 0 in an empty file."""
    size: int = file.seek(0, os.SEEK_END)
    tail_size = min(size, 1 << 16)
    file.seek(size - tail_size)
    tail: bytes = file.read()
    if tail.endswith(_CLOSING.encode()):
        file.seek(size - len(_CLOSING))
        file.write(b",\n")
        file.truncate()
        return size - len(_CLOSING) + len(",\n")
    return size - tail_size + tail.rfind(b"\n") + 1
