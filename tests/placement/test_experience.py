"""Forecasts are believed as far as they held, and anew after a while."""

import json

import pytest

from ycore.placement.learning import ALL_UP, ONE_AWAKE, Assumed, Experience

FIRST = ONE_AWAKE.factors


@pytest.mark.parametrize("assumed", [ONE_AWAKE, ALL_UP])
def test_nothing_measured_is_as_assumed(assumed: Assumed) -> None:
    assert Experience(assumed).factors == pytest.approx(dict(assumed.factors))


def test_a_manner_comes_to_what_was_measured_and_others_stay() -> None:
    told = Experience()
    for _ in range(60):
        told.observe("divided", seconds=130.0, forecast_s=100.0)
    assert told.factors["divided"] == pytest.approx(1.3, abs=0.06)
    assert told.factors["phases"] == pytest.approx(FIRST["phases"])


def test_what_was_long_not_used_is_forgotten() -> None:
    told = Experience()
    for _ in range(3):
        told.observe("phases", seconds=150.0, forecast_s=100.0)
    after = told.factors["phases"]
    for _ in range(200):
        told.observe("divided", seconds=100.0, forecast_s=100.0)
    assert after > FIRST["phases"] + 0.1
    assert told.factors["phases"] == pytest.approx(FIRST["phases"], abs=0.01)


def test_one_disturbed_round_counts_for_little() -> None:
    told = Experience()
    told.observe("divided", seconds=1e6, forecast_s=100.0)
    assert told.factors["divided"] <= 1.5


def test_it_survives_json() -> None:
    told, again = Experience(), Experience()
    told.observe("together", seconds=1.1, forecast_s=0.7)
    again.restore(json.loads(json.dumps(told.state())))
    assert again == told


def test_what_was_written_before_a_manner_was_known_can_be_read() -> None:
    told = Experience()
    told.observe("together", seconds=1.1, forecast_s=0.7)
    old = told.state()
    del old["shared"]
    again = Experience()
    again.restore(old)
    assert again == told
