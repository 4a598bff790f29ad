"""The division that a step starts with: best by forecast, steady, and the same for all who know the same."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.forecast import COHORTS, Setting, bringing, forecast_s, lengths
from ycore.placement.learning import ONE_AWAKE
from ycore.placement.load import Load, Speed
from ycore.placement.moves import AS_GOOD, best_division, divide, next_schedule, shares
from ycore.placement.placement import Schedule

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


def choose(
    current: Schedule | None, loads: dict[str, Load], where: Setting, factors: dict[str, float] | None = None
) -> Schedule:
    return next_schedule(current, loads, where, {**ONE_AWAKE.factors, **(factors or {})})  # type: ignore[dict-item]


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 40), st.floats(0, 20))
def test_constant_load_changes_the_plan_once_at_most(loads: dict[str, Load], num_slots: int, swap_s: float) -> None:
    where = setting(num_slots, swap_s)
    chosen = choose(None, loads, where)
    assert sum(chosen.division.values()) == num_slots
    assert chosen.division["rollout"] >= 1 and min(chosen.division.values()) >= 0
    assert choose(chosen, loads, where) == chosen
    elsewhere = Schedule(divide(1, loads, where), "divided")
    second = choose(elsewhere, loads, where)
    assert choose(second, loads, where) == second
    before_s, after_s = (
        ONE_AWAKE.factors[schedule.mode] * forecast_s(loads, schedule.division, where)
        for schedule in (elsewhere, second)
    )
    assert after_s <= before_s


def test_loads_that_waver_do_not_move_slots() -> None:
    now = choose(None, {"rollout": load(512, 400), "judge": load(512, 200)}, setting(8))
    for sign in (1, -1, 1, -1, 1):
        wavering = {"rollout": load(512, 400 * (1 + 0.02 * sign)), "judge": load(512, 200 * (1 - 0.02 * sign))}
        assert choose(now, wavering, setting(8)) == now


def test_more_to_judge_means_more_judges() -> None:
    judges = [
        best_division({"rollout": load(512, 400), "judge": load(512, size)}, setting(8, 500.0))["judge"]
        for size in (20, 400, 4000)
    ]
    assert judges == sorted(judges) and judges[0] < judges[-1]


def test_short_verdicts_share_the_slots_where_all_engines_stay_up() -> None:
    """A label's worth of judging is not worth a slot of its own, and a round that waits for it has idle slots."""
    loads = {"rollout": replace(load(80, 96), deviation=80, longest=512, num_late=24), "judge": load(80, 1)}
    one_awake = setting(2, 0.0)
    assert choose(None, loads, replace(one_awake, exclusive=False)).mode == "shared"
    assert choose(None, loads, one_awake).mode != "shared"


def test_two_roles_at_once_on_a_slot_do_all_their_work_and_no_more() -> None:
    """Where every token costs the same whatever is beside it, a round is its tokens."""
    every_token = Speed(0.0, 0.001)
    loads = {"rollout": replace(load(12, 100, spread=0.5), speed=every_token), "judge": load(12, 50)}
    loads["judge"] = replace(loads["judge"], speed=every_token)
    told = forecast_s(loads, {"rollout": 1, "judge": 0}, setting(1), shared=True)
    assert told == pytest.approx(0.001 * 12 * (100 + 50))
    assert forecast_s(loads, {"rollout": 2, "judge": 0}, setting(2), shared=True) == pytest.approx(told / 2, rel=0.2)


def test_a_manner_is_taken_as_long_as_its_rounds_keep_what_was_promised() -> None:
    """Where engines gain much from deep batches, phases promise more than a division with one long request a slot."""
    loads = {"rollout": load(400, 400), "judge": load(400, 1200)}
    where = setting(2, 0.1)
    assert choose(None, loads, where).mode == "phases"
    assert choose(None, loads, where, {"phases": 2.0, "together": 2.0}).mode == "divided"
    assert choose(None, loads, where, {"phases": 2.0, "together": 0.9}).mode == "together"


def test_one_slot_takes_its_roles_in_turn() -> None:
    loads = {"rollout": load(64, 400), "judge": load(64, 200)}
    assert choose(None, loads, setting(1)) == Schedule({"rollout": 1, "judge": 0}, "together")


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
    assert best_division(again, setting(8))["judge"] >= 1


def test_few_late_prompts_are_seldom_brought_by_the_last_verdict() -> None:
    """One moment a round, in the middle or near the end; many moments, and all verdicts bring some."""
    once = replace(load(512, 400, late=8, spread=0.8), num_times_late=1.0)
    assert bringing(once) == {COHORTS // 2}
    assert bringing(replace(once, late_at=0.95)) == {COHORTS - 1}
    assert bringing(replace(once, num_times_late=40.0)) == set(range(COHORTS))
    assert bringing(load(512, 400)) == set()
    seconds = [
        forecast_s({"rollout": late, "judge": load(512, 200)}, {"rollout": 4, "judge": 4}, setting(8))
        for late in (once, replace(once, late_at=0.95))
    ]
    assert seconds[0] < seconds[1]


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
    chosen = best_division(loads, setting(512))
    best = min(forecast_s(loads, divide(rollout, loads, setting(512)), setting(512)) for rollout in range(1, 512, 16))
    assert forecast_s(loads, chosen, setting(512)) <= best * AS_GOOD
