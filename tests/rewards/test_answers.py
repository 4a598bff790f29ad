"""Answers as people compare them: numbers whole, words by Unicode's rules, several accepted answers."""

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rewards.test_builtin import score
from ycore.data.cells import golds_of
from ycore.rewards.answers import gives, holds, number_of, numbers_in, words_of

FOLDERS = [folder / "shared" / "cases" for folder in Path(__file__).parents]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (r"\boxed{1{,}234}", [1234]),
        (r"1\,234", [1234]),
        (r"1\!,234 and 1,\!234", [1234, 1234]),
        (r"1\ 234\ 567", [1234567]),
        ("1\u2009234, 1\u202f234, 1\u00a0234", [1234] * 3),
        ("1'234'567.5", [Fraction("1234567.5")]),
        ("12,34,567", [1234567]),
        (r"12{,}34{,}567", [1234567]),
        ("12{,}000", [12000]),
        ("100 000", [100000]),
        ("1.234,56", [Fraction("1234.56")]),
        ("1.234.567", [1234567]),
        ("1,2,3", [1, 2, 3]),
        ("1,2345", [1, 2345]),
        (r"\frac{1}{2}", [Fraction(1, 2)]),
        (r"-\dfrac{3}{4}", [Fraction(-3, 4)]),
        (r"2\frac12", [Fraction(5, 2)]),
        ("½ and 2½ and 2 1/2", [Fraction(1, 2), Fraction(5, 2), Fraction(5, 2)]),
        (r"1.2 \times 10^{3}", [1200]),
        ("1.2\u00d710³", [1200]),
        ("6.02e23", [602 * 10**21]),
        ("10^-2", [Fraction(1, 100)]),
        ("2^10", [1024]),
        ("答案是-5", [-5]),
        ("答案是5。", [5]),
        ("\u22125", [-5]),
        ("{-}5", [-5]),
        ("-$5 or $-5", [-5, -5]),
        ("10-7=3", [10, 7, 3]),
        ("10\u201320", [10, 20]),
        ("50%-60%", [50, 60]),
        ("１，２３４", [1234]),  # noqa: RUF001
        ("x^2, x_2, x/2, SmolLM2, é5, 3.11.2, 5/12/2024", []),
        (r"2\sqrt{3}, 2\pi, 2π, √3", []),
        ("9^999, 1/0", []),
    ],
)
def test_numbers_are_read_whole(text: str, values: list[Any]) -> None:
    assert [number.value for number in numbers_in(text)] == values


@pytest.mark.parametrize(
    ("text", "gold", "ends", "contains"),
    [
        ("答案是北京", "北京", True, True),
        ("答案是北京。", "北京", True, True),
        ("北京是首都", "北京", False, True),
        ("答えは東京です", "東京", False, True),
        ("정답은 서울입니다", "서울", False, True),
        ("남서울", "서울", False, False),
        ("คำตอบคือกรุงเทพ", "กรุงเทพ", True, True),
        ("ກຳ", "ກ", False, False),
        ("ຄຳຕອບແມ່ນວຽງຈັນ", "ວຽງຈັນ", True, True),
        ("ចម្លើយគឺភ្នំពេញ។", "ភ្នំពេញ", True, True),
        ("답은 Paris입니다", "Paris", False, True),
        ("답은Paris", "Paris", True, True),
        ("Paris.The capital", "Paris", False, True),
        ("cafe\u0301", "caf\u00e9", True, True),
        ("Comparis", "Paris", False, False),
        ("I don't", "don", False, False),
        ("Answer:Paris", "Paris", True, True),
        ("_Paris_", "Paris", True, True),
        (r"\boxed{\text{Paris}}", "Paris", True, True),
        ("It takes 5 km", "5 km", True, True),
        ("It takes 5km.", "5 km", True, True),
        ("It is 5", "5 km", True, True),
        ("5 miles", "5 km", False, False),
        ("5 km", "5", True, True),
        ("20%", "0.2", True, True),
        ("20", "20%", True, True),
        ("0.2", "20", False, False),
        ("1/2", "2", False, False),
        ("1/2", "0.5", True, True),
    ],
)
def test_answers_are_compared_as_people_do(
    text: str, gold: str, ends: bool, contains: bool
) -> None:
    assert (gives(text, gold), holds(text, gold)) == (ends, contains)


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        (["Paris", "Paris, France"], ["Paris", "Paris, France"]),
        (("Paris", ""), ["Paris"]),
        (np.array(["Paris", "Rome"], dtype=object), ["Paris", "Rome"]),
        ({"value": "Paris", "aliases": ["City of Light", "Paris"]}, ["Paris", "City of Light"]),
        ({"text": ["Paris"], "answer_start": [3]}, ["Paris"]),
        (np.float64(5), ["5.0"]),
        (7, ["7"]),
        ("48 / 2\n#### 24", ["24"]),
        (r"So $\boxed{1}$, then $\boxed{\frac{1}{2}}$.", [r"\frac{1}{2}"]),
        (r"\boxed{24}", ["24"]),
        (None, []),
        ("  ", []),
        ([], []),
        ([None, float("nan")], []),
        (np.float32("nan"), []),
    ],
)
def test_what_a_row_accepts(answer: Any, golds: list[str]) -> None:
    assert golds_of(answer) == golds


@pytest.mark.parametrize(
    ("answer", "golds"),
    [
        ('["3", "three"]', ["3", "three"]),
        ("['3', 'three']", ["3", "three"]),
        ("['3' 'three']", ["3", "three"]),
        ('{"value": "Bob", "aliases": ["B"]}', ["Bob", "B"]),
        ("[1, 2]", []),
        ("{1, 2}", []),
        ("[open", []),
    ],
)
def test_accepted_answers_as_text_count_beside_the_text_itself(
    answer: str, golds: list[str]
) -> None:
    assert golds_of(answer) == [answer, *golds]


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        (r"\boxed{(1, 2)}", "(1,2)"),
        ("It is [1,2].", "[1, 2]"),
        ("答案是\uff21", "A"),
        (r"1\text{,}234", "1234"),
        ("50\u066a", "0.5"),
        ("O\u2019Brien", "O'Brien"),
        ("Paris\u200b.", "Paris"),
        ("at 10:30", "10:30"),
        (r"\boxed{\frac{1}{2},\frac{1}{3}}", r"\frac{1}{2},\frac{1}{3}"),
        ("on 2024-01-05", "2024-01-05"),
    ],
)
def test_spacing_and_width_make_no_other_answer(text: str, gold: str) -> None:
    assert gives(text, gold)


@pytest.mark.parametrize(
    ("text", "part"), [("10:30", "30"), ("2024-01-05", "5"), ("a ratio of 2:3", "3")]
)
def test_no_part_of_a_time_date_or_ratio_is_an_answer(text: str, part: str) -> None:
    assert not gives(text, part) and not holds(text, part)


@pytest.mark.parametrize(
    ("box", "part"),
    [
        (r"\frac{\sqrt{3}}{2}", "2"),
        ("2x+3", "3"),
        ("x>5", "5"),
        (r"\pm 5", "5"),
        ("3+2i", "2"),
        ("5i", "5"),
        ("3x", "3"),
        ("3 x^2", "3"),
        (r"y = 3x", "3"),
        ("101_2", "2"),
        (r"\log_2 5", "5"),
        ("100!", "100"),
        ("1, 2, 3", "3"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "2"),
        ("(1, 2)", "2"),
    ],
)
def test_no_part_of_a_formula_in_a_box_is_an_answer(box: str, part: str) -> None:
    for name in ("exact_answer", "numeric_answer", "math"):
        assert score(name, rf"So it is $\boxed{{{box}}}$.", answer=part) == 0.0, name


@pytest.mark.parametrize(
    "box",
    [
        "x = 12",
        "{12}",
        r"\approx 12",
        r"\displaystyle 12",
        r"12\text{ cm}",
        r"12\,\text{cm}^2",
        r"12\mathrm{~cm}",
        r"12 \text{ apples in all}",
        r"12^\circ",
    ],
)
def test_a_number_in_a_box_may_have_a_name_and_a_unit(box: str) -> None:
    for name in ("exact_answer", "numeric_answer", "math"):
        assert score(name, rf"So it is $\boxed{{{box}}}$.", answer="12") == 1.0, name


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("\u51713\u4e07\u5143\u3002", "30000", True),
        ("30000\u5143", "3\u4e07\u5143", True),
        ("3\u5143", "3\u4e07\u5143", False),
        ("1\u5104", "100000000", True),
        ("5\u5343", "5000", True),
        ("5", "5\u5343\u7c73", True),
        ("2 thousand", "2000", True),
        ("2 lakh", "200000", True),
        ("2 million", "2,000,000", True),
        ("2,000,000 people", "2 million people", True),
        ("2 million", "2", True),
        ("2", "2 million", False),
        ("2 billion", "2 million", False),
        ("90 degrees", "90\u00b0", True),
        (r"90^{\circ}", "90 degrees", True),
        (r"12 \text{ cm}^2", "12 cm\u00b2", True),
        ("12 cm", r"12\text{ cm}^2", False),
        ("\u0661\u0662\u0663\u0664", "1234", True),
        ("\u0661\u0662\u0663\u0664", "234", False),
        ("\u0967\u0968\u0969", "123", True),
        ("1/2", r"\(\frac{1}{2}\)", True),
        (r"\[5\]", "5", True),
        (r"\boxed{5 \text{ a.m.}}", "5 a.m.", True),
        ("5", r"\[5\]", True),
        ("\u7b54\u6848\u662f\u5bf9", "\u5bf9", True),
        ("\u4e0d\u5bf9", "\u5bf9", False),
    ],
)
def test_units_and_digits_of_other_scripts(text: str, gold: str, expected: bool) -> None:
    assert gives(text, gold) is expected


def test_one_of_several_answers_is_enough_and_none_is_not_scored() -> None:
    for name in ("exact_answer", "contains_answer"):
        assert score(name, "It is Paris.", answer=["Rome", "Paris"]) == 1.0
        assert score(name, "It is Rome.", answer={"value": "Paris", "aliases": ["Paname"]}) == 0
        assert score(name, "5", answer=float("nan")) is None
    assert score("numeric_answer", "It is 5.", answer=["five", "5"]) == 1.0
    assert score("math", r"\boxed{5}", answer=["7", "5"]) == 1.0
    assert score("math", r"\boxed{5}", answer=[]) is None


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"\boxed{18}", r"\$18", 1.0),
        (r"\boxed{\$18}", "18", 1.0),
        (r"it costs \$18.", "$18", 1.0),
        (r"\boxed{3 \text{ or } 5}", r"3 \text{ or } 5", 1.0),
        (r"\boxed{1\,234}", "1234", 1.0),
        (r"\boxed{1\,234}", "234", 0.0),
        (r"\boxed{12{,}34{,}567}", "1234567", 1.0),
        ("½", "0.5", 1.0),
        ("\\boxed{\u22125}", "-5", 1.0),
        (r"\boxed{\sqrt{2}}", "\u221a2", 1.0),
        ("\\boxed{\u221a2}", r"\sqrt{2}", 1.0),
        ("2\u221a3", "2\u221a3", 1.0),
        ("3\u03c0", r"3\pi", 1.0),
        (r"\boxed{\frac{\pi}{2}}", "\u03c0/2", 1.0),
        (r"(-\infty, 3]", "(\u2212\u221e, 3]", 1.0),
        (r"\boxed{[2,\infty)}", "[2, \u221e)", 1.0),
        ("\\boxed{\u221a2}", "2", 0.0),
        ("\\boxed{3\u03c0}", "3", 0.0),
    ],
)
def test_math_reads_mended_delimiters(completion: str, answer: str, expected: float) -> None:
    assert score("math", completion, answer=answer) == expected


def test_words_of_languages_without_spaces_are_counted() -> None:
    assert words_of("The answer is 北京。") == ["The", "answer", "is", "北", "京"]
    assert words_of("a = b") == ["a", "=", "b"]
    assert len(words_of("กรุงเทพ")) > 3
    assert score("length", "中" * 10, target=10) == 1.0
    assert score("repetition", "中" * 10, n=2) == pytest.approx(-8 / 9)
    both = ["答案是北京", "答案是上海"]
    assert score("similarity", both[0]) is None
    from ycore.rewards.builtin import similarity

    assert similarity(["?"] * 2, [*both]) == pytest.approx([0.6, 0.6])


@pytest.mark.parametrize(
    "hostile",
    ["1," * 20_000, "12_" * 20_000, "\\frac" * 20_000, "1/1 " * 9_000, "(" + "a, " * 40_000],
)
def test_numbers_are_read_in_linear_time(hostile: str) -> None:
    began = time.process_time()
    numbers_in(hostile)
    number_of(hostile)
    assert time.process_time() - began < 20.0


def shared_rows(case: str, name: str = "rows.jsonl") -> list[dict[str, Any]]:
    files = [folder / case / name for folder in FOLDERS]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        pytest.skip(f"no shared case {case} here")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_shared_rows_of_answers_are_scored_right() -> None:
    for row in shared_rows("answer-list"):
        assert score("exact_answer", "It is Paris.", answer=row["answer"]) == 1.0
    (row,) = shared_rows("cjk-words")
    assert score("exact_answer", "答案是北京", answer=row["answer"]) == 1.0
    rewards = [
        score(name, r"\boxed{1{,}234}", answer=row["answer"])
        for row in shared_rows("latex-thousands")
        for name in ("exact_answer", "contains_answer", "numeric_answer", "math")
    ]
    assert rewards == [1.0] * 4 + [0.0] * 4
    dollar, either = shared_rows("math-dollar")
    assert score("math", r"\boxed{18}", answer=dollar["answer"]) == 1.0
    assert score("math", rf"\boxed{{{either['answer']}}}", answer=either["answer"]) == 1.0


def test_alternatives_of_versions_are_no_numbers() -> None:
    assert not gives("Python 3.11.2 or 3.12.1", "3")
