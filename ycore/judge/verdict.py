"""From what a judge wrote to a number, or to the reason why there is none. Strict: a doubt is never a reward.

A verdict stands once, in plain ASCII, within its range. Text that holds two, or one that only looks like a tag, is not
read at all: it may be the judge's quotation of what it judged.

From comparisons to one number a completion, between 0 (always worse) and 1 (always better). Pure.

Not here: the request (`roles.judge_engine`), asking again and masking (`controller`).
"""

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ycore.judge.declaration import JsonVerdict, Judge, LabelVerdict, RankingVerdict, ScoreVerdict
from ycore.judge.question import folded

_NUMBER = r"[+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_LONGEST = 200_000  # characters; a judge that writes more is not answering


class Unreadable(ValueError):
    """There is no verdict, or more than one; the message is short, and alike for alike cases, so that it is counted."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a judge wrote in its own turn, and nothing else.

    `first_token` has the log-probability of every likely first token, by its text, where labels were asked for.
    """

    text: str
    finish_reason: str = "stop"
    first_token: Mapping[str, float] | None = None
    num_tokens: int = 0


def read_value(judge: Judge, reply: Reply) -> float:
    """The verdict's value, between its min and max; Unreadable. For every kind but rankings."""
    match judge.verdict:
        case LabelVerdict() as verdict:
            return _label(verdict, reply)
        case ScoreVerdict() as verdict:
            return _within(verdict, _one_number(_own_words(judge, reply), verdict.tag))
        case JsonVerdict() as verdict:
            return _within(verdict, _field(_own_words(judge, reply), verdict))
        case RankingVerdict():
            raise TypeError("a ranking is read by read_ranking")


def read_ranking(judge: Judge, reply: Reply, *, count: int) -> list[int]:
    """The answers' places in what was shown, counted from 0, best first; Unreadable."""
    verdict = judge.verdict
    assert isinstance(verdict, RankingVerdict)
    inside = _one_tag(_own_words(judge, reply), verdict.tag)
    if not re.fullmatch(r"\s*[0-9]{1,3}(?:\s*[,>]\s*[0-9]{1,3}|\s+[0-9]{1,3})*\s*", inside, re.ASCII):
        raise Unreadable("its ranking is no list of numbers")
    numbers = [int(number) for number in re.findall(r"[0-9]+", inside)]
    if sorted(numbers) != list(range(1, count + 1)):
        raise Unreadable("its ranking does not have every answer once")
    return [number - 1 for number in numbers]


def _own_words(judge: Judge, reply: Reply) -> str:
    """What a verdict may stand in: the judge's text, after its thinking."""
    text = reply.text
    if len(text) > _LONGEST:
        raise Unreadable("it wrote too much")
    if judge.strip_thinking:
        text = _after_thinking(text, judge)
    if not text.strip():
        raise Unreadable("it wrote nothing")
    return text


def _after_thinking(text: str, judge: Judge) -> str:
    """What follows the one `</think>`. Where no `<think>` opened the text, as some chat templates do that themselves,
    nothing before it may look like a verdict: else a quoted `</think>` would hide the judge's own."""
    before, end, after = text.partition("</think>")
    if "</think" in folded(after):
        raise Unreadable("its thinking ends more than once")
    opened, looks = before.lstrip().startswith("<think>"), folded(before)
    if looks.count("<think") > opened or "<think" in folded(after) or (opened and not end):
        raise Unreadable("its thinking has no end")
    if end and not opened and _looks_like_a_verdict(looks, judge):
        raise Unreadable("more than one verdict, or one that is not whole")
    return after if end else before


def _looks_like_a_verdict(looks: str, judge: Judge) -> bool:
    match judge.verdict:
        case ScoreVerdict(tag=tag) | RankingVerdict(tag=tag):
            return re.search(rf"<[\s/\\]*{tag}", looks) is not None
        case JsonVerdict(field=name):
            return f'"{name}"' in looks
        case LabelVerdict():
            return False


def _one_tag(text: str, tag: str) -> str:
    """What stands between the only opening and the only closing tag."""
    found = re.findall(rf"<{tag}>([^<]{{0,400}})</{tag}>", text)
    alike = re.findall(rf"<[\s/\\]*{tag}", folded(text))
    if not alike:
        raise Unreadable("no verdict")
    if len(found) != 1 or len(alike) != 2:
        raise Unreadable("more than one verdict, or one that is not whole")
    return str(found[0])


def _one_number(text: str, tag: str) -> float:
    inside = _one_tag(text, tag).strip(" \t\n")
    if re.fullmatch(_NUMBER, inside, re.ASCII) is None:
        raise Unreadable("its verdict is not a number")
    return float(inside)


def _field(text: str, verdict: JsonVerdict) -> float:
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", text, re.DOTALL)
    try:
        told = json.loads(fenced[1] if fenced else text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except RecursionError:
        raise Unreadable("not JSON") from None
    except ValueError as problem:
        raise problem if isinstance(problem, Unreadable) else Unreadable("not JSON") from None
    expected = {verdict.field, "reason"} if verdict.reason else {verdict.field}
    if not isinstance(told, dict) or told.keys() != expected:
        raise Unreadable(f"not a JSON object with {' and '.join(sorted(expected))}")
    value = told[verdict.field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable("its verdict is not a number")
    return float(value) if abs(value) < 1e12 else math.inf


def _no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    told = dict(pairs)
    if len(told) != len(pairs):
        raise Unreadable("a JSON key comes twice")
    return told


def _no_constant(name: str) -> float:
    raise Unreadable("its verdict is not a number")


def _within(verdict: ScoreVerdict | JsonVerdict, value: float) -> float:
    if not verdict.min <= value <= verdict.max:
        raise Unreadable("out of range")
    return value


def _label(verdict: LabelVerdict, reply: Reply) -> float:
    """The labels' mean value, weighted by probability. A token counts for the label that it begins, if only one."""
    if reply.first_token is None:
        raise Unreadable("no log-probabilities")
    mass = dict.fromkeys(verdict.labels, 0.0)
    for token, logprob in reply.first_token.items():
        start = token.strip(" \n\u0120\u2581").casefold()
        meant = [label for label in verdict.labels if start and label.strip().casefold().startswith(start)]
        if len(meant) == 1 and math.isfinite(logprob):
            mass[meant[0]] += math.exp(min(0.0, logprob))
    total = sum(mass.values())
    if total < verdict.min_mass:
        raise Unreadable("none of the labels")
    return sum(mass[label] * value for label, value in verdict.labels.items()) / total


def ring_pairs(size: int, opponents: int) -> list[tuple[int, int]]:
    """Who meets whom when everybody meets the next `opponents` of a ring; no pair twice, as many meetings for each.

    Example: `ring_pairs(4, 1)` is `[(0, 1), (1, 2), (2, 3), (0, 3)]`.
    """
    met: dict[tuple[int, int], None] = {}
    for distance in range(1, min(opponents, size // 2) + 1):
        for index in range(size):
            pair = (index, (index + distance) % size)
            met[min(pair), max(pair)] = None
    return list(met)


def win_share(first_shown: float, second_shown: float) -> float:
    """How far one answer beats another, from both orders: each value says how much better the answer shown first is."""
    return (first_shown + 1.0 - second_shown) / 2


def follows_position(first_shown: float, second_shown: float) -> bool:
    """Whether the same place won both times, whoever stood there."""
    return (first_shown > 0.5 and second_shown > 0.5) or (first_shown < 0.5 and second_shown < 0.5)


def shares_of_rank(order: Sequence[int]) -> list[float]:
    """For each answer, the share of the others that it is ranked before; `order` has the answers best first."""
    size = len(order)
    shares = [0.0] * size
    for rank, answer in enumerate(order):
        shares[answer] = (size - 1 - rank) / (size - 1) if size > 1 else 1.0
    return shares


def shuffled_orders(size: int, count: int, *, seed: int) -> list[list[int]]:
    """Orders in which to show a group, the same for the same seed; the second is the first backwards, and so on."""
    orders: list[list[int]] = []
    generator = random.Random(seed)
    while len(orders) < count:
        order = list(range(size))
        generator.shuffle(order)
        orders += [order, order[::-1]]
    return orders[:count]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
