"""From comparisons to shares: symmetric, complete, between 0 and 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.judge.verdict import follows_position, mean, ring_pairs, shares_of_rank, shuffled_orders, win_share


@given(st.integers(1, 12), st.integers(1, 12))
def test_everybody_meets_as_many_others_and_nobody_twice(size: int, opponents: int) -> None:
    pairs = ring_pairs(size, opponents)
    assert len(set(pairs)) == len(pairs) and all(one < other for one, other in pairs)
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


def test_one_alone_and_none() -> None:
    assert shares_of_rank([0]) == [1.0]
    assert mean([]) is None


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 2**31))
def test_orders_are_permutations_and_the_second_is_the_first_backwards(size: int, count: int, seed: int) -> None:
    orders = shuffled_orders(size, count, seed=seed)
    assert len(orders) == count and all(sorted(order) == list(range(size)) for order in orders)
    assert orders == shuffled_orders(size, count, seed=seed)
    assert count < 2 or orders[1] == orders[0][::-1]
