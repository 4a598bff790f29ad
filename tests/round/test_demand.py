"""How many groups are started: never more than the cap, enough for what is missing, none when nothing is."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.round.sampling import LEAST, AcceptanceRate, num_to_draw

COUNTS = st.integers(0, 500)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.integers(1, 8), st.floats(LEAST, 1.0))
def test_bounds(
    need: int, kept: int, in_flight: int, drawn: int, tries: int, rate: float
) -> None:
    wanted = num_to_draw(
        need=need,
        kept=kept,
        in_flight=in_flight,
        drawn=drawn,
        max_draws=need * tries,
        rate=rate,
    )
    assert wanted >= 0
    assert drawn + wanted <= max(drawn, need * tries)
    if kept >= need:
        assert wanted == 0
    elif wanted:
        expected = (in_flight + wanted) * rate
        assert expected < need - kept + rate  # no group more than is expected to be needed
        if drawn + wanted < need * tries:
            assert expected >= need - kept - 1e-6  # and none less, but for the cap


def test_at_a_yield_of_a_third_three_times_are_drawn() -> None:
    assert num_to_draw(need=8, kept=0, in_flight=0, drawn=0, max_draws=32, rate=1 / 3) == 24
    assert num_to_draw(need=8, kept=8, in_flight=0, drawn=24, max_draws=32, rate=1 / 3) == 0
    assert num_to_draw(need=8, kept=4, in_flight=0, drawn=24, max_draws=32, rate=1 / 3) == 8


@pytest.mark.parametrize("rate", [1.0, 0.6, 0.25])
def test_the_yield_follows_what_is_seen(rate: float) -> None:
    dice, seen = random.Random(0), AcceptanceRate()
    assert seen.rate == 1.0
    for _ in range(400):
        seen.observe(taught=dice.random() < rate)
    assert math.isclose(seen.rate, rate, abs_tol=0.17)


def test_a_yield_of_nothing_still_asks_for_a_bounded_number() -> None:
    seen = AcceptanceRate()
    for _ in range(1000):
        seen.observe(taught=False)
    assert seen.rate == LEAST
    assert (
        num_to_draw(need=1, kept=0, in_flight=0, drawn=0, max_draws=1000, rate=seen.rate) == 20
    )
