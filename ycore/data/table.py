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


class ArrowRows(Sequence[Mapping[str, Any]]):
    """The rows of an Arrow table, made into Python values one at a time."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        (row,) = self._table.slice(index % len(self), 1).to_pylist()
        return row
