"""The closed form of pass@k against counting every subset."""

from itertools import combinations

import pytest

from ycore.run.metrics import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_the_share_of_subsets_that_hold_a_right_one(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            holding = sum(any(member < c for member in subset) for subset in subsets)
            assert pass_at_k(n, c, k) == pytest.approx(holding / len(subsets), abs=1e-12)


def test_many_completions_stay_exact() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)
    assert pass_at_k(2000, 0, 1000) == 0.0
    assert pass_at_k(2000, 1500, 501) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)
