"""Whether an idle slot should change its role, and which schedule the next round should have."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.forecast import forecast_s
from ycore.placement.learning import EXCLUSIVE_FACTORS
from ycore.placement.load import Load, Speed
from ycore.placement.moves import (
    AS_GOOD,
    Backlog,
    best_division,
    best_move,
    divide,
    gain_s,
    next_schedule,
    shares,
)
from ycore.placement.placement import ROLES, Schedule, SlotPool

SPEED = Speed(0.012, 0.0006)
NOTHING = Backlog(0, 0, 2, 1.0)
COUNTS = st.integers(0, 500)
SECONDS = st.floats(0.01, 100)


def test_a_backlog_that_takes_longer_than_the_swap_is_taken() -> None:
    assert best_move(NOTHING, {"judge": Backlog(40, 0, 1, 1.0)}, swap_s=12.8) == "judge"
    assert best_move(NOTHING, {"judge": Backlog(20, 0, 1, 1.0)}, swap_s=12.8) is None


def test_work_to_come_keeps_the_last_slot_of_a_role() -> None:
    idle_judge = Backlog(0, 100, 1, 1.0)
    assert best_move(idle_judge, {"rollout": Backlog(30, 0, 7, 1.0)}, swap_s=1.0) is None
    assert best_move(idle_judge, {"rollout": Backlog(900, 0, 1, 1.0)}, swap_s=1.0) == "rollout"
    assert (
        best_move(idle_judge, {"rollout": Backlog(900, 0, 1, 1.0)}, swap_s=1.0, late_s=1e6)
        is None
    )


def test_a_role_without_a_slot_comes_first() -> None:
    others = {"judge": Backlog(500, 0, 1, 1.0), "reward_model": Backlog(1, 0, 0, 0.01)}
    assert best_move(NOTHING, others, swap_s=12.8) == "reward_model"


@given(COUNTS, COUNTS, st.integers(1, 64), SECONDS, SECONDS)
def test_no_move_without_a_waiting_request(
    coming: int, here: int, slots: int, engine_s: float, swap_s: float
) -> None:
    there = Backlog(0, coming, slots, engine_s)
    assert best_move(Backlog(0, here, 2, engine_s), {"judge": there}, swap_s=swap_s) is None


@given(st.integers(1, 500), st.integers(0, 64), SECONDS, SECONDS)
def test_nobody_stays_idle_beside_work_that_is_worth_a_swap(
    waiting: int, slots: int, engine_s: float, swap_s: float
) -> None:
    """Independent of the code: with nothing to come in the own role, what remains for the newcomer decides."""
    there = Backlog(waiting, 0, slots, engine_s)
    share_s = math.inf if slots == 0 else (waiting * engine_s - slots * swap_s) / (slots + 1)
    moved = best_move(NOTHING, {"judge": there}, swap_s=swap_s) == "judge"
    assert moved == (share_s > swap_s) or abs(share_s - swap_s) < 1e-9
    if moved:
        assert gain_s(NOTHING, there, swap_s=swap_s) > 0


def test_where_a_swap_is_free_whatever_waits_is_taken() -> None:
    idle_judge = Backlog(0, 100, 1, 1.0)
    assert best_move(idle_judge, {"rollout": Backlog(1, 0, 7, 1.0)}, swap_s=0.0) == "rollout"
    assert best_move(idle_judge, {"rollout": Backlog(0, 9, 7, 1.0)}, swap_s=0.0) is None


def load(num: float, size: float, *, late: float = 0.0, spread: float = 0.0) -> Load:
    return Load(num, size, spread * size, size * (1 + 2 * spread), SPEED, late)


def slots(num_slots: int, swap_s: float = 6.8) -> SlotPool:
    return SlotPool(num_slots, ROLES, dict.fromkeys(ROLES, 64), exclusive=True, swap_s=swap_s)


LOADS = st.fixed_dictionaries(
    {
        "rollout": st.builds(
            load,
            st.floats(1, 4000),
            st.floats(1, 4000),
            late=st.floats(0, 500),
            spread=st.floats(0, 1.5),
        ),
        "judge": st.builds(load, st.floats(1, 4000), st.floats(1, 4000)),
    }
)


def choose(
    current: Schedule | None,
    loads: dict[str, Load],
    where: SlotPool,
    factors: dict[str, float] | None = None,
) -> Schedule:
    return next_schedule(current, loads, where, {**EXCLUSIVE_FACTORS, **(factors or {})})  # type: ignore[dict-item]


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 40), st.floats(0, 20))
def test_constant_load_changes_the_schedule_once_at_most(
    loads: dict[str, Load], num_slots: int, swap_s: float
) -> None:
    where = slots(num_slots, swap_s)
    chosen = choose(None, loads, where)
    assert sum(chosen.division.values()) == num_slots
    assert chosen.division["rollout"] >= 1 and min(chosen.division.values()) >= 0
    assert choose(chosen, loads, where) == chosen
    elsewhere = Schedule(divide(1, loads, where), "divided")
    second = choose(elsewhere, loads, where)
    assert choose(second, loads, where) == second
    before_s, after_s = (
        EXCLUSIVE_FACTORS[schedule.mode] * forecast_s(loads, schedule.division, where)
        for schedule in (elsewhere, second)
    )
    assert after_s <= before_s


def test_loads_that_waver_do_not_move_slots() -> None:
    now = choose(None, {"rollout": load(512, 400), "judge": load(512, 200)}, slots(8))
    for sign in (1, -1, 1, -1, 1):
        wavering = {
            "rollout": load(512, 400 * (1 + 0.02 * sign)),
            "judge": load(512, 200 * (1 - 0.02 * sign)),
        }
        assert choose(now, wavering, slots(8)) == now


def test_more_to_judge_means_more_judges() -> None:
    judges = [
        best_division({"rollout": load(512, 400), "judge": load(512, size)}, slots(8, 500.0))[
            "judge"
        ]
        for size in (20, 400, 4000)
    ]
    assert judges == sorted(judges) and judges[0] < judges[-1]


def test_short_verdicts_share_the_slots_where_all_engines_stay_up() -> None:
    """A label's worth of judging is not worth a slot of its own, and a round that waits for it has idle slots."""
    loads = {
        "rollout": replace(load(80, 96), deviation=80, longest=512, num_late=24),
        "judge": load(80, 1),
    }
    one_awake = slots(2, 0.0)
    assert choose(None, loads, replace(one_awake, exclusive=False)).mode == "shared"
    assert choose(None, loads, one_awake).mode != "shared"


def test_a_mode_is_taken_as_long_as_its_rounds_keep_what_was_promised() -> None:
    """Where engines gain much from deep batches, phases promise more than a division with one long request a slot."""
    loads = {"rollout": load(400, 400), "judge": load(400, 1200)}
    where = slots(2, 0.1)
    assert choose(None, loads, where).mode == "phases"
    assert choose(None, loads, where, {"phases": 2.0, "together": 2.0}).mode == "divided"
    assert choose(None, loads, where, {"phases": 2.0, "together": 0.9}).mode == "together"


def test_one_slot_takes_its_roles_in_turn() -> None:
    loads = {"rollout": load(64, 400), "judge": load(64, 200)}
    assert choose(None, loads, slots(1)) == Schedule({"rollout": 1, "judge": 0}, "together")


def test_shares_are_whole_and_complete() -> None:
    assert shares({"judge": 2.0, "reward_model": 1.0}, 6) == {"judge": 4, "reward_model": 2}
    assert shares({"judge": 1.0, "reward_model": 1.0}, 3) == {"judge": 2, "reward_model": 1}
    assert shares({"judge": 1.0, "reward_model": 0.0}, 4) == {"judge": 4, "reward_model": 0}


def test_many_slots_are_divided_quickly_and_well() -> None:
    loads = {"rollout": load(16384, 400, spread=0.8), "judge": load(16384, 200)}
    chosen = best_division(loads, slots(512))
    best = min(
        forecast_s(loads, divide(rollout, loads, slots(512)), slots(512))
        for rollout in range(1, 512, 16)
    )
    assert forecast_s(loads, chosen, slots(512)) <= best * AS_GOOD
