"""Generated datasets: ycore's own questions (`task:NAME?args`) and those of reasoning-gym (`gym:NAME?args`).

A generated dataset is a pure function of its arguments, its split and the seed. `size` is the number of rows wanted:
a task with fewer distinct questions gives fewer.
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

from ycore.data.cells import Table
from ycore.errors import DataError, nearest

_SPLITS = ("train", "test")
_TEST_SHARE = 5  # about every fifth question is held out
_SALT = "2 "
"""Chosen so that the smallest tasks hold out a fifth too: 20 of the 100 sums of two digits."""

_MAX_SIZE = 1_000_000
_MAX_SHUFFLED = 1 << 18  # a task with more questions draws them in place of shuffling all
_TAKE_ONE = "; take one of them"
# A test question is one of five: draws enough to find as many as wanted.
_GYM_DRAWS_PER_ROW = 12


def task_table(text: str, *, split: str, seed: int) -> Table:
    name, texts = _parse(text, split)
    if name not in TASKS:
        raise DataError(
            f"no task {name!r}; there are {', '.join(TASKS)}{nearest(name, TASKS) or _TAKE_ONE}"
        )
    limits = {"digits": ("1", 9), "size": ("1000", _MAX_SIZE)}
    for key in texts:
        if key not in limits:
            raise DataError(
                f"the task {name!r} has no argument {key!r}; it has {', '.join(limits)}{nearest(key, limits) or _TAKE_ONE}"
            )
    arguments = {
        key: _positive_number(text, key, texts.get(key, default), most=most)
        for key, (default, most) in limits.items()
    }
    chance = random.Random(f"{name} {split} {seed}")
    rows = _rows(name, arguments["digits"], split, chance)
    return Table(text, list(islice(rows, arguments["size"])), ("prompt", "answer"))


def gym_table(text: str, *, split: str, seed: int) -> Table:
    """Return the rows of `gym:NAME?args`; `gym_entry` is the entry as JSON, for reasoning-gym's own scorer."""
    name, texts = _parse(text, split)
    size = _positive_number(text, "size", texts.pop("size", "500"), most=_MAX_SIZE)
    entries = _gym_dataset(text, name, texts, size=size * _GYM_DRAWS_PER_ROW, seed=seed)
    rows: dict[str, dict[str, Any]] = {}
    for number in range(size * _GYM_DRAWS_PER_ROW):
        if len(rows) == size:
            break
        try:
            entry = entries[number]
        except (ValueError, TypeError, IndexError, KeyError) as problem:
            raise DataError(
                f"{text}: reasoning-gym could not make entry {number}: {problem}; change its arguments"
            ) from None
        question = entry["question"]
        if question not in rows and _is_in_split(f"{name} {question}", split):
            rows[question] = {
                "prompt": question,
                "answer": entry["answer"],
                "gym_task": name,
                "gym_entry": json.dumps(entry, default=str, skipkeys=True),
            }
    return Table(text, list(rows.values()), ("prompt", "answer", "gym_task", "gym_entry"))


def _parse(text: str, split: str) -> tuple[str, dict[str, str]]:
    """Return name and arguments; DataError for a split that does not exist."""
    if split not in _SPLITS:
        raise DataError(
            f"{text} has the splits {' and '.join(_SPLITS)}, not {split!r}{nearest(split, _SPLITS) or _TAKE_ONE}"
        )
    return parse_name(text)


def parse_name(text: str) -> tuple[str, dict[str, str]]:
    """Return name and arguments of `scheme:name?key=value&...`; DataError where it is written in another way."""
    name, _, query = text.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(
            f"{text}: arguments are written `?name=value&name=value`, not `?{query}`"
        ) from None
    if len(dict(pairs)) != len(pairs):
        raise DataError(f"{text}: an argument is given twice; give each one once")
    return name, dict(pairs)


def typed_arguments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Read numbers, true and false, and lists as JSON writes them; anything else is text."""
    arguments = dict(texts)
    for key, value in texts.items():
        with suppress(ValueError, RecursionError):
            arguments[key] = json.loads(value)
    return arguments


def _positive_number(text: str, key: str, value: str, *, most: int) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:12]) <= most:
        raise DataError(f"{text}: {key} is a whole number from 1 to {most}, not {value!r}")
    return int(value)


def _is_in_split(key: str, split: str) -> bool:
    number = int.from_bytes(hashlib.sha256((_SALT + key).encode()).digest()[:8], "big")
    return (number % _TEST_SHARE == 0) == (split == "test")


def _rows(
    name: str, digits: int, split: str, chance: random.Random
) -> Iterator[dict[str, str]]:
    """Yield the distinct questions of a split, in random order; 3 + 4 and 4 + 3 are in the same split."""
    low, span = (0, 10) if digits == 1 else (10 ** (digits - 1), 9 * 10 ** (digits - 1))
    seen = set()
    for number in _shuffled_numbers(span**2, chance):
        left, right = (low + place for place in divmod(number, span))
        prompt, answer = TASKS[name](left, right)
        key = f"{name} {min(left, right)} {max(left, right)}"
        if prompt not in seen and _is_in_split(key, split):
            seen.add(prompt)
            yield {"prompt": prompt, "answer": answer}


def _shuffled_numbers(count: int, chance: random.Random) -> Iterator[int]:
    """Yield the numbers below `count` in random order, each once."""
    if count <= _MAX_SHUFFLED:
        yield from chance.sample(range(count), count)
        return
    seen: set[int] = set()
    while len(seen) < count:
        number = chance.randrange(count)
        if number not in seen:
            seen.add(number)
            yield number


def _asked(left: int, sign: str, right: int, answer: int) -> tuple[str, str]:
    return f"What is {left} {sign} {right}? Answer with just the number.", str(answer)


def _subtraction(left: int, right: int) -> tuple[str, str]:
    """No answer is negative: the minus sign would be another token."""
    right, left = sorted((left, right))
    return _asked(left, "-", right, left - right)


def _larger(left: int, right: int) -> tuple[str, str]:
    prompt = f"Is {left} larger than {right}? Begin with yes or no, and then explain at length how you know."
    return prompt, "yes" if left > right else "no"


TASKS: Mapping[str, Callable[[int, int], tuple[str, str]]] = {
    "addition": lambda left, right: _asked(left, "+", right, left + right),
    "subtraction": _subtraction,
    "multiplication": lambda left, right: _asked(left, "*", right, left * right),
    "larger": _larger,
}
"""The question and its answer about two numbers, by the task's name."""


def _gym_dataset(
    text: str, name: str, texts: Mapping[str, str], *, size: int, seed: int
) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise DataError(
            f"{text} needs the package reasoning-gym: pip install 'ycore[gym]'"
        ) from None
    if name not in DATASETS:
        way_out = (
            nearest(name, DATASETS)
            or f"; there are {len(DATASETS)}, such as chain_sum and countdown"
        )
        raise DataError(f"reasoning-gym has no task {name!r}{way_out}")
    known = [
        field.name for field in fields(DATASETS[name][1]) if field.name not in ("size", "seed")
    ]
    for key in texts:
        if key not in known:
            raise DataError(
                f"{text}: no argument {key!r}; there are size, {', '.join(known)}{nearest(key, known) or _TAKE_ONE}"
            )
    try:
        return create_dataset(name, size=size, seed=seed, **typed_arguments(texts))
    except (ValueError, TypeError, AssertionError) as problem:
        raise DataError(f"{text}: {problem}; change that argument") from None
