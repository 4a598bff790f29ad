"""Count what becomes metrics; write, read and follow metrics.jsonl; summarise a run; Wilson's interval and pass@k.

The names of the numbers are TRL's own, and ycore's begin with `ycore/`.
"""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Literal, Protocol

from ycore.errors import RunFolderError
from ycore.run.files import (
    LineFollower,
    json_safe,
    open_private,
    read_regular,
    sync,
    write_bytes_atomic,
)
from ycore.run.text import Say
from ycore.types import JsonObject, Record

Row = Record

# What a step may call the same number: the first that it has counts. Dynamic sampling trains on some completions only,
# neither all right nor all wrong: `reward` is theirs, and `ycore/reward` that of every completion that was drawn.
REWARD = ("ycore/reward", "reward")
STEP_SECONDS = ("ycore/time/step", "step_time")

EVALUATION = "ycore/eval/"
"""Before the figures of an evaluation on held-out rows; `/low` and `/high` after a figure are its interval."""

_MAX_BYTES = 2**30
"""Metrics of half a million steps have no more."""
_HUGE = 2**1000
"""An integer of a damaged row may be too large for a float."""


def number(row: Row, *names: str) -> float | None:
    """Return the first of `names` that is a finite number in this row; None where none is."""
    for value in map(row.get, names):
        if isinstance(value, int | float) and -_HUGE < value < _HUGE:
            return float(value)
    return None


def is_evaluation(row: Row) -> bool:
    """Whether the row has what an evaluation measured."""
    return any(name.startswith(EVALUATION) for name in row)


class MetricsWriter:
    """Appends rows to a file, each flushed: a reader, or a crash, finds all rows whole but at most the last one.

    A run that goes on calls `forget_after` first, which also drops a last row that a kill cut off. What is on the disk
    is settled by `sync` of the file: before a checkpoint gets its name, and at the end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_private(path)
        sync(path.parent)

    def write(self, row: Row) -> None:
        """Append one row; NaN and infinity, which JSON cannot express, become null."""
        self._file.write(_line(row))
        self._file.flush()

    def forget_after(self, step: int) -> None:
        """Drop rows of later steps, which a resumed run takes again; neither a kill nor a power cut loses others."""
        kept = [row for row in read_metrics(self._path) if row.get("step", 0) <= step]
        write_bytes_atomic(self._path, "".join(map(_line, kept)).encode())
        self._file.close()
        self._file = open_private(self._path)

    def close(self) -> None:
        self._file.close()


def warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def read_metrics(path: Path, *, say: Say = warn) -> list[JsonObject]:
    """Return every whole row, none where the file is missing; `say` takes a sentence for every damaged line.

    A last line that is not whole is normal: the file is growing, or its writer was killed.
    """
    if not path.is_file():
        return []
    try:
        data = read_regular(path, max_bytes=_MAX_BYTES)
    except ValueError as problem:
        raise RunFolderError(
            f"{path} cannot be read ({problem}); it was not written by ycore"
        ) from None
    *lines, last_line = data.split(b"\n")
    rows = _rows(enumerate(lines, 1), path, say)
    last = _row(last_line)
    return rows if last is None else [*rows, last]


class MetricsFollower:
    """Reads metrics.jsonl while the trainer writes it, by default only what comes after the rows that are there.

    Each whole row comes once, also where the trainer of a resumed run puts a shorter file in place of the old one.
    """

    def __init__(self, path: Path, *, from_the_start: bool = False, say: Say = warn) -> None:
        self._path = path
        self._say = say
        self._lines = LineFollower(path)
        before = path.read_bytes() if path.is_file() and not from_the_start else b""
        self._seen = set(map(hash, before.split(b"\n")))

    def read(self) -> list[JsonObject]:
        """Return the rows that were completed since the last call."""
        lines = self._lines.read()
        first = self._lines.num_lines - len(lines) + 1
        new = [
            (place, line)
            for place, line in enumerate(lines, first)
            if hash(line) not in self._seen
        ]
        self._seen.update(hash(line) for _, line in new)
        return _rows(new, self._path, self._say)


def _rows(lines: Iterable[tuple[int, bytes]], path: Path, say: Say) -> list[JsonObject]:
    rows = []
    for place, line in lines:
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            say(
                f"line {place} of {path} is damaged (it is not a JSON object with a step); its step is left out"
            )
    return rows


def _row(line: bytes) -> JsonObject | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not isinstance(step := row.get("step", 0), int | float):
        return None
    return row if 0 <= step < 2**53 and step == int(step) else None


def _line(row: Row) -> str:
    return json.dumps(json_safe(row), allow_nan=False) + "\n"


_WINDOW_STEPS = 5  # one step's reward says little


def summarise(
    metrics: Sequence[Row], *, measure: Literal["reward", "loss"] = "reward"
) -> JsonObject:
    """Return what summary.json says of the steps: their number, and `measure` at either end.

    Each mean is of five steps, or of half of the steps where there are fewer than ten. `measure` is `loss` for a run
    without rollouts.
    """
    names = REWARD if measure == "reward" else ("loss",)
    values = [value for row in metrics if (value := number(row, *names)) is not None]
    window = min(_WINDOW_STEPS, max(1, len(values) // 2))
    steps = [step for row in metrics if (step := number(row, "step")) is not None]
    summary: JsonObject = {"steps": int(max(steps, default=0))}
    for end, window_values in (("first", values[:window]), ("last", values[-window:])):
        mean = round(statistics.fmean(window_values), 6) if window_values else None
        summary[f"{measure}_{end}"] = mean
    return summary


_Z_95 = 1.959964


def wilson_95(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `right` in `total` (Wilson 1927).

    Example: `wilson_95(8, 10)` is about `(0.490, 0.943)`.
    """
    if not 0 <= right <= total or total < 1:
        raise ValueError(
            f"a share needs 0 <= right <= total and 1 <= total; they are {right} and {total}"
        )
    share = right / total
    square = _Z_95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    deviation = math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    half = _Z_95 / (1 + square / total) * deviation
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that one of k completions is right, without bias: `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021).

    Of the n completions that were sampled, c are right. Example: `pass_at_k(4, 1, 2)` is 0.5.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass@k needs 0 <= c <= n and 1 <= k <= n; n is {n}, c is {c}, k is {k}"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


# -- counts of a rank --------------------------------------------------------------------------------------------------


class Meter(Protocol):
    """Counts of one rank that can be added to those of other ranks."""

    def take(self) -> Sequence[float]:
        """Return the counts since the last call; as many numbers on every rank."""

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return the step's metrics from each count's sum over all ranks."""


@dataclass
class CountMeter:
    """A meter whose fields are its counts."""

    def take(self) -> Sequence[float]:
        counts: tuple[float, ...] = astuple(self)
        for field in fields(self):
            setattr(self, field.name, 0)
        return counts

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return type(self)(*sums).summary()

    def summary(self) -> Mapping[str, float]:
        """Return the metrics of these counts."""
        raise NotImplementedError
