"""The conditions of a flow model: the rows of a dataset, each with a class, as the prompts of a run."""

import hashlib
import json
from typing import Any

from ycore.data.prompts import RESERVED_COLUMNS, PromptSet
from ycore.data.source import read_table
from ycore.data.table import Table, TableRow
from ycore.errors import DataError, nearest
from ycore.flow.flow_settings import IMAGES, FlowConfig
from ycore.types import Prompt

CLASSES = "classes"
"""The dataset of every class of the model, once."""


def load_conditions(config: FlowConfig, *, num_classes: int) -> PromptSet:
    """The prompts of `config.dataset`, or each class once; DataError with the first row that lacks the condition.

    A prompt's content is the row's text in `prompt`, where it has one, and its class else.
    """
    column = config.condition_column
    if config.dataset == CLASSES:
        table = Table(CLASSES, [{column: label} for label in range(num_classes)], (column,))
    else:
        table = read_table(
            config.dataset, split=config.split, seed=config.seed, limit=config.limit
        )
    if column not in table.columns:
        near = (
            nearest(column, table.columns)
            or "; name the one with the class by --set condition_column=NAME"
        )
        raise DataError(
            f"{table.name} has no column {column!r}, the class to draw; it has {table.listed_columns}{near}"
        )
    passed = [name for name in table.columns if name not in {*RESERVED_COLUMNS, IMAGES}]
    prompts = list[Prompt]()
    digest = hashlib.sha256()
    for number in range(len(table.rows)):
        row = table.row(number)
        label = class_of(row, column, num_classes)
        values = {name: row.values.get(name) for name in passed} | {column: label}
        prompt = Prompt(
            row=number, content=str(row.values.get("prompt", label)), columns=values
        )
        digest.update(json.dumps([prompt.content, values], default=str).encode())
        prompts.append(prompt)
    return PromptSet(prompts, tuple(passed), digest.hexdigest(), is_chat=False)


def class_of(row: TableRow, column: str, num_classes: int) -> int:
    """The class of a row; DataError where it is none that the model knows."""
    value: Any = row.values.get(column)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_classes:
        problem = "missing" if value is None else f"{value!r:.80}"
        raise DataError(
            f"the condition {column!r} is {problem} in {row.place}; it is a class of the model, a whole number from 0 to "
            f"{num_classes - 1}: correct or remove the row"
        )
    return value
