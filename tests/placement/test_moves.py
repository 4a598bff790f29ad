"""Whether a slot without work should change its role: pure numbers."""

import math

from hypothesis import given
from hypothesis import strategies as st

from ycore.placement.moves import Backlog, Cost, best_move, gain_s

NOTHING = Backlog(0, 0, 2, 1.0)
COUNTS = st.integers(0, 500)
SECONDS = st.floats(0.01, 100)


def test_a_backlog_that_takes_longer_than_the_swap_is_taken() -> None:
    assert best_move(NOTHING, {"judge": Backlog(40, 0, 1, 1.0)}, Cost(12.8)) == "judge"
    assert best_move(NOTHING, {"judge": Backlog(20, 0, 1, 1.0)}, Cost(12.8)) is None


def test_work_to_come_keeps_the_last_slot_of_a_role() -> None:
    idle_judge = Backlog(0, 100, 1, 1.0)
    assert best_move(idle_judge, {"rollout": Backlog(30, 0, 7, 1.0)}, Cost(1.0)) is None
    assert best_move(idle_judge, {"rollout": Backlog(900, 0, 1, 1.0)}, Cost(1.0)) == "rollout"
    assert best_move(idle_judge, {"rollout": Backlog(900, 0, 1, 1.0)}, Cost(1.0, late_s=1e6)) is None


def test_a_role_without_a_slot_comes_first() -> None:
    others = {"judge": Backlog(500, 0, 1, 1.0), "reward_model": Backlog(1, 0, 0, 0.01)}
    assert best_move(NOTHING, others, Cost(12.8)) == "reward_model"


@given(COUNTS, COUNTS, st.integers(1, 64), SECONDS, SECONDS)
def test_no_move_without_a_waiting_request(coming: int, here: int, slots: int, engine_s: float, swap_s: float) -> None:
    there = Backlog(0, coming, slots, engine_s)
    assert best_move(Backlog(0, here, 2, engine_s), {"judge": there}, Cost(swap_s)) is None


@given(st.integers(1, 500), st.integers(0, 64), SECONDS, SECONDS)
def test_nobody_stays_idle_beside_work_that_is_worth_a_swap(
    waiting: int, slots: int, engine_s: float, swap_s: float
) -> None:
    """Independent of the code: with nothing to come in the own role, what remains for the newcomer decides."""
    there = Backlog(waiting, 0, slots, engine_s)
    share_s = math.inf if slots == 0 else (waiting * engine_s - slots * swap_s) / (slots + 1)
    moved = best_move(NOTHING, {"judge": there}, Cost(swap_s)) == "judge"
    assert moved == (share_s > swap_s) or abs(share_s - swap_s) < 1e-9
    if moved:
        assert gain_s(NOTHING, there, Cost(swap_s)) > 0


def test_where_a_swap_is_free_whatever_waits_is_taken() -> None:
    idle_judge = Backlog(0, 100, 1, 1.0)
    assert best_move(idle_judge, {"rollout": Backlog(1, 0, 7, 1.0)}, Cost(0.0)) == "rollout"
    assert best_move(idle_judge, {"rollout": Backlog(0, 9, 7, 1.0)}, Cost(0.0)) is None
