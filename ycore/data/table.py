"""Datasets of the hub, `name` or `name:config`, through the datasets library.

Rows as a source gives them, before anything is asked of them.

Not here: local files, which need neither that library nor a network.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ycore.errors import DataError
from ycore.models.hub import ask_hub


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


_WAY_OUT = "give a local file (.jsonl, .csv, .parquet), `task:addition` or another task, which need no hub"


def hub_table(text: str, *, split: str, limit: int | None) -> Table:
    """The rows of one split of a hub dataset; a hub that does not answer is asked for three seconds."""
    name, _, config = text.partition(":")
    answer = ask_hub(lambda api: api.dataset_info(name, timeout=3.0))
    if answer.state in ("absent", "refused"):
        raise DataError(f"no dataset file and no hub dataset {name!r} to be had: {answer.problem}; {_WAY_OUT}")
    if answer.state == "unreachable" and not _is_cached(name):
        raise DataError(
            f"no dataset file {name!r}, and the hub cannot be asked for a dataset of that name: "
            f"{answer.problem}; {_WAY_OUT}"
        )
    rows = _load(name, config or None, split, offline=answer.state == "unreachable")
    if limit is not None:
        rows = rows.select(range(min(limit, len(rows))))
    return Table(name=text, rows=rows.with_format(None), columns=tuple(rows.column_names))


def _is_cached(name: str) -> bool:
    """Whether the datasets library has built some configuration of this dataset before."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    owner, _, last = name.rpartition("/")
    folder = "___".join(part for part in (owner, camelcase_to_snakecase(last)) if part)
    cached = config.HF_DATASETS_CACHE / folder
    return os.path.isdir(cached) and any(cached.glob("*/*/*"))


def _load(name: str, config: str | None, split: str, *, offline: bool) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if offline:  # else the library asks a hub that did not answer again, and waits far longer
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        return datasets.load_dataset(name, config, split=split)
    except (DatasetsError, ValueError, RuntimeError, OSError) as problem:
        reason = " ".join(str(problem).split())[:300]
        raise DataError(f"the hub dataset {name}{f':{config}' if config else ''}, split {split}: {reason}") from None
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
