import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.rewards import builtin as agreement


def similarity(prompts: list[str], texts: list[str], *, n: int = 1) -> list[float | None]:
    return agreement.similarity([*prompts], [*texts], n=n)


def test_by_hand() -> None:
    """Pairs: (a b, a b) = 1; (a b, b c) shares one of two words on either side, so 2 * 1 / 4 = 0.5."""
    assert similarity([""] * 3, ["a b", "A b", "b c"]) == [0.75, 0.75, 0.5]


def test_word_order_counts_from_two_words_on() -> None:
    assert similarity([""] * 2, ["a b c", "c b a"]) == [1.0, 1.0]
    assert similarity([""] * 2, ["a b c", "c b a"], n=2) == [0.0, 0.0]
    assert similarity([""] * 2, ["7", "7"], n=2) == [1.0, 1.0], "an answer shorter than n words is one gram"


def test_only_the_answers_are_compared() -> None:
    given = ["<think>one way</think> 7", "<think>quite another</think> 7"]
    assert similarity([""] * 2, given) == [1.0, 1.0]
    assert similarity([""] * 2, ["<think>never ends", "7"]) == [0.0, 0.0]


def test_one_alone_has_nothing_to_agree_with() -> None:
    assert similarity([""], ["7"]) == [None]


def test_n_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="n must be 1 or more: 0"):
        similarity([""] * 2, ["a", "b"], n=0)


@given(st.lists(st.text("ab ", max_size=8), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_it_follows_its_completion_through_any_order(texts: list[str], chance: random.Random) -> None:
    order = list(range(len(texts)))
    chance.shuffle(order)
    straight = similarity([""] * len(texts), texts)
    shuffled = similarity([""] * len(texts), [texts[index] for index in order])
    assert shuffled == pytest.approx([straight[index] for index in order])
    assert all(value is not None and 0 <= value <= 1 for value in straight)
