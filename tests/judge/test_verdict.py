"""Reading a verdict: what is read, and the reason for what is not; scores from pairs and rankings."""

import math
import re
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig
from ycore.judge.declaration import Judge, judge_of
from ycore.judge.verdict import (
    Reply,
    ReplyToken,
    Unreadable,
    follows_position,
    read_ranking,
    read_value,
    ring_pairs,
    shares_of_rank,
    shuffled_orders,
    win_share,
)


def make_judge(kind: str, **verdict: object) -> Judge:
    mode = "groupwise" if kind == "ranking" else "pointwise"
    return judge_of(
        RewardConfig(
            reward="judge:test", args={"verdict": {"kind": kind, **verdict}, "mode": mode}
        )
    )


CODE = "c0de"  # of the question

SCORE = make_judge("score")
JSON = make_judge("json")
YES_NO = make_judge("labels", labels={"yes": 1.0, "no": 0.0})
RANKING = make_judge("ranking")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<score-c0de>7</score-c0de>", 7.0),
        ("It is fine.\n<score-c0de> 7.5 </score-c0de>\n", 7.5),
        ("<think>Is it 3? <score-c0de>3</score-c0de></think> <score-c0de>8</score-c0de>", 8.0),
        ("Is it 3? It is 8.</think><score-c0de>8</score-c0de>", 8.0),
        ("3 < 4, and <b>bold</b>: <score-c0de>0</score-c0de>", 0.0),
        ("\u8fd9\u662f\u5bf9\u7684 <score-c0de>10</score-c0de>", 10.0),
        ("**<score-c0de>7/10</score-c0de>**", 7.0),
        ("<score-c0de> 7.5 / 10 </score-c0de>", 7.5),
        ("<score-c0de>7 out of 10</score-c0de>", 7.0),
        ("<score-c0de>**7**</score-c0de>", 7.0),
        ("<score-c0de>`7`</score-c0de>", 7.0),
        (
            "<thinking>Is it <score-c0de>3</score-c0de>?</thinking><score-c0de>8</score-c0de>",
            8.0,
        ),
    ],
)
def test_a_score_is_read_wherever_it_stands(text: str, value: float) -> None:
    assert read_value(SCORE, Reply(text), code=CODE) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "nothing"),
        ("Good.", "no verdict"),
        ("7", "no verdict"),
        ("<score-c0de>7", "not whole"),
        ("<score-c0de>7</score-c0de> or <score-c0de>7</score-c0de>", "more than one"),
        (
            "<score-c0de>7</score-c0de> not <sc\u043ere-c0de>8</sc\u043ere-c0de>",
            "more than one",
        ),
        ("<score>7</score>", "lacks the code"),
        ("<score-0de1>7</score-0de1>", "lacks the code"),
        ("<score-c0de>7</score>", "not whole"),
        ("<score>7</score> c0de", "not whole"),
        ("<score-c0de>seven</score-c0de>", "not a number"),
        ("<score-c0de>\u0667</score-c0de>", "not a number"),
        ("<score-c0de>7/5</score-c0de>", "not a number"),
        ("<score-c0de>7/100</score-c0de>", "not a number"),
        ("<score-c0de>7/10/10</score-c0de>", "not a number"),
        ("<score-c0de>7 or 8</score-c0de>", "not a number"),
        ("<score-c0de>11/10</score-c0de>", "range"),
        ("<score-c0de>10.1</score-c0de>", "range"),
        ("<score-c0de>-1</score-c0de>", "range"),
        ("<think>it is <score-c0de>7</score-c0de>", "no end"),
        ("it is <think>hm</think><score-c0de>7</score-c0de>", "no end"),
        ("<thinking>it is <score-c0de>7</score-c0de>", "no end"),
        (
            "<think>3</think><score-c0de>3</score-c0de></think><score-c0de>8</score-c0de>",
            "more than once",
        ),
        ("<score-c0de>3</score-c0de> of </think><score-c0de>8</score-c0de>", "more than one"),
        ("x" * 300_000, "too much"),
    ],
)
def test_what_is_no_score_says_why(text: str, problem: str) -> None:
    with pytest.raises(Unreadable, match=problem):
        read_value(SCORE, Reply(text), code=CODE)


@pytest.mark.parametrize(
    "text",
    [
        '{"score": 7, "code": "c0de"}',
        ' {"code": "c0de", "score": 7.0}\n',
        '```json\n{"score": 7, "code": "c0de"}\n```',
    ],
)
def test_a_json_field_is_read(text: str) -> None:
    assert read_value(JSON, Reply(text), code=CODE) == 7.0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("7", "object"),
        ("[7]", "object"),
        ("{}", "object"),
        ('{"score": 7}', "object"),
        ('{"score": 7, "why": ""}', "object"),
        ('{"score": 7, "code": "c0de", "why": ""}', "object"),
        ('{"score": 7, "code": "0de1"}', "lacks the code"),
        ('{"score": 7, "code": ["c0de"]}', "lacks the code"),
        ('{"score": "7", "code": "c0de"}', "number"),
        ('{"score": false, "code": "c0de"}', "number"),
        ('{"score": NaN, "code": "c0de"}', "not JSON"),
        ('{"score": 1, "code": "c0de", "score": 9}', "not JSON"),
        ('{"score": 1e400, "code": "c0de"}', "range"),
        ('{"score": 11, "code": "c0de"}', "range"),
        ('{"score": 7, "code": "c0de"', "not JSON"),
        ('{"score": 7, "code": "c0de"} ok', "not JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_what_is_no_json_verdict_says_why(text: str, problem: str) -> None:
    with pytest.raises(Unreadable, match=problem):
        read_value(JSON, Reply(text), code=CODE)


def labelled(likeliest: Mapping[str, float], *, label: str = "yes", code: str = CODE) -> Reply:
    """A reply of several tokens; `likeliest` are those where the label begins."""
    pieces = [
        '{"',
        "code",
        '":',
        ' "',
        code,
        '",',
        ' "',
        "label",
        '":',
        ' "',
        label,
        '"}',
        "<|im_end|>",
    ]
    tokens = [
        ReplyToken(piece, likeliest if n == 10 else {piece: 0.0})
        for n, piece in enumerate(pieces)
    ]
    return Reply("".join(pieces[:-1]), tokens=tokens)


def test_labels_are_weighed_by_their_probabilities() -> None:
    tokens = {
        "Yes": math.log(0.3),
        " yes": math.log(0.1),
        "No": math.log(0.1),
        "The": math.log(0.5),
    }
    assert read_value(YES_NO, labelled(tokens), code=CODE) == pytest.approx(0.8)


def test_a_token_that_begins_a_label_counts_for_it() -> None:
    judge = make_judge("labels", labels={"excellent": 1, "poor": -1})
    tokens = {
        "exc": math.log(0.75),
        "p": math.log(0.125),
        'poor"': math.log(0.125),
        'p"': math.log(0.5),
    }
    assert read_value(judge, labelled(tokens, label="excellent"), code=CODE) == pytest.approx(
        0.5
    )


@pytest.mark.parametrize(
    ("pieces", "likeliest"),
    [
        (['{"code":"c0de","label":"', "yes", '"}'], {"yes": -0.1, "no": -3.0}),
        (
            ['{\n  "code": "c0de",\n  "label": ', '"yes', '"\n}'],
            {'"yes': -0.1, '"no': -3.0, "yes": -1.0, '"': -1.0},
        ),
        (
            ["{", '"code', '":', '"c0', 'de",', '"label', '":"', "y", "es", '"}'],
            {"y": -0.1, "n": -3.0},
        ),
        (
            ["\u2581{", '"code":', '\u2581"c0de",', '\u0120"label":', '\u0120"', "yes", '"}'],
            {"yes": -0.1, "no": -3.0},
        ),
        (
            ['{"code": "c0de", "label": "', "", " ", " yes", '"}'],
            {" yes": -0.1, "\u0120no": -3.0},
        ),
    ],
)
def test_the_token_where_the_label_begins_is_found(
    pieces: list[str], likeliest: dict[str, float]
) -> None:
    """However the tokenizer cuts the reply, and whether or not it shows its spaces; only that token's counts."""
    text = '{"code": "c0de", "label": "yes"}' if "\u2581{" in pieces else "".join(pieces)
    at = next(n for n, piece in enumerate(pieces) if re.fullmatch('[ "]*y(es)?', piece))
    tokens = [
        ReplyToken(piece, likeliest if n == at else {"no": 0.0})
        for n, piece in enumerate(pieces)
    ]
    wanted = math.exp(-0.1) / (math.exp(-0.1) + math.exp(-3.0))
    assert read_value(YES_NO, Reply(text, tokens=tokens), code=CODE) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "tokens",
    [
        {},
        {"The": -0.1},
        {"yes": -9.0},
        {"\u0443es": -0.1},
        {"yesterday": -0.1},
        {" ": -0.1},
        {"yes": math.nan},
    ],
)
def test_no_probability_on_the_labels_is_no_verdict(tokens: dict[str, float]) -> None:
    with pytest.raises(Unreadable, match="none of the labels"):
        read_value(YES_NO, labelled(tokens), code=CODE)


CERTAIN = {"yes": 0.0}


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply('{"code": "c0de", "label": "yes"}'), "no log-probabilities"),
        (labelled(CERTAIN, code="0de1"), "lacks the code"),
        (labelled(CERTAIN, code=""), "lacks the code"),
        (labelled(CERTAIN, label="yes and no"), "none of the labels"),
        (labelled(CERTAIN, label=""), "none of the labels"),
        (labelled(CERTAIN)._replace(text='{"code": "c0de", "label": "no"}'), "not those of its text"),
        (labelled(CERTAIN)._replace(tokens=labelled(CERTAIN).tokens[:10]), "not those of its text"),
        *(
            (labelled(CERTAIN)._replace(text=text), "not a JSON object with code and label")
            for text in ("", "yes", '{"code": "c0de", "label": "yes"', '{"label": "yes", "code": "c0de"}', "c0de yes",
                         'It is {"code": "c0de", "label": "yes"}', '{"code": "c0de", "code": "c0de", "label": "yes"}',
                         '{"code": "c0de", "label": "no", "label": "yes"}',
                         '{"code": "\\u0063\\u0030de", "label": "yes"}',
                         '{"code": "c0de", "label": "yes"}' + " " * 300_000, "{" + '"code":' * 20_000)
        ),
    ],
)  # fmt: skip
def test_what_is_no_label_says_why(reply: Reply, problem: str) -> None:
    with pytest.raises(Unreadable, match=problem):
        read_value(YES_NO, reply, code=CODE)


@pytest.mark.parametrize(
    "text",
    [
        "<ranking-c0de>2, 3, 1</ranking-c0de>",
        "<ranking-c0de>2 > 3 > 1</ranking-c0de>",
        "<ranking-c0de>2 3 1</ranking-c0de>",
    ],
)
def test_a_ranking_is_read(text: str) -> None:
    assert read_ranking(RANKING, Reply(text), code=CODE, count=3) == [1, 2, 0]


@pytest.mark.parametrize(
    "inside",
    ["", "1, 2", "1, 2, 2", "1, 2, 3, 4", "0, 1, 2", "A, B, C", "1; 2; 3", "1,2,3 1,2,3"],
)
def test_a_ranking_has_every_answer_once(inside: str) -> None:
    with pytest.raises(Unreadable):
        read_ranking(
            RANKING, Reply(f"<ranking-c0de>{inside}</ranking-c0de>"), code=CODE, count=3
        )


@given(st.text() | st.text(alphabet='<>/score-c0de 123456789.\n\u043e\uff1c{}":'))
def test_whatever_is_written_the_verdict_is_in_range_or_not_read(text: str) -> None:
    for judge in (SCORE, JSON):
        try:
            value = read_value(judge, Reply(text), code=CODE)
        except Unreadable:
            continue
        assert 0 <= value <= 10
        assert 0 <= judge.fraction(value) <= 1


@given(
    st.floats(0, 10),
    st.text(
        alphabet=st.characters(exclude_characters="<>\uff1c\uff1e", categories=["L", "N", "P"])
    ),
)
def test_a_verdict_is_found_in_any_words_without_brackets(value: float, words: str) -> None:
    text = f"{words} <score-c0de>{value:.3f}</score-c0de> {words}"
    assert read_value(SCORE, Reply(text), code=CODE) == pytest.approx(value, abs=1e-3)


@given(
    st.dictionaries(
        st.sampled_from(["yes", "Yes", " no", "No", "maybe", "\u043do"]), st.floats(-20, 0)
    )
)
def test_a_label_verdict_lies_between_its_labels(tokens: dict[str, float]) -> None:
    try:
        assert 0 <= read_value(YES_NO, labelled(tokens), code=CODE) <= 1
    except Unreadable:
        assert (
            sum(
                math.exp(p)
                for token, p in tokens.items()
                if token.strip().casefold() in ("yes", "no")
            )
            < 0.1 + 1e-9
        )


# -- pairs and rankings ------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 12))
def test_everybody_meets_as_many_others_and_nobody_twice(size: int, opponents: int) -> None:
    pairs = ring_pairs(size, opponents)
    assert len(set(pairs)) == len(pairs) and all(first < second for first, second in pairs)
    meetings = {sum(index in pair for pair in pairs) for index in range(size)}
    assert meetings == {min(2 * opponents, size - 1)}


def test_pairs_of_small_groups() -> None:
    assert ring_pairs(1, 3) == []
    assert ring_pairs(2, 3) == [(0, 1)]
    assert ring_pairs(4, 1) == [(0, 1), (1, 2), (2, 3), (0, 3)]


@given(st.floats(0, 1), st.floats(0, 1))
def test_one_wins_what_the_other_loses(first: float, second: float) -> None:
    assert win_share(first, second) == pytest.approx(1 - win_share(second, first))
    assert 0 <= win_share(first, second) <= 1


def test_a_judge_that_always_likes_the_first_prefers_nobody_and_is_found() -> None:
    assert win_share(0.9, 0.9) == pytest.approx(0.5)
    assert follows_position(0.9, 0.8) and follows_position(0.1, 0.2)
    assert not follows_position(0.9, 0.1) and not follows_position(0.5, 0.9)


@given(st.permutations(range(6)))
def test_ranks_become_shares(order: list[int]) -> None:
    shares = shares_of_rank(order)
    assert sorted(range(6), key=lambda answer: -shares[answer]) == order
    assert sorted(shares) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


def test_one_alone_has_the_whole_share() -> None:
    assert shares_of_rank([0]) == [1.0]


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_orders_are_permutations_and_the_second_is_the_first_backwards(
    size: int, count: int, seed: int
) -> None:
    orders = shuffled_orders(size, count, seed=seed)
    assert len(orders) == count and all(sorted(order) == list(range(size)) for order in orders)
    assert orders == shuffled_orders(size, count, seed=seed)
    assert count < 2 or orders[1] == orders[0][::-1]
