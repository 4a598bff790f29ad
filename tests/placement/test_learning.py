"""What placement learns from round to round, how far it trusts forecasts, and that a checkpoint keeps it."""

import json
from collections.abc import Mapping

import pytest
from simulator.simulation import Demand, Lengths, Machine, Outcome, SimulatedRound, Workload

from ycore.placement.allocator import Allocator
from ycore.placement.learning import (
    AWAKE_FACTORS,
    DROP,
    EXCLUSIVE_FACTORS,
    KEEP,
    Calibration,
    SleepLevels,
)
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT, Mode, SlotPool, parse_placement

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.012, 0.001)
MACHINE = Machine(dict.fromkeys(ROLES, SPEED), dict.fromkeys(ROLES, 3.0))
APART = 1000


def allocator(words: str = "dynamic", num_slots: int = 4) -> Allocator:
    capacity = dict.fromkeys(ROLES, 64)
    return Allocator(
        SlotPool(num_slots, ROLES, capacity, exclusive=True, swap_s=1.0), parse_placement(words)
    )


def play(one: Allocator, number: int) -> Outcome:
    """Rounds that drift, so that the division has to follow; some groups cannot teach."""
    work = Workload(
        Lengths(100 + 60 * number, 0.8, 2000), {JUDGE: 250.0}, group_size=4, teach_share=0.7
    )
    outcome = SimulatedRound(
        [one], MACHINE, work.group_at, Demand(12, dynamic=True), position=APART * number
    ).run()
    one.learn(one.measurements())
    return outcome


@pytest.mark.parametrize("words", ["dynamic", "split:3:1", "colocated"])
def test_a_run_that_goes_on_places_as_it_would_have(words: str) -> None:
    first = allocator(words)
    for number in range(4):
        play(first, number)
    second = allocator(words)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() and second.loads == first.loads
    for number in range(4, 10):
        assert play(first, number).usage == play(second, number).usage
    assert second.state() == first.state()


def test_without_what_was_learned_it_would_not() -> None:
    """So the test above looks at something."""
    first, second = allocator(), allocator()
    for number in range(4):
        play(first, number)
    assert play(first, 4).usage != play(second, 4).usage


def test_other_slots_than_then_keep_their_own_division() -> None:
    first, second = allocator(num_slots=4), allocator(num_slots=3)
    play(first, 0)
    second.restore(first.state())
    assert sum(second.division.values()) == 3 and second.loads == first.loads
    assert sum(play(second, 1).usage.busy_s) > 0


def test_moves_that_are_never_needed_cost_nothing() -> None:
    """A round of which nothing is known begins with all slots for rollouts; the next with judges of their own."""
    one = allocator()
    play(one, 0)
    assert one.division[JUDGE] >= 1


FIRST = EXCLUSIVE_FACTORS


@pytest.mark.parametrize("first", [EXCLUSIVE_FACTORS, AWAKE_FACTORS])
def test_before_anything_is_measured_the_factors_are_the_first(
    first: Mapping[Mode, float],
) -> None:
    assert Calibration(first).factors == first


def test_a_mode_comes_to_what_was_measured_and_others_stay() -> None:
    calibration = Calibration()
    for _ in range(60):
        calibration.observe("divided", seconds=130.0, forecast_s=100.0)
    assert calibration.factors["divided"] == pytest.approx(1.3, abs=0.06)
    assert calibration.factors["phases"] == pytest.approx(FIRST["phases"])


def test_what_was_long_not_used_is_forgotten() -> None:
    calibration = Calibration()
    for _ in range(3):
        calibration.observe("phases", seconds=150.0, forecast_s=100.0)
    after = calibration.factors["phases"]
    for _ in range(200):
        calibration.observe("divided", seconds=100.0, forecast_s=100.0)
    assert after > FIRST["phases"] + 0.1
    assert calibration.factors["phases"] == pytest.approx(FIRST["phases"], abs=0.01)


def test_one_disturbed_round_counts_for_little() -> None:
    calibration = Calibration()
    calibration.observe("divided", seconds=1e6, forecast_s=100.0)
    assert calibration.factors["divided"] <= 1.5


def test_a_frozen_model_tries_both_levels_and_keeps_the_cheaper() -> None:
    levels = SleepLevels()
    assert levels.choose() == KEEP
    levels.observe(KEEP, 12.8)
    assert levels.choose() == DROP
    levels.observe(DROP, 6.8)
    assert levels.choose() == DROP
    for _ in range(5):
        levels.observe(DROP, 20.0)
    assert levels.choose() == KEEP
