"""Comparing what a completion gives with the right answer: numbers as numbers, everything else as text.

The text of a completion, and the part of it that is the answer.

Not here: formulas (the `math` reward asks math-verify), and finding the answer in a completion (`text`).
"""

import re
from decimal import Decimal
from typing import Any

from ycore.types import Content


def text_of(completion: Content) -> str:
    """What was written: a plain completion itself, or the content of a chat completion's last message."""
    if isinstance(completion, str):
        return completion
    return _content_text(completion[-1].get("content")) if completion else ""


def answer_text(completion: Content) -> str:
    """What was given as the answer: after the thinking, and inside the last `<answer>` where there is one.

    A `<think>` that never ends gives no answer: an empty text.
    """
    after = _after_thinking(text_of(completion))
    # Searched from the end, not by a regular expression: ten thousand unclosed tags must not cost a deadline.
    tagged, closing, _ = after.rpartition("</answer>")
    return (tagged.rpartition("<answer>")[2] if closing else after).strip()


def without_thinking(completion: Content) -> Content:
    """The completion as it reads after its thinking, in the shape it had; empty where the thinking never ends."""
    if not isinstance(completion, str):
        said = dict(completion[-1]) if completion else {}
        return [*completion[:-1], {**said, "content": _after_thinking(text_of(completion))}] if completion else []
    return _after_thinking(completion)


def words_of(completion: Content) -> list[str]:
    """The words of a completion: what stands between white space."""
    return text_of(completion).split()


def _after_thinking(text: str) -> str:
    _before, end, after = text.rpartition("</think>")
    return "" if not end and "<think>" in after else after.lstrip() if end else after


def _content_text(content: Any) -> str:
    # Chat templates allow a list of typed parts, and None where a message only calls a tool.
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content if isinstance(content, str) else ""


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A sign belongs to its number only where nothing stands before it that could be subtracted from: `10-7` holds 10 and 7.
_NUMBER = re.compile(
    rf"(?:(?<![\w.)])[-+]\$?)?(?<![A-Za-z_])(?<!\d)(?:{_DIGITS}(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d{{1,3}})?"
)
_PLAIN_NUMBER = re.compile(rf"[-+]?\s?\$?(?:{_DIGITS}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,3}})?\s?%?")
_CLOSING = " \t\r\n.,;:!?*_`'\")]}$"


def gold_of(answer: Any) -> str:
    """The right answer as text: after the last `####` where it is a worked solution that ends so, as GSM8K's are."""
    if answer is None:
        return ""
    return str(answer).rpartition("####")[2].strip()


def number_of(text: str) -> Decimal | None:
    """The number that the whole text is (`-4`, `1,234`, `$5`, `20%`, `7.`), or None."""
    text = _plain_minus(text.strip())
    return _decimal(text) if _PLAIN_NUMBER.fullmatch(text) else None


def numbers_in(text: str) -> list[Decimal]:
    """Every number in a text, in its order."""
    return [_decimal(match) for match in _NUMBER.findall(_plain_minus(text))]


def gives(text: str, gold: str) -> bool:
    """Whether the last thing given is the right answer.

    A number: the last number of the text equals it (`7` is `7.0`, `1,234` is `1234`). Anything else: the last line
    that is not empty ends with it, as whole words, without regard to case and closing punctuation.
    """
    right = number_of(gold)
    if right is not None:
        return numbers_in(text)[-1:] == [right]
    if not _folded(gold):  # the answer is punctuation
        return text.strip().endswith(gold)
    lines = text.rstrip(_CLOSING).splitlines()
    return bool(lines) and re.search(rf"{_words(gold)}$", _folded(lines[-1])) is not None


def holds(text: str, gold: str) -> bool:
    """Whether the right answer stands anywhere in the text: as a number among its numbers, or as whole words."""
    right = number_of(gold)
    if right is not None:
        return right in numbers_in(text)
    if not _folded(gold):
        return gold in text
    return re.search(rf"{_words(gold)}(?!\w)", _folded(text)) is not None


def _words(gold: str) -> str:
    return rf"(?<!\w){re.escape(_folded(gold))}"


def _folded(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(_CLOSING)


def _plain_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")


def _decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[,$%\s]", "", number))
