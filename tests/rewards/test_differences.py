"""Rewards against the verdicts of people, of Math-Verify, of SQuAD's normalisation and of lm-eval's GSM8K.

The table in differences.md has the number of pairs on which each agrees with a person, and why others do not;
docs/rewards.md has the sums.
"""

import re
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import math_verify
import pytest

from tests.rewards.pairs import Pair, pairs
from tests.rewards.test_builtin import score
from ycore.data.cells import golds_of

TABLE = Path(__file__).parent / "differences.md"
PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def exact(pair: Pair) -> bool | None:
    return score("exact_answer", pair.completion, answer=pair.answer) == 1.0


def math(pair: Pair) -> bool | None:
    reward = score("math", pair.completion, answer=pair.answer)
    return None if reward is None else reward == 1.0


def math_verify_alone(pair: Pair) -> bool | None:
    gold = math_verify.parse(f"${golds_of(pair.answer)[0]}$", parsing_timeout=None)
    answer = math_verify.parse(pair.completion, parsing_timeout=None)
    return bool(math_verify.verify(gold, answer, timeout_seconds=None))


def gsm8k_strict(pair: Pair) -> bool | None:
    """lm-eval's `strict-match`: the first number behind `####`."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", pair.completion)
    return _gsm8k_equal(match[1] if match else "[invalid]", pair)


def gsm8k_flexible(pair: Pair) -> bool | None:
    """lm-eval's `flexible-extract`: the last number."""
    matches = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", pair.completion)
    return _gsm8k_equal("".join(matches[-1]) if matches else "[invalid]", pair)


def _gsm8k_equal(extracted: str, pair: Pair) -> bool:
    def cleaned(text: str) -> str:
        for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
            text = re.sub(ignored, "", text)
        return text.lower()

    return cleaned(extracted) == cleaned(str(pair.answer))


def squad(pair: Pair) -> bool | None:
    """SQuAD's exact match: equal without case, punctuation, articles and repeated spaces."""

    def normal(text: str) -> str:
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    return any(normal(pair.completion) == normal(gold) for gold in golds_of(pair.answer))


JUDGES: Mapping[str, Callable[[Pair], bool | None]] = {
    "exact_answer": exact,
    "math": math,
    "Math-Verify": math_verify_alone,
    "lm-eval strict": gsm8k_strict,
    "lm-eval flexible": gsm8k_flexible,
    "SQuAD": squad,
}


def is_defined(judge: str, pair: Pair) -> bool:
    """Whether a judge speaks of a pair: numbers have no SQuAD, texts nothing else; `strict` wants GSM8K's ending."""
    is_number = any(letter.isdigit() for letter in str(pair.answer))
    if judge == "exact_answer":
        return True
    if judge == "lm-eval strict":
        return is_number and "####" in pair.completion
    return is_number if judge != "SQuAD" else not is_number


def agreements() -> dict[str, dict[str, str]]:
    """Return `agrees/pairs` with a person of each class and judge."""
    counts: dict[str, dict[str, list[int]]] = {}
    for pair in pairs():
        row = counts.setdefault(pair.kind, {})
        for name, judge in JUDGES.items():
            if is_defined(name, pair):
                count = row.setdefault(name, [0, 0])
                count[0] += judge(pair) == pair.is_right
                count[1] += 1
    return {
        kind: {name: "{}/{}".format(*row[name]) if name in row else "" for name in JUDGES}
        for kind, row in counts.items()
    }


def table() -> dict[str, list[str]]:
    """Return the rows of the table by their class."""
    text = TABLE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if not row[0].startswith("-")}


@pytest.mark.timeout(900)
def test_every_difference_from_other_measures_is_explained() -> None:
    assert 450 <= len(pairs()) <= 700
    rows = table()
    measured: dict[str, Any] = agreements()
    assert rows.keys() == measured.keys()
    for kind, row in measured.items():
        *cells, reason = rows[kind]
        assert cells == list(row.values()), (kind, row)
        differs = any(len({*cell.split("/")}) > 1 for cell in cells if cell)
        assert bool(reason) == differs, f"{kind}: a difference has a reason"


def test_the_page_has_the_sums() -> None:
    def total(column: int, *, numbers: bool) -> str:
        cells = [row[column] for row in table().values() if bool(row[2]) == numbers]
        counts = [map(int, cell.split("/")) for cell in cells if cell]
        return "{}/{}".format(*map(sum, zip(*counts, strict=True)))

    page = PAGE.read_text(encoding="utf-8")
    numbers = [total(column, numbers=True) for column in (0, 1, 2, 4)]
    texts = [total(column, numbers=False) for column in (0, 5)]
    assert f"| numbers | {' | '.join(numbers)} | |" in page
    assert f"| texts | {texts[0]} | | | | {texts[1]} |" in page


def test_ours_differ_from_a_person_only_where_the_page_says_so() -> None:
    explained = {"an article", "punctuation within"}
    wrong = [pair for pair in pairs() if exact(pair) is not pair.is_right]
    assert {pair.kind for pair in wrong} <= explained, wrong
