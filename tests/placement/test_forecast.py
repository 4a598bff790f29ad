"""The forecast of a round: arithmetic where that is simple, and what late verdicts cost."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.placement.forecast import COHORTS, forecast_s, late_cohorts, lengths
from ycore.placement.load import Load, Speed
from ycore.placement.moves import best_division
from ycore.placement.placement import ROLES, SlotPool

SPEED = Speed(0.012, 0.0006)


def load(num: float, size: float, *, late: float = 0.0, spread: float = 0.0) -> Load:
    return Load(num, size, spread * size, size * (1 + 2 * spread), SPEED, late)


def slots(num_slots: int, swap_s: float = 6.8) -> SlotPool:
    return SlotPool(num_slots, ROLES, dict.fromkeys(ROLES, 64), exclusive=True, swap_s=swap_s)


def test_a_forecast_is_the_arithmetic_where_that_is_simple() -> None:
    """All alike, one wave, no judge's work to speak of: the rollouts' time, and a verdict after it."""
    loads = {"rollout": load(64, 100), "judge": load(64, 1)}
    expected = 100 * SPEED.step_s(32) + 1 * SPEED.step_s(64)
    assert forecast_s(loads, {"rollout": 2, "judge": 1}, slots(3)) == pytest.approx(
        expected, rel=0.02
    )
    waits = forecast_s(loads, {"rollout": 3, "judge": 0}, slots(3, swap_s=100.0))
    assert waits > 100 * SPEED.step_s(64 / 3) + 100, "without a judge's slot a swap is paid"


def test_two_roles_at_once_on_a_slot_do_all_their_work_and_no_more() -> None:
    """Where every token costs the same whatever is beside it, a round is its tokens."""
    every_token = Speed(0.0, 0.001)
    loads = {
        "rollout": replace(load(12, 100, spread=0.5), speed=every_token),
        "judge": load(12, 50),
    }
    loads["judge"] = replace(loads["judge"], speed=every_token)
    seconds = forecast_s(loads, {"rollout": 1, "judge": 0}, slots(1), shared=True)
    assert seconds == pytest.approx(0.001 * 12 * (100 + 50))
    assert forecast_s(
        loads, {"rollout": 2, "judge": 0}, slots(2), shared=True
    ) == pytest.approx(seconds / 2, rel=0.2)


def test_late_verdicts_cost_more_where_prompts_wait_for_them() -> None:
    steady = {"rollout": load(512, 400), "judge": load(512, 200)}
    again = {"rollout": load(512, 400, late=100), "judge": load(512, 200)}
    all_roll = {"rollout": 8, "judge": 0}
    assert forecast_s(again, all_roll, slots(8)) > forecast_s(steady, all_roll, slots(8))
    assert best_division(again, slots(8))["judge"] >= 1


def test_few_late_prompts_are_seldom_brought_by_the_last_verdict() -> None:
    """One moment a round, in the middle or near the end; many moments, and all verdicts bring some."""
    once = replace(load(512, 400, late=8, spread=0.8), num_times_late=1.0)
    assert late_cohorts(once) == {COHORTS // 2}
    assert late_cohorts(replace(once, late_at=0.95)) == {COHORTS - 1}
    assert late_cohorts(replace(once, num_times_late=40.0)) == set(range(COHORTS))
    assert late_cohorts(load(512, 400)) == set()
    seconds = [
        forecast_s(
            {"rollout": late, "judge": load(512, 200)}, {"rollout": 4, "judge": 4}, slots(8)
        )
        for late in (once, replace(once, late_at=0.95))
    ]
    assert seconds[0] < seconds[1]


@given(st.floats(1, 5000), st.floats(0, 1.5))
def test_cohorts_have_the_loads_mean_and_longest(size: float, spread: float) -> None:
    drawn = lengths(load(100, size, spread=spread))
    assert len(drawn) == COHORTS and max(drawn) == pytest.approx(size * (1 + 2 * spread))
    assert sum(drawn) / COHORTS <= size * 1.2


def test_slots_that_have_written_help_a_judge_whose_queue_is_worth_the_swap() -> None:
    """Half of a long queue is taken over; where that is worth less than the swap, nothing moves."""
    every_token = Speed(0.0, 0.001)
    loads = {
        "rollout": replace(load(12, 100), speed=every_token),
        "judge": replace(load(12, 1000), speed=every_token),
    }
    pool = replace(slots(2, swap_s=0.5), capacity={"rollout": 12, "judge": 1})
    half = {"rollout": 1, "judge": 1}
    assert forecast_s(loads, half, pool) == pytest.approx(12.0, rel=0.12), (
        "twelve verdicts of a second, one by one"
    )
    helped = 1.2 + (12 + 0.5) / 2  # written, then twelve verdicts and a swap on two slots
    assert helped <= forecast_s(loads, half, pool, moves=True) <= helped + 1, (
        "to a whole verdict"
    )
    dear = replace(pool, swap_s=20.0)
    assert forecast_s(loads, half, dear, moves=True) == forecast_s(loads, half, dear)
