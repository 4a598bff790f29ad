"""Write and follow trace.json: requests, swaps and rounds of a run, for Perfetto and chrome://tracing.

A span is written when it is over; levels are written once a second. The file is a JSON array, an event a line, whose
closing bracket the format lets be missing. Ranks append whole lines to it. The newest steps are kept.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ycore.run.files import LineFollower

_OPENING = "[\n"
_MAX_BYTES = 32 * 2**20

SWAP = "swap"
ROUND = "round"
SYNC = "sync"
EVALUATION = "eval"
TRAIN = "train"
WAITING = "waiting"
IN_FLIGHT = "in flight"


@dataclass(frozen=True)
class Span:
    """Something that took time: a role's turn on a slot, a SWAP or a ROUND. `began` is in seconds since the epoch."""

    name: str
    rank: int
    slot: int
    began: float
    seconds: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Levels:
    """How many requests are WAITING (by role) or IN_FLIGHT (by role and slot, as `judge 3`), and the oldest's age."""

    name: str
    rank: int
    at: float
    values: Mapping[str, int]
    oldest_s: Mapping[str, float] = field(default_factory=dict)


class Mark(NamedTuple):
    """A phase of the step, SYNC, ROUND, EVALUATION or TRAIN, begins on a rank."""

    name: str
    rank: int
    at: float


Event = Span | Levels | Mark


class TraceWriter:
    """Appends events, which reach the disk with `flush`, or some hundred at a time; no `path` keeps no trace.

    A file that has come to `_MAX_BYTES` takes the place of the one before it (`earlier_part`), and a new one begins.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
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
        lines, self._lines = self._lines, []  # another thread may add meanwhile
        text = "".join(line + ",\n" for line in lines)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks write to one file
            size = file.seek(_end_of_last_line(file))
            file.truncate()
            file.write(((_OPENING if size == 0 else "") + text).encode())
            if size < _MAX_BYTES <= file.tell():  # true of one rank's lines only
                self.path.replace(earlier_part(self.path))


def earlier_part(path: Path) -> Path:
    """Return the file of the events before those in the trace `path`."""
    return path.with_name("trace-earlier.json")


def new_events(trace: LineFollower) -> list[Event]:
    """Return the whole events that ranks have written since the last call."""
    events = (parse_event(line.decode(errors="replace")) for line in trace.read())
    return [event for event in events if event is not None]


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
            return {
                **common,
                "ph": "X",
                "dur": round(event.seconds * 1e6),
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


def _end_of_last_line(file: BinaryIO) -> int:
    """Return where the next event goes: a kill may have left half a line."""
    size = file.seek(0, os.SEEK_END)
    tail_size = min(size, 1 << 16)
    file.seek(size - tail_size)
    return size - tail_size + file.read().rfind(b"\n") + 1
