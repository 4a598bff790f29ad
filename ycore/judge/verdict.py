"""The number in a judge's reply, or the reason why there is none; and scores from pairs and rankings.

Reading is strict: a doubtful verdict is never a reward. A verdict appears once, in plain ASCII, within its range, with
the code of its question. A text with two verdicts, or with one that only looks like a tag, is not read at all: it may
quote what is judged.
"""

import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ycore.foreign import ForeignRefused, foreign_json
from ycore.judge.declaration import (
    JsonVerdict,
    Judge,
    LabelVerdict,
    RankingVerdict,
    ScoreVerdict,
)
from ycore.judge.question import fold_lookalikes

_NUMBER = r"[+-]?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_RANKING = r"\s*[0-9]{1,3}(?:\s*[,>]\s*[0-9]{1,3}|\s+[0-9]{1,3})*\s*"
_MAX_LENGTH = 200_000  # characters
_LABELLED = r'(?a)\s*\{\s*"code"\s*:\s*"(?P<code>[^"\\]*)"\s*,\s*"label"\s*:\s*"(?P<label>[^"\\]*)"\s*\}\s*'
_SPACES = (
    "[\\s\u0120\u010a\u2581]+"  # also as byte-level and SentencePiece tokenizers write them
)


class Unreadable(ValueError):
    """There is no verdict, or more than one; like cases have the same short message, so that they can be counted."""


class ReplyToken(NamedTuple):
    text: str
    likeliest: Mapping[
        str, float
    ]  # the log-probability of every likely token in its place, by its text


class Reply(NamedTuple):
    text: str  # what a judge wrote in its own turn, and nothing else
    tokens: Sequence[ReplyToken] | None = None  # of the text, for labels
    num_tokens: int = 0  # of question and reply


def read_value(judge: Judge, reply: Reply, *, code: str) -> float:
    """Any verdict but a ranking, from its min to its max; Unreadable, with the reason, where there is none.

    `code` is that of the question (`verdict_code`): only who read the question's own words, and not only what is
    judged, can write it.
    """
    match judge.verdict:
        case LabelVerdict() as verdict:
            return _mean_label(verdict, reply, code)
        case ScoreVerdict() as verdict:
            inside = _only_tag(_without_thinking(judge, reply), verdict.tag, code)
            number = rf"[\s*`]*({_NUMBER})(?:\s*(?:/|out of)\s*{verdict.max:g})?[\s*`]*"
            match = re.fullmatch(number, inside, re.ASCII)
            if match is None:
                raise Unreadable("its verdict is not a number")
            value = float(match[1])
        case JsonVerdict() as verdict:
            value = _json_number(_without_thinking(judge, reply), verdict, code)
        case RankingVerdict():
            raise TypeError("a ranking is read by read_ranking")
    if not verdict.min <= value <= verdict.max:
        raise Unreadable("out of range")
    return value


def read_ranking(judge: Judge, reply: Reply, *, code: str, count: int) -> list[int]:
    """The places in the question of `count` answers, from 0, best first; Unreadable, with the reason.

    `code` as in `read_value`.
    """
    verdict = judge.verdict
    assert isinstance(verdict, RankingVerdict)
    inside = _only_tag(_without_thinking(judge, reply), verdict.tag, code)
    if not re.fullmatch(_RANKING, inside, re.ASCII):
        raise Unreadable("its ranking is no list of numbers")
    numbers = [int(number) for number in re.findall(r"[0-9]+", inside)]
    if sorted(numbers) != list(range(1, count + 1)):
        raise Unreadable("its ranking does not have every answer once")
    return [number - 1 for number in numbers]


def _without_thinking(judge: Judge, reply: Reply) -> str:
    """The part of the reply in which a verdict counts."""
    text = reply.text
    if len(text) > _MAX_LENGTH:
        raise Unreadable("it wrote too much")
    if judge.strip_thinking:
        text = _after_thinking(text, judge)
    if not text.strip():
        raise Unreadable("it wrote nothing")
    return text


def _after_thinking(text: str, judge: Judge) -> str:
    """Return the text after the only `</think>`.

    Some chat templates open the thinking themselves. Where no `<think>` opens the text, nothing before `</think>` may
    look like a verdict: a quoted `</think>` would otherwise hide the judge's own.
    """
    before, end, after = text.replace("thinking>", "think>").partition("</think>")
    folded_before = fold_lookalikes(before)
    folded_after = fold_lookalikes(after)
    if "</think" in folded_after:
        raise Unreadable("its thinking ends more than once")
    opened = before.lstrip().startswith("<think>")
    if (
        folded_before.count("<think") > opened
        or "<think" in folded_after
        or (opened and not end)
    ):
        raise Unreadable("its thinking has no end")
    if end and not opened and _looks_like_a_verdict(folded_before, judge):
        raise Unreadable("more than one verdict, or one that is not whole")
    return after if end else before


def _looks_like_a_verdict(folded: str, judge: Judge) -> bool:
    match judge.verdict:
        case ScoreVerdict(tag=tag) | RankingVerdict(tag=tag):
            return re.search(rf"<[\s/\\]*{tag}", folded) is not None
        case JsonVerdict(field=name):
            return f'"{name}"' in folded
        case LabelVerdict():
            return False


def _only_tag(text: str, tag: str, code: str) -> str:
    verdicts = re.findall(rf"<{tag}-{code}>([^<]{{0,400}})</{tag}-{code}>", text)
    lookalikes = re.findall(rf"<[\s/\\]*{tag}", fold_lookalikes(text))
    if not lookalikes:
        raise Unreadable("no verdict")
    if code not in text:
        raise Unreadable("its verdict lacks the code")
    if len(verdicts) != 1 or len(lookalikes) != 2:
        raise Unreadable("more than one verdict, or one that is not whole")
    return str(verdicts[0])


def _json_number(text: str, verdict: JsonVerdict, code: str) -> float:
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].removeprefix("json")
    try:
        parsed = foreign_json(text, strict=True)
    except ForeignRefused:
        raise Unreadable("not JSON") from None
    expected = {verdict.field, "code", *(["reason"] if verdict.reason else [])}
    if not isinstance(parsed, dict) or parsed.keys() != expected:
        raise Unreadable(f"not a JSON object with {' and '.join(sorted(expected))}")
    if parsed["code"] != code:
        raise Unreadable("its verdict lacks the code")
    value = parsed[verdict.field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable("its verdict is not a number")
    return float(value) if abs(value) < 1e12 else math.inf


def _mean_label(verdict: LabelVerdict, reply: Reply, code: str) -> float:
    """The labels' mean value, weighted by probability; a token counts for a label if it begins that label only."""
    if not reply.tokens:
        raise Unreadable("no log-probabilities")
    match = re.fullmatch(_LABELLED, reply.text[: _MAX_LENGTH + 1])
    if match is None or len(reply.text) > _MAX_LENGTH:
        raise Unreadable("not a JSON object with code and label")
    if match["code"] != code:
        raise Unreadable("its verdict lacks the code")
    names = {label: _without_spaces(label).casefold() for label in verdict.labels}
    if _without_spaces(match["label"]).casefold() not in names.values():
        raise Unreadable("none of the labels")
    before, likeliest = _token_at(reply.tokens, reply.text, match.start("label"))
    mass = dict.fromkeys(verdict.labels, 0.0)
    for token, logprob in likeliest.items():
        word = _without_spaces(token)
        start, ended, _ = word.removeprefix(before).casefold().partition('"')
        if not start or not word.startswith(before) or not math.isfinite(logprob):
            continue
        begun = [
            label
            for label, name in names.items()
            if (name == start if ended else name.startswith(start))
        ]
        if len(begun) == 1:
            mass[begun[0]] += math.exp(min(0.0, logprob))
    total = sum(mass.values())
    if total < verdict.min_mass:
        raise Unreadable("none of the labels")
    return sum(mass[label] * value for label, value in verdict.labels.items()) / total


def _token_at(
    tokens: Sequence[ReplyToken], text: str, place: int
) -> tuple[str, Mapping[str, float]]:
    """The token that holds the first letter at or after `place`: what of it stands before, and the likeliest tokens.

    Spaces are left out: some tokenizers drop them where a token is decoded alone.
    """
    whole = _without_spaces(text)
    start = len(_without_spaces(text[:place]))
    done = 0
    for token in tokens:
        piece = _without_spaces(token.text)
        if not whole.startswith(piece, done):
            break
        if done + len(piece) > start:
            return whole[done:start], token.likeliest
        done += len(piece)
    raise Unreadable("its log-probabilities are not those of its text")


def _without_spaces(text: str) -> str:
    return re.sub(_SPACES, "", text)


def ring_pairs(size: int, opponents: int) -> list[tuple[int, int]]:
    """The pairs of a ring in which each of a group meets the next `opponents`: `(4, 1)` gives 01, 12, 23 and 03."""
    pairs: dict[tuple[int, int], None] = {}
    for distance in range(1, min(opponents, size // 2) + 1):
        for index in range(size):
            other = (index + distance) % size
            pairs[min(index, other), max(index, other)] = None
    return list(pairs)


def win_share(first_shown: float, second_shown: float) -> float:
    """How far one answer beats another, from 0 to 1, by the verdicts of both orders.

    Args:
        first_shown: How much better the first place is, from 0 to 1, with this answer there.
        second_shown: The same with this answer in the second place.
    """
    return (first_shown + 1.0 - second_shown) / 2


def follows_position(first_shown: float, second_shown: float) -> bool:
    """Whether the same position won in both orders; arguments as `win_share`."""
    return min(first_shown, second_shown) > 0.5 or max(first_shown, second_shown) < 0.5


def shares_of_rank(order: Sequence[int]) -> list[float]:
    """For each answer, the share of the others that it is ranked before; `order` is of answers' indices, best first."""
    last = max(1, len(order) - 1)
    return [(last - order.index(answer)) / last for answer in range(len(order))]


def shuffled_orders(size: int, count: int, *, seed: int) -> list[list[int]]:
    """`count` orders in which to show a group of `size`; every second one is the one before it backwards."""
    orders: list[list[int]] = []
    generator = random.Random(seed)
    while len(orders) < count:
        order = list(range(size))
        generator.shuffle(order)
        orders += [order, order[::-1]]
    return orders[:count]
