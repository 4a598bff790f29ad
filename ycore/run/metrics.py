"""metrics.jsonl: one JSON object a line, a line a step, readable while it grows.

summary.json: how a run ended and what it reached, from its metrics.

How sure a share of right answers is: Wilson's interval.

pass@k: the chance that at least one of k completions is right, estimated without bias from n of them.

Not here: what the numbers mean; the names are TRL's own, and ycore's under `ycore/`.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TextIO, TypeGuard


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


Status = Literal["finished", "interrupted", "failed"]

_WINDOW = 5  # steps at either end; one step's reward says little


def summarise(
    metrics: Sequence[Mapping[str, Any]], status: Status, wall_s: float, *, error: str | None = None
) -> dict[str, Any]:
    """The summary of a run; rewards are means over the first and the last five steps.

    They are of every completion that was drawn, where a run tells that: dynamic sampling trains on some of them, and
    those, neither all right nor all wrong, tell less and less of how good the policy has become.
    """
    told = [row.get("ycore/reward", row.get("reward")) for row in metrics]
    rewards = [float(reward) for reward in told if _is_finite(reward)]
    summary: dict[str, Any] = {
        "status": status,
        "steps": num_steps(metrics),
        "wall_s": round(wall_s, 1),
        "reward_first": _mean(rewards[:_WINDOW]),
        "reward_last": _mean(rewards[-_WINDOW:]),
    }
    return summary if error is None else {**summary, "error": error}


def summarise_losses(
    metrics: Sequence[Mapping[str, Any]], status: Status, wall_s: float, *, error: str | None = None
) -> dict[str, Any]:
    """The summary of a run without rollouts: its loss in place of its reward; short runs have shorter ends."""
    losses = [float(row["loss"]) for row in metrics if _is_finite(row.get("loss"))]
    window = min(_WINDOW, max(1, len(losses) // 2))
    summary: dict[str, Any] = {
        "status": status,
        "steps": num_steps(metrics),
        "wall_s": round(wall_s, 1),
        "loss_first": _mean(losses[:window]),
        "loss_last": _mean(losses[-window:]),
    }
    return summary if error is None else {**summary, "error": error}


def num_steps(metrics: Sequence[Mapping[str, Any]]) -> int:
    """The last step that the metrics tell of."""
    return max((int(row["step"]) for row in metrics if _is_finite(row.get("step"))), default=0)


def _mean(values: Sequence[float]) -> float | None:
    return round(math.fsum(values) / len(values), 6) if values else None


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


_Z_95 = 1.959964


def wilson_95(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share of `right` in `total`.

    Example: `wilson_95(8, 10)` is about `(0.490, 0.943)`.
    """
    if not 0 <= right <= total or total < 1:
        raise ValueError(f"a share needs 0 <= right <= total and 1 <= total; they are {right} and {total}")
    share, square = right / total, _Z_95**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _Z_95 / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)` for n completions of which c are right.

    Example: `pass_at_k(4, 1, 2)` is 0.5: of the six pairs out of four, three hold the right one.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n; n is {n}, c is {c}, k is {k}")
    return 1.0 - comb(n - c, k) / comb(n, k)
