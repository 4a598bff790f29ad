"""Every example of a run without rollouts: what is trained on, what is held out, what was left out and why.

Not here: what a trainer's columns are (`sft_rows`, `pairs`), and tokens.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ycore.config.schema import TuneConfig
from ycore.data.example_rows import LeftOut, Row, labelled_rows, pair_rows, sft_rows
from ycore.data.prompts import read_table
from ycore.data.table import Table
from ycore.errors import DataError, nearest

_HELD_OUT_SHARE, _MOST_HELD_OUT = 10, 256


@dataclass(frozen=True, slots=True)
class ExampleSet:
    """Rows as TRL takes them, shuffled; the held-out ones share no prompt with the others."""

    train: Sequence[Row]
    held_out: Sequence[Row]
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def is_chat(self) -> bool:
        return any(isinstance(value, list) for value in self.train[0].values())

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.train[0])

    @property
    def fingerprint(self) -> str:
        """Changes when any row, or the order, does."""
        digest = hashlib.sha256()
        for row in (*self.train, *self.held_out):
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()


def load_examples(config: TuneConfig, *, as_chat: bool) -> ExampleSet:
    """The rows of `config.dataset`, all of them checked; `as_chat` for a model with a chat template.

    They are shuffled by the seed here: kto's trainer reads its rows in order, and pairs that were split in two would
    come all good ones first.
    """
    left_out: LeftOut = LeftOut()
    rows = _rows(config, config.dataset, config.split, as_chat=as_chat, left_out=left_out)
    chance = random.Random(config.seed)
    if config.eval_dataset is not None or config.eval_split is not None:
        name, split = config.eval_dataset or config.dataset, config.eval_split or config.split
        apart = _rows(config, name, split, as_chat=as_chat, left_out=LeftOut())
        chance.shuffle(rows)
        return ExampleSet(rows, apart[: config.held_out], left_out)
    train, held_out = hold_out(rows, _num_held_out(config, len(rows)), chance)
    if not train:
        raise DataError(
            f"{config.held_out} held-out rows of {len(rows)} leave none to train on; lower --held-out"
            if config.held_out
            else f"the rows of {config.dataset} all have one prompt; say --held-out 0"
        )
    return ExampleSet(train, held_out, left_out)


def hold_out(rows: Sequence[Row], count: int, chance: random.Random) -> tuple[list[Row], list[Row]]:
    """Train and held-out rows, both shuffled; rows of one prompt stay together, so `count` may be passed a little."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row.get("prompt", row)), []).append(row)
    shuffled = list(groups.values())
    chance.shuffle(shuffled)
    apart: list[Row] = []
    while shuffled and len(apart) < count:
        apart += shuffled.pop()
    train = [row for group in shuffled for row in group]
    chance.shuffle(train)
    return train, apart


def _num_held_out(config: TuneConfig, num_rows: int) -> int:
    if config.held_out is not None:
        return config.held_out
    return min(num_rows // _HELD_OUT_SHARE, _MOST_HELD_OUT)


def _rows(config: TuneConfig, name: str, split: str, *, as_chat: bool, left_out: LeftOut) -> list[Row]:
    table = _renamed(read_table(name, split=split, seed=config.seed, limit=config.limit), config.columns)
    if not table.rows:
        raise DataError(f"the dataset {table.name} is empty; a run needs at least one row")
    if config.algorithm == "sft":
        whole = bool(config.trl.get("assistant_only_loss")) or config.trl.get("completion_only_loss") is False
        rows = sft_rows(table, as_chat=as_chat, whole=whole, left_out=left_out)
    elif config.algorithm == "kto":
        rows = labelled_rows(table, as_chat=as_chat, left_out=left_out)
    else:
        rows = pair_rows(table, as_chat=as_chat, left_out=left_out)
    if not rows:
        reasons = ", ".join(left_out)
        raise DataError(f"no row of {table.name} can be learned from ({reasons}); look at the file, or give another")
    _check_one_kind(table, rows)
    return rows


def _renamed(table: Table, columns: dict[str, str]) -> Table:
    """The table with the user's names of columns replaced by the trainer's."""
    for wanted, theirs in columns.items():
        if theirs not in table.columns:
            way_out = nearest(theirs, table.columns) or f"; it has {', '.join(table.columns) or 'none'}"
            raise DataError(f"{table.name} has no column {theirs!r} (columns.{wanted}){way_out}")
    if not columns:
        return table
    names = {theirs: wanted for wanted, theirs in columns.items()}
    hidden = set(columns) - set(names)  # a column that had the name before
    rows: list[dict[str, Any]] = [
        {names.get(name, name): value for name, value in row.items() if name not in hidden} for row in table.rows
    ]
    kept = tuple(names.get(name, name) for name in table.columns if name not in hidden)
    return replace(table, rows=rows, columns=kept)


def _check_one_kind(table: Table, rows: Sequence[Row]) -> None:
    """TRL decides by the first row whether all of them are chats."""
    kinds = {frozenset((name, type(value)) for name, value in row.items() if name != "margin") for row in rows}
    if len(kinds) > 1:
        raise DataError(f"{table.name} mixes text and chats; make every row the same kind")
