"""The answer that a completion gives, and its comparison with the right one: numbers as numbers, all else as text.

Texts are compared in Unicode's NFC, and words end where UAX 29 says. In scripts that put no space between words a word
may end behind every letter, and in Korean particles may follow one.
"""

import unicodedata
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import regex

from ycore.data.cells import last_boxed
from ycore.types import THINKING, Content, after_thinking

_UNSPACED = r"\p{Han}\p{Hiragana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}"
_NOT = r"(?<![\u4e0d\u6ca1\u975e\u672a\u65e0\u7121])"  # before what is denied
_NOT_IN_LETTER = r"(?!\p{M}|[\u0e33\u0eb3])"  # not before the marks and vowel signs of a letter
_WORD_START = (
    rf"(?:\b|(?<=[{_UNSPACED}])|(?=[{_UNSPACED}])|(?<=\p{{Hangul}})(?!\p{{Hangul}})"
    rf"|(?<=\p{{L}}{{2}}[.:])){_NOT}{_NOT_IN_LETTER}"
)
_WORD_END = rf"(?:\b|(?<=[{_UNSPACED}])|(?=[{_UNSPACED}\p{{Hangul}}])|(?=[.:]\p{{L}}{{2}})){_NOT_IN_LETTER}"
_LONG_MARKS = regex.compile(r"(\p{M}{30})\p{M}+")
_WORDS = regex.compile(
    rf"(?=[{_UNSPACED}])\X|[[\p{{L}}\p{{M}}\p{{N}}_]--[{_UNSPACED}]]+", regex.V1
)
_HAS_UNSPACED = regex.compile(rf"[{_UNSPACED}]")
_CLOSING = (
    " \t\r\n.,;:!?*_`'\")]}$"
    + "\u3002\uff0c\u3001\uff01\uff1f\uff1b\uff1a\u300d\u300f\uff09\u3011\u300b\u201d\u2019\u00bb\u2026\u17d4\u0964\u061f"
)

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | {
        "\uff0b": "+",
        "\uff0e": ".",
        "\uff05": "%",
        "\uff04": "$",
        "\uff0f": "/",
        "\u2044": "/",
        "\u066b": ".",
        "\u066a": "%",
        "\u2019": "'",
    }
    | dict.fromkeys("\u200b\u200e\u200f\ufeff", "")  # no width
    # the letters and brackets of full width
    | {chr(code + 0xFEE0): chr(code) for code in (40, 41, *range(65, 91), *range(97, 123))}
)
_SYMBOLS = str.maketrans({"\u03c0": r"\pi ", "\u221e": r"\infty ", "\u221a": r"\sqrt "})
_SUPERSCRIPTS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_GROUP = "\u2009"  # stands for every separator of thousands but comma and dot
_SEPARATOR = r"(?:\\[,;: ]|\{\\[,;:]\}|\\thinspace\s?|[~'_\u2019\u02bc\u066c\u00a0\u2000-\u200a\u202f\u205f])"
_ARGUMENT = r"\s?(?|\{\s*([^{}]{1,60}?)\s*\}|(\d))"
_VULGAR_FRACTION = r"[\u00bc-\u00be\u2150-\u215e]"
_REWRITES: list[tuple[Any, str | Callable[[Any], str]]] = [
    (regex.compile(r"\\[()\[\]]"), " "),
    (regex.compile(r"\\(?:text|mathrm|mbox)\s?\{,\}"), ","),
    (regex.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s?\{\s*([^{}]*)\}"), r" \1"),
    (
        regex.compile(
            r"\{([-,])\}|\\([%$])|\\!|\\(?:left|right|displaystyle|approx|quad)(?![A-Za-z])"
        ),
        r"\1\2",
    ),
    (regex.compile(r"(?<![\p{L}\d])_+|_+(?![\p{L}\d])"), " "),
    (regex.compile(r"\^\s?(?:\\circ|\{\s?\\circ\s?\})"), "\u00b0"),
    (regex.compile(r"(?<=\d)\uff0c(?=\d)"), ","),
    (regex.compile(rf"(?<=\d)(?:{_SEPARATOR}|\s(?=000(?!\d)))(?=\d)"), _GROUP),
    (
        regex.compile(rf"(\d?)\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}"),
        lambda found: _fraction_text(*found.groups()),
    ),
    (
        regex.compile(rf"(\d?)({_VULGAR_FRACTION})"),
        lambda found: _fraction_text(found[1], *_parts(found[2])),
    ),
    (
        regex.compile("(?<=[0-9])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+"),
        lambda found: "^" + found[0].translate(_SUPERSCRIPTS),
    ),
    (regex.compile(r"\\[,;: ]|~"), " "),
    (regex.compile(r"(?<=\d)\s*degrees?\b"), "\u00b0"),
    (
        regex.compile(r"(?<=\s\p{L}{1,4})\^\{?([23])\}?(?!\d)"),
        lambda found: chr(0xB0 + int(found[1])),
    ),
]
_IN_PARTS = regex.compile(
    rf"(?<=\d)(?:{_SEPARATOR}|\{{,\}})(?=(?:\d\d\d?(?:{_SEPARATOR}|\{{,\}})){{0,12}}\d{{3}}(?!\d))"
)

_INTEGER = (
    rf"(?:\d{{1,3}}(?:[,{_GROUP}]\d{{3}})+|\d{{1,2}}(?:[,{_GROUP}]\d{{2}}){{1,12}}[,{_GROUP}]\d{{3}}"
    r"|[1-9]\d{0,2}(?:\.\d{3}){2,}|[1-9]\d{0,2}(?:\.\d{3})+(?=,\d{1,2}(?![\d,]))|\d++)(?!\d)"
)
_DECIMAL = rf"{_INTEGER}(?:(?<=[{_GROUP}.]\d{{3}}),\d++(?!,\d)|\.\d++)?+"
_EXPONENT = r"\^\{?+(?P<power>[-+]?\d{1,3})\}?+(?!\d)"
_SPACELESS = rf"{_UNSPACED}\p{{Hangul}}"
# A sign belongs to its number only where nothing precedes it that could be subtracted from: `10-7` holds 10 and 7.
_SIGN = rf"(?:(?<![[\w.)\]}}%\u00b0]--[{_SPACELESS}]])(?<!\d\$)(?P<sign>[-+])(?=\p{{Sc}}?\s?[\d.]))?+"
# Digits are no number of their own behind a letter or `±`, in an exponent, an index, a root or a denominator.
_START = rf"(?<![[\p{{L}}\d_^/\u221a\u00b1\u2213]--[{_SPACELESS}]])(?<!\d\.)(?<!\^[-+{{])(?<!\\sqrt\s?\{{?)"
_NUMBER = regex.compile(
    rf"{_SIGN}(?:\p{{Sc}}\s?(?P<sign>[-+])?+)?+(?:"
    rf"(?P<chain>{_START}(?![1-9]\d{{0,2}}(?:\.\d{{3}}){{2,}}(?![.\d]))\d++(?:(?:[.]\d++){{2,}}+|(?:/\d++){{2,}}+|(?:-\d++){{2,}}+|(?::\d++)++))"
    rf"|(?:{_START}(?P<whole>\d{{1,9}})\s(?=\d{{1,9}}/\d))?+"
    rf"(?P<top>{_START}{_DECIMAL}|(?<!\w)\.\d++)(?:/(?P<bottom>{_DECIMAL}))?+"
    rf"(?:[eE](?P<power_of_ten>[-+]?\d{{1,3}})(?!\d))?+"
    rf"(?:{_EXPONENT}|(?P<times>\s?(?:\\times|\\cdot|[\u00d7\u00b7*x])\s?10){_EXPONENT})?+"
    r"(?!\^|\s?(?:\\sqrt|\\?pi\b|[\u03c0\u221a]))(?P<percent>\s?(?:%|per\s?cent\b))?+)",
    regex.V1,
)
_UNIT = regex.compile(r"\s{0,2}((?:[\p{L}\u00b0\u00b5][^\s\d]*\s?){1,3})", regex.V1)
_FORMULA = regex.compile(r"[\\^_<>+*/|!\[\]-]|\p{Sm}")
_VARIABLE = regex.compile(r"\s?[abciknxyz](?![\p{L}.])")
_SCALES = (
    dict.fromkeys("\u4e07\u842c\ub9cc", 10**4)
    | dict.fromkeys("\u4ebf\u5104\uc5b5", 10**8)
    | {"thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9}
)
_SCALE = regex.compile(rf"\s*({'|'.join(_SCALES)})(?![a-z])", regex.I)


class Number(NamedTuple):
    """A number in a text. `20%` has the value 20 and is a share; `unit` are the words behind it in its line."""

    value: Fraction
    text: str
    is_share: bool = False
    unit: str = ""

    @property
    def scale(self) -> int:
        """How many of its units the first word behind the number stands for: a million is 1,000,000."""
        found = _SCALE.match(self.unit)
        return _SCALES[found[1].casefold()] if found else 1

    @property
    def digits(self) -> str:
        return str(regex.sub(rf"[,\s\p{{Sc}}{_GROUP}]", "", self.text))

    def equals(self, right: "Number", tolerance: float = 0.0) -> bool:
        """Whether both are one number, but for `tolerance`: a share of the right one, or a distance where that is below 1.

        20% is 20 and 0.2; 2 million is 2 and 2,000,000, but only the latter as the right one.
        """
        expected = right.value * right.scale
        values = [self.value, self.value * self.scale]
        if self.is_share != right.is_share:
            values.append(self.value / 100 if self.is_share else self.value * 100)
        allowed = Fraction(tolerance) * max(Fraction(1), abs(expected))
        return any(abs(value - expected) <= allowed for value in values)


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
    after = after_thinking(completion_text(completion))
    # Searched from the end, not by a regular expression: ten thousand unclosed tags must not cost a deadline.
    tagged, closing, _ = after.rpartition("</answer>")
    return (tagged.rpartition("<answer>")[2] if closing else after).strip()


def without_thinking(completion: Content) -> Content:
    """The completion without what precedes `</think>`, still as text or chat; empty where the thinking never ends."""
    if isinstance(completion, str):
        return after_thinking(completion).lstrip()
    return _with_text(completion, after_thinking(completion_text(completion)).lstrip())


def with_thinking_opened(completion: Content) -> Content:
    """The completion behind the `<think>` that its prompt ends with."""
    if isinstance(completion, str):
        return THINKING + completion
    return _with_text(completion, THINKING + completion_text(completion))


def _with_text(completion: list[Any], text: str) -> Content:
    return [*completion[:-1], {**completion[-1], "content": text}] if completion else []


def final_answer(text: str) -> str:
    """Return a completion's answer in a form that is equal for equal answers.

    It is the number that it ends with, a formula in a box, or the last line without regard to case and closing punctuation.
    """
    answer = answer_text(text)
    if numbers := last_number(answer):
        return str(numbers[0].value)
    if (box := last_boxed(answer)) is None:
        return _last_line(answer.rpartition(r"\boxed{")[2])
    return " ".join(_plain(box).casefold().split())


def number_of(text: str) -> Number | None:
    """Return the number that the whole text is (`-4`, `1,234`, `$5`, `20%`, `7.`, `\\frac{1}{2}`, `5 km`), or None."""
    text = _plain(text).strip().strip("$").strip().removesuffix(".")
    text = regex.sub(r"^([-+])\s|\s?(/)\s?", r"\1\2", text)
    numbers = list(_read_numbers(text))
    is_whole = len(numbers) == 1 and numbers[0].text + numbers[0].unit == text.strip()
    return numbers[0] if is_whole else None


def numbers_in(text: str) -> list[Number]:
    """Return every number of a text, in order, each whole: no part of a number is one."""
    return list(_read_numbers(_plain(text)))


def last_number(text: str) -> list[Number]:
    """Return the number that a text is or ends with; none where it ends a range or difference (`10-15`).

    None also where it is one of several, or of a formula, in a box.
    """
    if (whole := number_of(text)) is not None:
        return [whole]
    box = last_boxed(text)
    if box is None or numbers_in(text[text.rfind(box) + len(box) :]):
        return [] if regex.search(r"\d-[\d.,]+\D*\Z", _plain(text)) else numbers_in(text)[-1:]
    if (whole := number_of(box.rpartition("=")[2])) is not None:
        return [] if _VARIABLE.match(whole.unit) else [whole]
    numbers = numbers_in(box)
    is_alone = len(numbers) == 1 and not _FORMULA.search(
        _plain(box).replace(numbers[0].text, "")
    )
    return numbers if is_alone else []


def gives(text: str, gold: str) -> bool:
    """Whether a text ends with the right answer.

    A number: the last of the text (`last_number`) equals it (`7` is `7.0`, `1,234` is `1234`), and has its unit or none
    where it has one. Anything else: the last line that is not empty ends with it, as whole words, without regard to case
    and closing punctuation.
    """
    right = number_of(gold)
    if right is not None:
        return any(_same_quantity(number, right) for number in last_number(text))
    folded = _folded(gold)
    if not folded:  # the answer is punctuation
        return text.strip().endswith(gold)
    return _word_search(folded, _last_line(text), end=r"\Z")


def holds(text: str, gold: str) -> bool:
    """Whether the right answer occurs anywhere in a text: as one of its numbers, or as whole words."""
    right = number_of(gold)
    if right is not None:
        return any(_same_quantity(number, right) for number in numbers_in(text))
    folded = _folded(gold)
    return _word_search(folded, _folded(text), end=_WORD_END) if folded else gold in text


def for_math_verify(text: str) -> str:
    """Return a text with delimiters and signs as math-verify reads them: no dollar is money, no number is in parts."""
    text = _composed(text).translate(_CHARACTERS | _SYMBOLS).replace("\\$", "")
    text = _IN_PARTS.sub("", text.replace("\\!", ""))
    if text.count("$") % 2:
        text = regex.sub(r"\$(?=\s?[\d.])", "", text)
    fractions = regex.compile(_VULGAR_FRACTION)
    return str(
        fractions.sub(lambda found: r"\frac{{{}}}{{{}}}".format(*_parts(found[0])), text)
    ).strip()


def _composed(text: str) -> str:
    """Return a text in NFC; of a run of combining marks the first 30, because their sorting takes quadratic time."""
    return unicodedata.normalize("NFC", _LONG_MARKS.sub(r"\1", text))


def words_of(text: str) -> list[str]:
    """Return a text's words: as white space parts them, and where a script has no spaces, its letters."""
    words: list[str] = []
    for part in _composed(text).split():
        words += _WORDS.findall(part) if _HAS_UNSPACED.search(part) else [part]
    return words


def _same_quantity(number: Number, right: Number) -> bool:
    words, unit = (
        _folded(_SCALE.sub("", quantity.unit, count=1)).split() for quantity in (number, right)
    )
    return number.equals(right) and (not unit or not words or words[: len(unit)] == unit)


def _word_search(folded: str, text: str, *, end: str) -> bool:
    return (
        regex.search(_WORD_START + regex.escape(folded) + end, text, regex.WORD | regex.V1)
        is not None
    )


def _last_line(text: str) -> str:
    num_lines = len(text.rstrip(_CLOSING).splitlines())
    return _folded(text.splitlines()[num_lines - 1]) if num_lines else ""


def _folded(text: str) -> str:
    folded = _composed(_plain(text).casefold())
    words = folded.replace(_GROUP, " ").split()
    return " ".join(words).replace(", ", ",").rstrip(_CLOSING)


def _plain(text: str) -> str:
    """Return a text in NFC, with one form for each of the many in which LaTeX and Unicode write a number."""
    text = _composed(text).translate(_CHARACTERS)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _fraction_text(before: str, top: str, bottom: str) -> str:
    is_plain = regex.fullmatch(r"-?[\d.,]+", top) and regex.fullmatch(r"[\d.,]+", bottom)
    space = " " if before else ""
    return f"{before}{space}{top}/{bottom}" if is_plain else f"{before}({top})/{bottom}"


def _parts(vulgar_fraction: str) -> list[str]:
    return unicodedata.normalize("NFKC", vulgar_fraction).split("\u2044")


def _read_numbers(plain: str) -> Iterator[Number]:
    for found in _NUMBER.finditer(plain):
        value = None if found["chain"] else _value(found)
        if value is not None:
            unit = _UNIT.match(plain, found.end())
            yield Number(
                value,
                found[0].strip(),
                found["percent"] is not None,
                unit[0].rstrip() if unit else "",
            )


def _value(found: Any) -> Fraction | None:
    """Return a match's value; None where it is beyond what anybody means (`9^999`), or divides by 0."""
    value = _fraction(found["top"])
    if found["bottom"]:
        bottom = _fraction(found["bottom"])
        if not bottom:
            return None
        value /= bottom
    power = int(found["power"] or 0)
    if found["times"]:
        value *= Fraction(10) ** power
    elif found["power"]:
        if (power < 0 and not value) or abs(power) > 99 or len(found["top"]) > 20:
            return None
        value **= power
    if found["whole"]:
        value += int(found["whole"])
    if found["power_of_ten"]:
        value *= Fraction(10) ** int(found["power_of_ten"])
    return -value if found["sign"] == "-" else value


def _fraction(digits: str) -> Fraction:
    """Return the number that digits with their separators are."""
    digits = digits.replace(_GROUP, "")
    if digits.isdecimal():  # Python reads no int of more than 4300 digits
        return Fraction(int(digits)) if len(digits) < 1000 else Fraction(Decimal(digits))
    if regex.fullmatch(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?:\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif "," in digits or digits.count(".") > 1:  # 1.234,56 or 1.234.567
        digits = digits.replace(".", "").replace(",", ".")
    return Fraction(Decimal(digits))
