"""`gym:NAME?args`: the generated tasks of reasoning-gym, an optional package.

Not here: its scorers; a reward reads `gym_task` and `gym_entry` and calls them.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ycore.data.generator_name import GeneratorName, check_split, in_split, parse, whole_number
from ycore.data.table import Table
from ycore.errors import DataError, nearest

COLUMNS = ("prompt", "answer", "gym_task", "gym_entry")
_DEFAULT_SIZE = 500
_DRAWN_PER_ROW = 12  # a test question is one of five: enough draws to find as many as were asked for


def gym_table(text: str, *, split: str, seed: int) -> Table:
    """The rows of `gym:NAME?args`; `size` is the most of them, fewer where the task repeats itself."""
    name = parse(text)
    check_split(text, split)
    size = whole_number(name, "size", name.arguments.get("size", str(_DEFAULT_SIZE)), low=1, high=1_000_000)
    entries = _generator(name, size=size, seed=seed)
    rows: dict[str, dict[str, Any]] = {}
    for number in range(size * _DRAWN_PER_ROW):
        if len(rows) == size:
            break
        entry = _entry(name, entries, number)
        question = entry["question"]
        if in_split(f"{name.generator} {question}", split):
            rows.setdefault(question, _row(name.generator, entry))
    return Table(name=text, rows=list(rows.values()), columns=COLUMNS)


def _generator(name: GeneratorName, *, size: int, seed: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise DataError(f"{name.text} needs the package reasoning-gym: pip install 'ycore[gym]'") from None
    if name.generator not in DATASETS:
        way_out = nearest(name.generator, DATASETS) or f"; there are {len(DATASETS)}, such as chain_sum and countdown"
        raise DataError(f"reasoning-gym has no task {name.generator!r}{way_out}")
    known = [field.name for field in fields(DATASETS[name.generator][1]) if field.name not in ("size", "seed")]
    arguments = {key: _value(value) for key, value in name.arguments.items() if key != "size"}
    for key in arguments:
        if key not in known:
            way_out = nearest(key, known) or "; take one of them"
            raise DataError(f"{name.text}: no argument {key!r}; there are size, {', '.join(known)}{way_out}")
    try:
        return create_dataset(name.generator, size=size * _DRAWN_PER_ROW, seed=seed, **arguments)
    except (ValueError, TypeError, AssertionError) as problem:
        raise DataError(f"{name.text}: {problem}; change that argument") from None


def _entry(name: GeneratorName, entries: Any, number: int) -> Mapping[str, Any]:
    try:
        entry: Mapping[str, Any] = entries[number]
    except (ValueError, TypeError, IndexError, KeyError) as problem:
        raise DataError(
            f"{name.text}: reasoning-gym could not make entry {number}: {problem}; change its arguments"
        ) from None
    return entry


def _row(task: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "gym_task": task,
        "gym_entry": json.dumps(_plain(entry)),
    }


def _plain(value: Any) -> Any:
    """`value` without what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if _is_plain(item)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value if _is_plain(item)]
    return value


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | Mapping | list | tuple)


def _value(text: str) -> Any:
    """Numbers, true/false and lists as JSON writes them; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
