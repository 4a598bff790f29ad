"""The division that a step starts with: best by forecast, steady, and the same for all who know the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.division import divide, next_division, shares
from ycore.placement.forecast import COHORTS, Setting, forecast_s, lengths
from ycore.placement.load import Load, Speed

SPEED = Speed(0.012, 0.0006)


def load(num: float, size: float, *, late: float = 0.0, spread: float = 0.0) -> Load:
    return Load(num, size, spread * size, size * (1 + 2 * spread), SPEED, late)


def setting(num_slots: int, swap_s: float = 6.8) -> Setting:
    return Setting(num_slots, {"rollout": 64, "judge": 64, "reward_model": 64}, swap_s)


LOADS = st.fixed_dictionaries(
    {
        "rollout": st.builds(
            load, st.floats(1, 4000), st.floats(1, 4000), late=st.floats(0, 500), spread=st.floats(0, 1.5)
        ),
        "judge": st.builds(load, st.floats(1, 4000), st.floats(1, 4000)),
    }
)


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 40), st.floats(0, 20))
def test_constant_load_changes_the_division_once_at_most(loads: dict[str, Load], num_slots: int, swap_s: float) -> None:
    chosen = next_division(None, loads, setting(num_slots, swap_s))
    assert sum(chosen.values()) == num_slots and chosen["rollout"] >= 1 and min(chosen.values()) >= 0
    assert next_division(chosen, loads, setting(num_slots, swap_s)) == chosen
    elsewhere = divide(1, loads, setting(num_slots))
    second = next_division(elsewhere, loads, setting(num_slots, swap_s))
    assert next_division(second, loads, setting(num_slots, swap_s)) == second
    assert forecast_s(loads, second, setting(num_slots, swap_s)) <= forecast_s(
        loads, elsewhere, setting(num_slots, swap_s)
    )


def test_loads_that_waver_do_not_move_slots() -> None:
    now = next_division(None, {"rollout": load(512, 400), "judge": load(512, 200)}, setting(8))
    for sign in (1, -1, 1, -1, 1):
        wavering = {"rollout": load(512, 400 * (1 + 0.02 * sign)), "judge": load(512, 200 * (1 - 0.02 * sign))}
        assert next_division(now, wavering, setting(8)) == now


def test_more_to_judge_means_more_judges() -> None:
    judges = [
        next_division(None, {"rollout": load(512, 400), "judge": load(512, size)}, setting(8, 500.0))["judge"]
        for size in (20, 400, 4000)
    ]
    assert judges == sorted(judges) and judges[0] < judges[-1]


def test_a_forecast_is_the_arithmetic_where_that_is_simple() -> None:
    """All alike, one wave, no judge's work to speak of: the rollouts' time, and a verdict after it."""
    loads = {"rollout": load(64, 100), "judge": load(64, 1)}
    expected = 100 * SPEED.step_s(32) + 1 * SPEED.step_s(64)
    assert forecast_s(loads, {"rollout": 2, "judge": 1}, setting(3)) == pytest.approx(expected, rel=0.02)
    waits = forecast_s(loads, {"rollout": 3, "judge": 0}, setting(3, swap_s=100.0))
    assert waits > 100 * SPEED.step_s(64 / 3) + 100, "without a judge's slot a swap is paid"


def test_late_verdicts_cost_more_where_prompts_wait_for_them() -> None:
    steady = {"rollout": load(512, 400), "judge": load(512, 200)}
    again = {"rollout": load(512, 400, late=100), "judge": load(512, 200)}
    all_roll = {"rollout": 8, "judge": 0}
    assert forecast_s(again, all_roll, setting(8)) > forecast_s(steady, all_roll, setting(8))
    assert next_division(None, again, setting(8))["judge"] >= 1


@given(st.floats(1, 5000), st.floats(0, 1.5))
def test_cohorts_have_the_loads_mean_and_longest(size: float, spread: float) -> None:
    drawn = lengths(load(100, size, spread=spread))
    assert len(drawn) == COHORTS and max(drawn) == pytest.approx(size * (1 + 2 * spread))
    assert sum(drawn) / COHORTS <= size * 1.2


def test_shares_are_whole_and_complete() -> None:
    assert shares({"judge": 2.0, "reward_model": 1.0}, 6) == {"judge": 4, "reward_model": 2}
    assert shares({"judge": 1.0, "reward_model": 1.0}, 3) == {"judge": 2, "reward_model": 1}
    assert shares({"judge": 1.0, "reward_model": 0.0}, 4) == {"judge": 4, "reward_model": 0}


def test_many_slots_are_divided_quickly_and_well() -> None:
    loads = {"rollout": load(16384, 400, spread=0.8), "judge": load(16384, 200)}
    chosen = next_division(None, loads, setting(512))
    best = min(forecast_s(loads, divide(rollout, loads, setting(512)), setting(512)) for rollout in range(1, 513, 16))
    assert forecast_s(loads, chosen, setting(512)) <= best * 1.001
