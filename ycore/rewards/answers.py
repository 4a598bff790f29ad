"""The answer that a completion gives, and its comparison with the right one: numbers as numbers, all else as text."""

import re
from decimal import Decimal
from typing import Any

from ycore.types import Content

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A sign belongs to its number only where nothing precedes it that could be subtracted from: `10-7` holds 10 and 7.
_NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-+]\$?)?(?<![A-Za-z_])(?<!\d)(?:{_DIGITS}(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d{{1,3}})?"
)
_PLAIN_NUMBER = re.compile(
    rf"[-+]?\s?\$?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?\s?%?"
)
_CLOSING = " \t\r\n.,;:!?*_`'\")]}$"


def completion_text(completion: Content) -> str:
    """Return a plain completion itself, or the text of a chat completion's last message."""
    if isinstance(completion, str):
        return completion
    # Chat templates allow typed parts, and None where a message only calls a tool.
    content: Any = completion[-1].get("content") if completion else ""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


def answer_text(completion: Content) -> str:
    """Return a completion's answer: the text after the thinking, or the last `<answer>` in it.

    A `<think>` that never ends gives no answer: an empty text.
    """
    after = _after_thinking(completion_text(completion))
    # Searched from the end, not by a regular expression: ten thousand unclosed tags must not cost a deadline.
    tagged, closing, _ = after.rpartition("</answer>")
    return (tagged.rpartition("<answer>")[2] if closing else after).strip()


def without_thinking(completion: Content) -> Content:
    """The completion without what precedes `</think>`, still as text or chat; empty where the thinking never ends."""
    if isinstance(completion, str):
        return _after_thinking(completion)
    if not completion:
        return []
    return [
        *completion[:-1],
        {**completion[-1], "content": _after_thinking(completion_text(completion))},
    ]


def final_answer(text: str) -> str:
    """Return a completion's answer in a form that is equal for equal answers.

    It is a formula in a box, the last number, or the last line without regard to case and closing punctuation.
    """
    answer = answer_text(text)
    boxed = answer.rpartition("\\boxed{")[2]
    if boxed != answer:
        depth = 1
        end = 0
        while end < len(boxed) and depth:
            depth += {"{": 1, "}": -1}.get(boxed[end], 0)
            end += 1
        answer = boxed[: end - 1] if not depth else boxed
        if number_of(answer) is None:
            return " ".join(answer.casefold().split())
    numbers = numbers_in(answer)
    lines = answer.rstrip(_CLOSING).splitlines()
    if numbers:
        return str(numbers[-1].normalize())
    return _folded(lines[-1]) if lines else ""


def gold_of(answer: Any) -> str:
    """Return a row's right answer as text: what follows the last `####`, with which GSM8K's worked solutions end."""
    return "" if answer is None else str(answer).rpartition("####")[2].strip()


def number_of(text: str) -> Decimal | None:
    """Return the number that the whole text is (`-4`, `1,234`, `$5`, `20%`, `7.`), or None."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    return _to_decimal(text) if _PLAIN_NUMBER.fullmatch(text) else None


def numbers_in(text: str) -> list[Decimal]:
    """Return every number of a text, in order."""
    return [
        _to_decimal(match) for match in _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    ]


def gives(text: str, gold: str) -> bool:
    """Whether a text ends with the right answer.

    A number: the last number of the text equals it (`7` is `7.0`, `1,234` is `1234`). Anything else: the last line
    that is not empty ends with it, as whole words, without regard to case and closing punctuation.
    """
    right = number_of(gold)
    if right is not None:
        return numbers_in(text)[-1:] == [right]
    folded = _folded(gold)
    if not folded:  # the answer is punctuation
        return text.strip().endswith(gold)
    lines = text.rstrip(_CLOSING).splitlines()
    return (
        bool(lines)
        and re.search(rf"(?<!\w){re.escape(folded)}$", _folded(lines[-1])) is not None
    )


def holds(text: str, gold: str) -> bool:
    """Whether the right answer occurs anywhere in a text: as one of its numbers, or as whole words."""
    right = number_of(gold)
    if right is not None:
        return right in numbers_in(text)
    folded = _folded(gold)
    if not folded:
        return gold in text
    return re.search(rf"(?<!\w){re.escape(folded)}(?!\w)", _folded(text)) is not None


def _after_thinking(text: str) -> str:
    _before, end, after = text.rpartition("</think>")
    if end:
        return after.lstrip()
    return "" if "<think>" in text else text


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(_CLOSING)


def _to_decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$%\s]", "", number))
