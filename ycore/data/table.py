"""Rows as a source gives them, before anything is asked of them.

Not here: what a prompt is (`columns`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Table:
    """`rows[i]` may lack a column that another row has. `lines[i]` is where it stands in its file, where it has one."""

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    lines: Sequence[int] | None = None

    def place(self, row: int) -> str:
        """Where row `row` is, in words."""
        where = "" if self.lines is None else f" (line {self.lines[row]})"
        return f"row {row}{where} of {self.name}"


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Every column that some row has, in order of first appearance."""
    return tuple(dict.fromkeys(name for row in rows for name in row))
