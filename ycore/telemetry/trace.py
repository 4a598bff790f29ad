"""trace.json: every turn, swap and round of a run, in the format that Perfetto and chrome://tracing open.

It is JSON's array form, an event a line. The format lets the closing bracket be missing, so a run that is killed leaves
a file that opens all the same. Ranks append to one file, whole lines at a time.

Not here: what a turn is (`controller.dispatch`), and the picture (`timeline`).
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 2**20
"""A trace that has grown to this takes no more events; its last one says so."""

_FLUSH_EVERY = 200
_OPENING, _CLOSING = "[\n", "\n]\n"

SWAP, ROUND = "swap", "round"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. `rank` and `slot` are its lane; seconds are since the epoch."""

    name: str
    rank: int
    slot: int
    began: float
    seconds: float
    told: Mapping[str, Any] = field(default_factory=dict)


class NullTrace:
    """For runs and tests that keep none."""

    def add(self, span: Span) -> None:
        """Forget it."""

    def flush(self) -> None:
        """Nothing to bring to disk."""


class TraceWriter(NullTrace):
    """Appends spans; those of a round reach the disk with `flush`, or some hundred at a time."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: list[str] = []

    def add(self, span: Span) -> None:
        self._lines.append(json.dumps(_event(span)))
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
                lines = [json.dumps({"name": "trace is full", "ph": "i", "ts": 0, "pid": 0, "tid": 0, "s": "g"})]
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
    return [span for line in path.read_text(encoding="utf-8").splitlines() if (span := _span(line)) is not None]


def busy_stretches(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """(began, seconds) of the stretches in which at least one of the spans lasts."""
    stretches: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.began):
        end = span.began + span.seconds
        if stretches and span.began <= stretches[-1][0] + stretches[-1][1]:
            began, seconds = stretches[-1]
            stretches[-1] = (began, max(seconds, end - began))
        else:
            stretches.append((span.began, span.seconds))
    return stretches


def _event(span: Span) -> dict[str, Any]:
    return {
        "name": span.name,
        "ph": "X",
        "ts": round(span.began * 1e6),
        "dur": round(span.seconds * 1e6),
        "pid": span.rank,
        "tid": span.slot,
        "args": dict(span.told),
    }


def _span(line: str) -> Span | None:
    try:
        event = json.loads(line.rstrip().rstrip(","))
        if event["ph"] != "X":
            return None
        return Span(event["name"], event["pid"], event["tid"], event["ts"] / 1e6, event["dur"] / 1e6, event["args"])
    except (ValueError, TypeError, KeyError):
        return None


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
