"""A dataset's rows as its source gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import DataError, nearest


@dataclass(frozen=True, slots=True)
class Table:
    """Rows by column name; a row may lack a column that another has.

    Attributes:
        lines: The line of each row in its file.
        folder: Where relative paths of pictures begin; None where a row may name no file (a dataset of the hub).
    """

    name: str
    rows: Sequence[Mapping[str, Any]]
    columns: tuple[str, ...]
    lines: Sequence[int] | None = None
    folder: Path | None = None

    def row(self, number: int) -> "TableRow":
        return TableRow(self.rows[number], self, number)

    @property
    def listed_columns(self) -> str:
        return ", ".join(self.columns) or "none"

    def has(self, name: str) -> bool:
        """Tell whether the table has a column; `reward_model.ground_truth` is a key of the objects in `reward_model`."""
        return name in self.columns or name.partition(".")[0] in self.columns

    def require_column(self, name: str, option: str) -> None:
        """DataError where the table lacks a column that the user named by `option`."""
        if not self.has(name):
            way_out = nearest(name, self.columns) or "; take one of them"
            raise DataError(
                f"{self.name} has no column {name!r} ({option}); it has {self.listed_columns}{way_out}"
            )


@dataclass(slots=True)
class TableRow:
    """One row, and its place as error messages name it."""

    values: Mapping[str, Any]
    table: Table
    number: int

    @property
    def place(self) -> str:
        lines = self.table.lines
        line = "" if lines is None else f" (line {lines[self.number]})"
        return f"row {self.number}{line} of {self.table.name}"

    def cell(self, column: str) -> Any:
        """Return the cell of a column, whose name may have dots; None where the row lacks it."""
        if column in self.values or "." not in column:
            return self.values.get(column)
        value: Any = self.values
        for key in column.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value
