"""metrics.jsonl: one JSON object a line, a line a step, readable while it grows.

Not here: what the numbers mean; the names are TRL's own, and ycore's under `ycore/`.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO


class MetricsWriter:
    """Appends rows; each is flushed, so that a reader or a crash finds all rows but at most the last one whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_to_append(path)
        if not _ends_a_line(path):
            self._file.write("\n")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row; NaN and infinity, which JSON has no word for, become null."""
        self._file.write(_line(row))
        self._file.flush()

    def forget_after(self, step: int) -> None:
        """Drop rows of later steps: a run that goes on from a checkpoint takes those steps again.

        The rows that stay are in another file before the old one goes: a kill in between loses none.
        """
        kept = [row for row in read_metrics(self._path) if row.get("step", 0) <= step]
        shorter = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with _open_to_append(shorter) as file:
            file.writelines(_line(row) for row in kept)
        os.replace(shorter, self._path)
        self._file.close()
        self._file = _open_to_append(self._path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole row; a last line that was cut off is left out, and a missing file has no rows."""
    if not path.is_file():
        return []
    return parse_rows(path.read_bytes().split(b"\n"))


def parse_rows(lines: list[bytes]) -> list[dict[str, Any]]:
    """The JSON objects among `lines`; what is not one (a line cut off by a kill) is skipped."""
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _open_to_append(path: Path) -> TextIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), allow_nan=False) + "\n"


def _ends_a_line(path: Path) -> bool:
    """Whether a new row can begin: a run that was killed may have left half a line."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
