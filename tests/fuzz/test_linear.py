"""Whatever a model writes is read in time linear in its length: at twice the length, about twice the time.

Processor time is compared, the least of several runs, so that a busy machine decides nothing.
"""

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from ycore.config.schema import RewardConfig
from ycore.judge.declaration import judge_of
from ycore.judge.question import Questioner, fold_lookalikes
from ycore.judge.verdict import Reply, Unreadable, read_ranking, read_value
from ycore.rewards import answers, builtin
from ycore.run.text import printable
from ycore.types import Prompt

LENGTH = 5_000
HOSTILE = [
    *(
        " ",
        "\n",
        "\t ",
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "\\boxed{",
        "{",
        "}",
        "[",
        "(",
        "<",
        ">",
        "< ",
    ),
    *(
        "1",
        "1,111",
        ",",
        ".",
        ".1",
        "1e",
        "b) ",
        "or ",
        "a\n",
        "-",
        "$",
        "-$",
        "1-",
        "a",
        "ab ",
        "_",
        "'",
        '"',
        '{"',
        '\\"',
        "\\",
        "```\n",
    ),
    *(
        "```json\n",
        "<|",
        "|>",
        "<score>",
        "</score",
        "score",
        "\u0315\u0300",
        "\u0f73",
        "\ufdfa",
        "\uff1c",
        "\x1b[",
        "\u202e",
    ),
]
SHAPES = [
    lambda text: text,
    lambda text: f"x{text}x",
    lambda text: f"<think>{text}",
    lambda text: f"```{text}```",
]


def read(**declared: object) -> Callable[[str], object]:
    judge = judge_of(RewardConfig(reward="judge:t", args=declared))
    if judge.mode == "groupwise":
        return lambda text: read_ranking(judge, Reply(text), code="c0de", count=2)
    return lambda text: read_value(judge, Reply(text), code="c0de")


QUESTIONER = Questioner(
    judge_of(RewardConfig(reward="judge:t", args={"verdict": {"kind": "score"}})),
    ("<|im_end|>",),
)
READERS: dict[str, Callable[[str], object]] = {
    "answer_text": answers.answer_text,
    "numbers_in": answers.numbers_in,
    "number_of": answers.number_of,
    "gives a number": lambda text: answers.gives(text, "7"),
    "gives a letter": lambda text: answers.gives(text, "B"),
    "gives a letter behind an option": lambda text: answers.gives(f"b) {text}", "B"),
    "gives words": lambda text: answers.gives(text, "aaaa"),
    "holds": lambda text: answers.holds(text, "aa"),
    "without_thinking": answers.without_thinking,
    "format": lambda text: builtin.format([], [text]),
    "repetition": lambda text: builtin.repetition([], [text]),
    "similarity": lambda text: builtin.similarity([], [text, text]),
    "before_the_answer": lambda text: builtin.before_the_answer(text, bridge=""),
    "printable": printable,
    "fold_lookalikes": fold_lookalikes,
    "the question": lambda text: QUESTIONER.question(Prompt(0, "x"), text, key="k"),
    "a score": read(verdict={"kind": "score"}),
    "a JSON verdict": read(verdict={"kind": "json"}),
    "a ranking": read(mode="groupwise", verdict={"kind": "ranking"}),
}


SLOW = {"gives a number", "numbers_in", "number_of"}
"""Readers of many numbers, which take most of the seconds."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.verify] if name in SLOW else [])
        for name in READERS
    ],
)
def test_reading_is_linear(name: str) -> None:
    slow = [
        (part, taken)
        for part in HOSTILE
        for shape in SHAPES
        if (taken := growth(READERS[name], part, shape))
    ]
    assert slow == []


def test_a_square_is_found() -> None:
    """By one look of several: where other work slows the shorter text down, a look sees less growth than there is."""
    assert any(growth(square, "a", SHAPES[0]) for _ in range(10))


def square(text: str) -> list[str]:
    return [text[:place].title() for place in range(0, len(text), 20)]


def growth(
    reader: Callable[[str], object], part: str, shape: Callable[[str], str]
) -> tuple[float, float] | None:
    """The seconds at the length and at twice it, where they grow by more than three; measured up to four times."""
    short, long = (shape((part * length)[:length]) for length in (LENGTH, 2 * LENGTH))
    if seconds(reader, long) < 0.008:
        return None
    for _ in range(4):
        short_s, long_s = (
            min(seconds(reader, text) for _ in range(3)) for text in (short, long)
        )
        if long_s < 3 * short_s:
            return None
    return short_s, long_s


def seconds(reader: Callable[[str], object], text: str) -> float:
    began = time.process_time()
    with suppress(Unreadable):
        reader(text)
    return time.process_time() - began
