"""Following metrics.jsonl and trace.json while another process writes them.

Not here: reading a finished file (`metrics.read_metrics`, `trace.read_trace`).
"""

import os
from pathlib import Path
from typing import Any

from ycore.telemetry.metrics import parse_rows
from ycore.telemetry.trace import Event, parse_event

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
