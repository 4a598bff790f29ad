"""Every prompt of a run, from whatever `dataset` names.

The order in which a run sees its prompts: a pure function of seed, number of rows and position.

Not here: the order in which they are drawn (`order`).
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ycore.config.schema import RunConfig
from ycore.data.columns import to_prompts
from ycore.data.generated import TASKS, gym_table, task_table
from ycore.data.local_files import file_suffix, file_table
from ycore.data.table import Table, hub_table
from ycore.errors import DataError, nearest
from ycore.types import Prompt

_SCHEMES = ("task", "gym")


@dataclass(frozen=True, slots=True)
class PromptSet:
    """`columns` are what each prompt's row gives to rewards; `fingerprint` changes when any of it changes.

    A prompt of a JSONL, Parquet or hub dataset is read when it is asked for, so that a rank holds only what it draws.
    """

    prompts: Sequence[Prompt]
    columns: tuple[str, ...]
    fingerprint: str
    is_chat: bool


def load_prompts(config: RunConfig, *, as_chat: bool = False) -> PromptSet:
    """The prompts of `config.dataset`, every one looked at once.

    With `as_chat`, for a model with a chat template, a text is a user's turn.
    Local files have no splits: `config.split` chooses among those of hub and generated datasets.
    """
    table = read_table(config.dataset, split=config.split, seed=config.seed, limit=config.limit)
    prompts, columns = to_prompts(
        table,
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        system_prompt=config.system_prompt,
        as_chat=as_chat,
    )
    return PromptSet(prompts, columns, fingerprint=_fingerprint(prompts), is_chat=prompts[0].is_chat)


def check_dataset(config: RunConfig, *, as_chat: bool = False) -> PromptSet:
    """What a dry run does with the dataset: the same as a run, since only that says that it will work."""
    return load_prompts(config, as_chat=as_chat)


def read_table(name: str, *, split: str, seed: int, limit: int | None) -> Table:
    """The first `limit` rows of a file, a generated task or a hub dataset."""
    return _first_rows(_table(name, split=split, seed=seed, limit=limit), limit)


def _table(name: str, *, split: str, seed: int, limit: int | None) -> Table:
    path = Path(os.path.expanduser(name))
    if not name.strip():
        raise DataError("--dataset is empty; give a file, a hub id or a task such as task:addition")
    if name.startswith("task:"):
        return task_table(name, split=split, seed=seed)
    if name.startswith("gym:"):
        return gym_table(name, split=split, seed=seed)
    if _means_a_file(name, path):
        return file_table(path)
    _refuse_near_misses(name)
    return hub_table(name, split=split, limit=limit)


def _means_a_file(name: str, path: Path) -> bool:
    return (
        os.path.exists(path) or file_suffix(path) is not None or name.startswith((".", "~", "/")) or name.count("/") > 1
    )


def _refuse_near_misses(name: str) -> None:
    """Names that are a slip of the pen rather than a hub dataset."""
    scheme, colon, rest = name.partition(":")
    if colon and "/" not in scheme and nearest(scheme, _SCHEMES):
        near = nearest(scheme, _SCHEMES, limit=1).split("'")[1]
        raise DataError(f"no dataset {name!r}; did you mean {f'{near}:{rest}'!r}?")
    if name.partition("?")[0] in TASKS:
        raise DataError(f"no dataset {name!r}; did you mean {f'task:{name}'!r}?")


def _first_rows(table: Table, limit: int | None) -> Table:
    if limit is None or limit >= len(table.rows):
        return table
    lines = None if table.lines is None else table.lines[:limit]
    return Table(name=table.name, rows=[table.rows[row] for row in range(limit)], columns=table.columns, lines=lines)


def _fingerprint(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.content, prompt.columns], default=_as_text).encode())
    return digest.hexdigest()


def _as_text(value: Any) -> str:
    """A stable text for what JSON cannot hold; for other objects only their kind is stable."""
    if isinstance(value, bytes | date | time | timedelta | Decimal):
        return repr(value)
    return type(value).__qualname__


_NUM_CACHED = 2  # a round that crosses the edge of an epoch looks at both


class PromptOrder:
    """Every row once an epoch, in a fresh order each epoch.

    Example: `PromptOrder(seed=0, num_rows=3)` gives `row_at(0..2)` some order of 0, 1, 2 and `row_at(3..5)` another.
    """

    def __init__(self, *, seed: int, num_rows: int) -> None:
        if num_rows < 1 or seed < 0:
            raise ValueError(f"an order needs a row and a seed from 0, not num_rows={num_rows}, seed={seed}")
        self.seed = seed
        self.num_rows = num_rows
        self._epochs: dict[int, npt.NDArray[np.int64]] = {}

    def row_at(self, position: int) -> int:
        """The row that position `position` of the run draws; positions count from 0 over all epochs."""
        if position < 0:
            raise ValueError(f"a position counts from 0, not {position}")
        epoch, place = divmod(position, self.num_rows)
        return int(self._permutation(epoch)[place])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._epochs:
            while len(self._epochs) >= _NUM_CACHED:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return self._epochs[epoch]
