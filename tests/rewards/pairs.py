"""About 500 pairs of an answer and a completion in classes, each with what a person says of it."""

import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple


class Pair(NamedTuple):
    kind: str
    answer: Any
    completion: str
    is_right: bool


SENTENCES = (
    "{}",
    "The answer is {}.",
    r"So it is $\boxed{{{}}}$.",
    "**{}**",
    "There are {} of them",
)
WHOLE = (7, 12, 234, 1234, 12000, 1234567)
LARGE = (1234, 12000, 987654, 1234567, 30100200)


def pairs() -> list[Pair]:
    return [*_numbers(), *_texts()]


def _said(
    kind: str, answer: Any, written: str, *, is_right: bool = True, num: int = 5
) -> Iterator[Pair]:
    for sentence in SENTENCES[:num]:
        yield Pair(kind, answer, sentence.format(written), is_right)


def _grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


def _indian(number: int) -> str:
    head, tail = f"{number // 1000}", f"{number % 1000:03}"
    parts = []
    while head:
        parts.insert(0, head[-2:])
        head = head[:-2]
    return ",".join([*parts, tail])


def _numbers() -> Iterator[Pair]:
    for number in WHOLE:
        yield from _said("a whole number", str(number), str(number))
        yield from _said("a whole number", str(number), str(number + 1), is_right=False, num=2)
        yield from _said("a decimal with zeros", str(number), f"{number}.0", num=3)
    for number in LARGE:
        yield from _said("thousands with commas", str(number), f"{number:,}")
        yield from _said("thousands as `{,}`", str(number), _grouped(number, "{,}"), num=3)
        yield from _said("thousands as `\\,`", str(number), _grouped(number, "\\,"), num=3)
        yield from _said("thousands as `\\!,`", str(number), _grouped(number, "\\!,"), num=3)
        for space in ("\u2009", "\u202f", "\u00a0"):
            yield from _said(
                "thousands with thin spaces", str(number), _grouped(number, space), num=2
            )
        yield from _said(
            "thousands with apostrophes", str(number), _grouped(number, "'"), num=2
        )
        yield from _said("Indian thousands", str(number), _indian(number), num=3)
        part = str(number % 1000)
        for separator in (",", "{,}", "\\,", "\u202f"):
            yield from _said(
                "a part of a number", part, _grouped(number, separator), is_right=False, num=2
            )
    for number in (-5, -48, -1234):
        for sign in ("-", "\u2212"):
            yield from _said("a negative number", str(number), f"{sign}{-number}", num=4)
            yield from _said(
                "a sign left out", str(-number), f"{sign}{-number}", is_right=False, num=2
            )
    for left, right in ((10, 7), (30, 12), (9, 4)):
        yield Pair("a subtraction", str(left - right), f"{left}-{right}={left - right}", True)
        yield Pair("a subtraction", str(-right), f"{left}-{right}", False)
    for top, bottom in ((1, 2), (3, 4), (2, 5), (7, 8)):
        answer = rf"\frac{{{top}}}{{{bottom}}}"
        for written in (f"{top}/{bottom}", rf"\dfrac{{{top}}}{{{bottom}}}", str(top / bottom)):
            yield from _said("a fraction", answer, written, num=3)
        yield from _said(
            "a part of a fraction", str(bottom), f"{top}/{bottom}", is_right=False, num=3
        )
        yield from _said(
            "a mixed number",
            str(Fraction(top + bottom, bottom)),
            rf"1\frac{{{top}}}{{{bottom}}}",
            num=3,
        )
    for character, answer in (("½", "0.5"), ("¼", "1/4"), ("¾", "0.75")):
        yield from _said("a fraction of one letter", answer, character, num=3)
    for number in (20, 5, 75):
        for written in (f"{number}%", rf"{number}\%", str(number / 100), str(number)):
            yield from _said("a percentage", rf"{number}\%", written, num=3)
        yield from _said("a percentage", str(number), str(number / 100), is_right=False, num=2)
    for number in (18, 250):
        for answer in (str(number), f"${number}", rf"\${number}"):
            yield from _said("money", answer, rf"\${number}", num=3)
            yield from _said("money", answer, f"{number}.00", num=2)
    for written in (r"1.2 \times 10^{3}", "1.2e3", "1.2\u00d710\u00b3"):
        yield from _said("scientific notation", "1200", written, num=3)
        yield from _said("scientific notation", "3", written, is_right=False, num=2)
    for unit, other in (("km", "miles"), ("apples", "pears"), ("cm", "mm")):
        for written in (f"5 {unit}", f"5{unit}", rf"5\text{{ {unit}}}", "5"):
            yield from _said("a unit", f"5 {unit}", written, num=3)
        yield from _said("another unit", f"5 {unit}", f"5 {other}", is_right=False, num=3)
    for written in ("SmolLM2", "x^2", "version 3.11.2", r"5\sqrt{2}"):
        yield Pair("digits of something else", "2", f"It is {written}", False)
        yield Pair("digits of something else", "2", written, False)
    for number in (24, 1234):
        yield Pair(
            "GSM8K's ending", f"steps\n#### {number}", f"We get it.\n#### {number}", True
        )
        yield Pair("GSM8K's ending", f"#### {number}", f"We get it.\n#### {number:,}", True)
        yield Pair("GSM8K's ending", f"#### {number}", f"We get it.\n#### ${number}", True)
        yield Pair("GSM8K's ending", f"#### {number}", f"We get it.\n#### {number}.0", True)
        yield Pair("GSM8K's ending", f"#### {number}", f"We get it.\n#### {number + 1}", False)
    for first, second in ((3, 4), (20, 22)):
        total = first + second
        yield Pair(
            "the last of several numbers",
            str(total),
            f"{first} + {second} = {total}, so {total} birds",
            True,
        )
        yield Pair("the last of several numbers", str(first), f"{first} or {second}", False)
        yield Pair("the last of several numbers", str(second), f"{first}, {second}", True)
    for number in (5, -5):
        yield Pair("a number in Chinese", str(number), f"答案是{number}。", True)
        yield Pair("a number in Chinese", str(-number), f"答案是{number}。", False)

    for part, formula in (
        *(("2", r"\frac{\sqrt{3}}{2}"), ("3", "2x+3"), ("5", "x>5"), ("2", "3+2i")),
        *(("5", r"\log_2 5"), ("100", "100!"), ("2", "1, 2"), ("2", "(1, 2)")),
    ):
        yield Pair("a part of a formula", part, rf"So it is $\boxed{{{formula}}}$.", False)
        yield Pair("a part of a formula", formula, rf"So it is $\boxed{{{formula}}}$.", True)
    for answer, written in (
        *(
            ("30000", "3\u4e07\u5143"),
            ("3\u4e07\u5143", "30000\u5143"),
            ("100000000", "1\u5104"),
        ),
        *(("2000000", "2 million"), ("2 million", "2,000,000")),
    ):
        yield from _said("ten thousands and millions", answer, written, num=2)

    for number in (1234, 56789):
        yield from _said(
            "thousands with plain spaces", str(number), _grouped(number, " "), num=2
        )
    yield from _said("a decimal comma", "3.5", "3,5", num=2)
    yield from _said("plus or minus", "5", "±5", is_right=False, num=2)
    yield from _said("plus or minus", "±5", "±5", num=2)


def _texts() -> Iterator[Pair]:
    for answer in ("Paris", "Ada Lovelace", "blue whale"):
        yield Pair("the bare answer", answer, answer.upper() + ".", True)
        yield Pair("the bare answer", answer, answer, True)
        yield Pair("a sentence that ends with it", answer, f"I think it is {answer}.", True)
        yield Pair("a sentence that ends with it", answer, f"So:\n**{answer}**", True)
        yield Pair("a part of a word", answer, f"It is {answer}ian", False)
        yield Pair("a part of a word", answer, f"It is Com{answer}", False)
        yield Pair("another answer", answer, "I think it is Rome.", False)
        yield Pair("an article", f"the {answer}", answer, True)
        yield Pair("an article", answer, f"The {answer}", True)
        listed = [answer, f"{answer} (see below)"]
        yield Pair("several accepted answers", listed, f"{answer}.", True)
        yield Pair("several accepted answers", {"value": "?", "aliases": listed}, answer, True)
        yield Pair("several accepted answers", listed, "Rome", False)
    for answer, written in (("U.S.", "US"), ("well-known", "wellknown"), ("don't", "dont")):
        yield Pair("punctuation within", answer, written, True)
    for answer in ("caf\u00e9", "Z\u00fcrich", "\u1ec7", "\uac00\ub098"):
        for form in ("NFC", "NFD"):
            yield Pair("composed letters", answer, unicodedata.normalize(form, answer), True)
    for answer, written in (
        ("北京", "答案是北京"),
        ("北京", "答案是北京。"),
        ("東京", "答えは東京"),
        ("กรุงเทพ", "คำตอบคือกรุงเทพ"),
        ("ວຽງຈັນ", "ຄຳຕອບແມ່ນວຽງຈັນ"),
        ("ភ្នំពេញ", "ចម្លើយគឺភ្នំពេញ។"),
    ):
        yield Pair("no spaces between words", answer, written, True)
        yield Pair("no spaces between words", answer, answer, True)
        yield Pair("no spaces between words", answer, written + "x", False)
