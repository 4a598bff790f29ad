"""A reward's process may answer anything: forged, malformed and oversized answers never become scores."""

import json
from typing import Any

import pytest

from ycore.rewards.worker_client import inputs_in, scores_in
from ycore.sandbox.confined_worker import CallFailed, reply_in
from ycore.types import Score

NONCE = "5f0c"


def line(**changed: Any) -> bytes:
    return json.dumps(
        {
            "nonce": NONCE,
            "values": [0.5, None],
            "problems": [None, None],
            "logged": [{}, {}],
            **changed,
        }
    ).encode()


def test_an_answer_in_its_shape_is_believed() -> None:
    assert scores_in(reply_in(line(), NONCE), count=2) == [Score(0.5), Score(None)]
    assert scores_in(reply_in(line(values=[1, None]), NONCE), count=2)[0] == Score(1.0)
    masked = scores_in(
        reply_in(line(problems=["not finite: inf\x1b[2J\n", None]), NONCE), count=2
    )[0]
    assert masked == Score(None, problem="not finite: inf?[2J")


def test_what_a_reward_logged_comes_in_plain_words() -> None:
    logged = [{"counted": 2, "why\x1b": "a\nb"}, {}]
    scores = scores_in(reply_in(line(logged=logged), NONCE), count=2)
    assert [score.logged for score in scores] == [{"counted": 2, "why?": "a b"}, {}]


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 3000,
        b"\xff{",
        b'{"nonce": "5f0c", "values": [NaN, 1.0], "problems": [null, null]}',
        b'{"nonce": "5f0c", "values": [Infinity, 1.0], "problems": [null, null]}',
        b'{"nonce": "5f0c", "nonce": "5f0c", "values": [1, 1], "problems": [null, null]}',
        b'{"id": 1, "values": [9.0, 9.0], "problems": [null, null]}',
        line(nonce="5f0d"),
        line(nonce=None),
        line(nonce="\ud800"),
        line(values=[1.0]),
        line(values=[1.0, 1.0, 1.0], problems=[None] * 3, logged=[{}] * 3),
        line(values={"0": 1.0, "1": 1.0}),
        line(values=["1.0", 1.0]),
        line(values=[True, 1.0]),
        line(values=[[1.0], 1.0]),
        line(problems=[1, None]),
        line(extra=1),
        line(logged=[{}]),
        line(logged=[{"a": []}, {}]),
        line(logged=["a", "b"]),
        line(logged=None),
        line(logged=[{"a": 1e999}, {}]),
        b'{"nonce": "5f0c", "values": [' + b"9" * 5000 + b', 1], "problems": [null, null]}',
    ],
)
def test_anything_else_masks_the_call(forged: bytes) -> None:
    with pytest.raises(CallFailed, match="no answer of a worker"):
        scores_in(reply_in(forged, NONCE), count=2)


def test_every_flip_of_one_bit_is_refused_or_still_two_numbers() -> None:
    whole = line()
    for at in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        try:
            scores = scores_in(reply_in(bytes(flipped), NONCE), count=2)
        except CallFailed:
            continue
        assert len(scores) == 2
        assert all(score.value is None or isinstance(score.value, float) for score in scores)


@pytest.mark.parametrize("value", [1e16, -1e300, 10**400])
def test_a_number_that_would_overflow_masks_its_item_alone(value: float) -> None:
    scores = scores_in(reply_in(line(values=[value, 1.0]), NONCE), count=2)
    assert (
        scores[0].value is None
        and scores[0].problem is not None
        and scores[0].problem.startswith("too large")
    )
    assert scores[1] == Score(1.0)


def test_a_range_that_the_recipe_gives_is_held_outside() -> None:
    scores = scores_in(
        reply_in(line(values=[1.5, 1.0]), NONCE), count=2, allowed_range=(0.0, 1.0)
    )
    assert scores == [
        Score(None, problem="out of range: 1.5 is not within 0 and 1"),
        Score(1.0),
    ]


def test_a_failure_beside_values_masks_the_call_too() -> None:
    with pytest.raises(CallFailed, match="raised"):
        scores_in(reply_in(line(failed="raised"), NONCE), count=2)


def test_a_failure_is_one_line_of_bounded_length() -> None:
    failed = json.dumps({"nonce": NONCE, "failed": "raised X: " + "y" * 9000}).encode()
    with pytest.raises(CallFailed) as caught:
        scores_in(reply_in(failed, NONCE), count=2)
    assert len(str(caught.value)) == 300


@pytest.mark.parametrize(
    "ready",
    [
        [],
        [1],
        [{"required": ["a"], "optional": [], "bound": []}],
        [{"required": "answer", "optional": [], "bound": [], "takes_any": False}],
        [{"required": [1], "optional": [], "bound": [], "takes_any": False}],
        [{"required": [], "optional": [], "bound": [], "takes_any": 1}],
    ],
)
def test_parameters_of_another_shape_are_refused(ready: Any) -> None:
    with pytest.raises(CallFailed, match="no answer of a worker"):
        inputs_in(ready, count=1)
