"""`task:NAME?args`: questions with one right answer, made on the spot; no file and no hub.

A dataset is a pure function of its arguments, split and seed. `size` is the most rows to make: where a task has
fewer distinct questions, it gives those.

The names of generated datasets, `task:addition?digits=1&size=2000` and `gym:chain_sum?size=500`, taken apart.

`gym:NAME?args`: the generated tasks of reasoning-gym, an optional package.

Not here: judging an answer (the rewards do).
"""

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any
from urllib.parse import parse_qsl

from ycore.data.table import Table
from ycore.errors import DataError, nearest

SPLITS = ("train", "test")
_TEST_SHARE = 5  # about every fifth question is held out
_SALT = "2 "  # chosen so that the smallest tasks hold out a fifth too: 20 of the 100 sums of two digits


@dataclass(frozen=True, slots=True)
class GeneratorName:
    """Example: `task:addition?digits=1` is scheme `task`, generator `addition`, arguments `{"digits": "1"}`."""

    text: str
    generator: str
    arguments: dict[str, str]


def parse(text: str) -> GeneratorName:
    """Take a `scheme:name?key=value&...` apart."""
    generator, _, query = text.partition(":")[2].partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise DataError(f"{text}: arguments are written `?name=value&name=value`, not `?{query}`") from None
    arguments = dict(pairs)
    if len(arguments) != len(pairs):
        raise DataError(f"{text}: an argument is given twice; give each one once")
    return GeneratorName(text=text, generator=generator, arguments=arguments)


def check_split(text: str, split: str) -> None:
    """Generated datasets have two splits."""
    if split not in SPLITS:
        way_out = nearest(split, SPLITS) or "; take one of them"
        raise DataError(f"{text} has the splits {' and '.join(SPLITS)}, not {split!r}{way_out}")


def whole_number(name: GeneratorName, key: str, value: str, *, low: int, high: int) -> int:
    """An argument that must be a whole number from `low` to `high`."""
    if not value.isascii() or not value.isdigit() or not low <= int(value[:12]) <= high:
        raise DataError(f"{name.text}: {key} is a whole number from {low} to {high}, not {value!r}")
    return int(value)


def in_split(key: str, split: str) -> bool:
    """Whether the question known by `key` belongs to `split`."""
    number = int.from_bytes(hashlib.sha256((_SALT + key).encode()).digest()[:8], "big")
    return (number % _TEST_SHARE == 0) == (split == "test")


_SIZE_LIMITS = (1, 1_000_000)
_DEFAULT_SIZE = 1000
_ENUMERATED = 1 << 18
"""Up to this many questions a task is listed and shuffled; beyond it, questions are drawn until there are enough."""


@dataclass(frozen=True, slots=True)
class Question:
    """`key` is the same for questions that give each other away, as 3 + 4 and 4 + 3: they share a split."""

    prompt: str
    answer: str
    key: str


@dataclass(frozen=True, slots=True)
class Task:
    """A numbered set of questions: `question(arguments, i)` for every i below `count(arguments)`.

    `limits` gives each argument's lowest, default and highest value.
    """

    limits: Mapping[str, tuple[int, int, int]]
    count: Callable[[Mapping[str, int]], int]
    question: Callable[[Mapping[str, int], int], Question]


def task_table(text: str, *, split: str, seed: int) -> Table:
    """The rows of `task:NAME?args`."""
    name = parse(text)
    if name.generator not in TASKS:
        way_out = nearest(name.generator, TASKS) or "; take one of them"
        raise DataError(f"no task {name.generator!r}; there are {', '.join(TASKS)}{way_out}")
    check_split(text, split)
    task = TASKS[name.generator]
    arguments, size = _arguments(name, task)
    questions = _questions(name.generator, task, arguments, split, random.Random(f"{name.generator} {split} {seed}"))
    rows = [{"prompt": question.prompt, "answer": question.answer} for question in islice(questions, size)]
    return Table(name=text, rows=rows, columns=("prompt", "answer"))


def _arguments(name: GeneratorName, task: Task) -> tuple[dict[str, int], int]:
    limits = {**task.limits, "size": (_SIZE_LIMITS[0], _DEFAULT_SIZE, _SIZE_LIMITS[1])}
    for key in name.arguments:
        if key not in limits:
            way_out = nearest(key, limits) or "; take one of them"
            raise DataError(f"the task {name.generator!r} has no argument {key!r}; it has {', '.join(limits)}{way_out}")
    values = {
        key: whole_number(name, key, name.arguments[key], low=low, high=high) if key in name.arguments else default
        for key, (low, default, high) in limits.items()
    }
    return values, values.pop("size")


def _questions(
    generator: str, task: Task, arguments: Mapping[str, int], split: str, chance: random.Random
) -> Iterator[Question]:
    asked: set[str] = set()
    for number in _numbers(task.count(arguments), chance):
        question = task.question(arguments, number)
        if question.prompt not in asked and in_split(f"{generator} {question.key}", split):
            asked.add(question.prompt)
            yield question


def _numbers(count: int, chance: random.Random) -> Iterator[int]:
    """The numbers below `count`, each once, shuffled."""
    if count <= _ENUMERATED:
        yield from chance.sample(range(count), count)
        return
    seen: set[int] = set()
    while len(seen) < count:
        number = chance.randrange(count)
        if number not in seen:
            seen.add(number)
            yield number


def _operands(arguments: Mapping[str, int], number: int) -> tuple[int, int]:
    low, span = _range(arguments["digits"])
    return low + number // span, low + number % span


def _range(digits: int) -> tuple[int, int]:
    """The first number of so many digits, and how many there are; one digit begins at 0."""
    return (0, 10) if digits == 1 else (10 ** (digits - 1), 9 * 10 ** (digits - 1))


def _arithmetic(sign: str, compute: Callable[[int, int], int]) -> Task:
    def question(arguments: Mapping[str, int], number: int) -> Question:
        a, b = _operands(arguments, number)
        if sign == "-" and a < b:
            a, b = b, a  # no negative answers: the minus sign is another lesson
        prompt = f"What is {a} {sign} {b}? Answer with just the number."
        return Question(prompt, str(compute(a, b)), key=f"{min(a, b)} {max(a, b)}")

    return Task({"digits": (1, 1, 9)}, lambda arguments: _range(arguments["digits"])[1] ** 2, question)


def _sort(arguments: Mapping[str, int], number: int) -> Question:
    low, span = _range(arguments["digits"])
    values = [low + number // span**place % span for place in range(arguments["count"])]
    shown, ordered = (", ".join(map(str, numbers)) for numbers in (values, sorted(values)))
    prompt = f"Sort these numbers from smallest to largest: {shown}. Answer with just the numbers."
    return Question(prompt, ordered, key=ordered)


def _reverse(arguments: Mapping[str, int], number: int) -> Question:
    letters = "".join(chr(ord("a") + number // 26**place % 26) for place in range(arguments["length"]))
    prompt = f"Write the letters of '{letters}' in reverse order. Answer with just the letters."
    return Question(prompt, letters[::-1], key=min(letters, letters[::-1]))


TASKS: dict[str, Task] = {
    "addition": _arithmetic("+", lambda a, b: a + b),
    "subtraction": _arithmetic("-", lambda a, b: a - b),
    "multiplication": _arithmetic("*", lambda a, b: a * b),
    "sort": Task(
        {"count": (2, 4, 20), "digits": (1, 1, 9)},
        lambda arguments: int(_range(arguments["digits"])[1] ** arguments["count"]),
        _sort,
    ),
    "reverse": Task({"length": (2, 4, 20)}, lambda arguments: int(26 ** arguments["length"]), _reverse),
}


COLUMNS = ("prompt", "answer", "gym_task", "gym_entry")
_GYM_DEFAULT_SIZE = 500
_DRAWN_PER_ROW = 12  # a test question is one of five: enough draws to find as many as were asked for


def gym_table(text: str, *, split: str, seed: int) -> Table:
    """The rows of `gym:NAME?args`; `size` is the most of them, fewer where the task repeats itself."""
    name = parse(text)
    check_split(text, split)
    size = whole_number(name, "size", name.arguments.get("size", str(_GYM_DEFAULT_SIZE)), low=1, high=1_000_000)
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
