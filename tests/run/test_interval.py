"""Wilson's interval against values worked out elsewhere, and its properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.run.metrics import wilson_95


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_known_values(right: int, total: int, low: float, high: float) -> None:
    assert wilson_95(right, total) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_it_holds_the_share_and_is_its_own_mirror(case: tuple[int, int]) -> None:
    right, total = case
    low, high = wilson_95(right, total)
    assert 0 <= low <= right / total <= high <= 1
    mirrored = wilson_95(total - right, total)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high))
    wide, narrow = wilson_95(right, total), wilson_95(4 * right, 4 * total)
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_what_is_no_share_is_refused() -> None:
    for right, total in ((1, 0), (3, 2), (-1, 4)):
        with pytest.raises(ValueError, match="a share needs"):
            wilson_95(right, total)
