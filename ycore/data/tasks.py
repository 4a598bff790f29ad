"""`task:NAME?args`: questions with one right answer, made on the spot; no file and no hub.

A dataset is a pure function of its arguments, split and seed. `size` is the most rows to make: where a task has
fewer distinct questions, it gives those.

Not here: judging an answer (the rewards do).
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ycore.data.generator_name import GeneratorName, check_split, in_split, parse, whole_number
from ycore.data.table import Table
from ycore.errors import DataError, nearest

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
