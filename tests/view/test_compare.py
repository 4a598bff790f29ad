"""Runs at equal device seconds."""

import math
import statistics

import pytest

from ycore.view.record import at_equal_seconds, half_width, reward_curve


def rows(seconds: float, *rewards: float) -> list[dict[str, float]]:
    return [{"step": n, "ycore/time/step": seconds, "reward": reward} for n, reward in enumerate(rewards, 1)]


def test_a_slower_run_is_seen_at_fewer_steps() -> None:
    fast, slow = reward_curve(rows(1, *range(1, 21)), num_slots=2), reward_curve(rows(4, *range(1, 21)), num_slots=2)
    of_fast, of_slow = at_equal_seconds([fast, slow])
    assert [one.device_s for one in of_fast] == [one.device_s for one in of_slow] == [10, 20, 30, 40]
    assert [one.step for one in of_fast] == [5, 10, 15, 20] and [one.step for one in of_slow] == [1, 2, 3, 5]
    assert of_fast[-1].reward == statistics.fmean(range(11, 21)) and of_slow[-1].reward == 3


def test_the_interval_is_students() -> None:
    assert half_width([1.0, 2.0]) is None
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert half_width([float(n) for n in range(10)]) == pytest.approx(
        2.262 * statistics.stdev(range(10)) / math.sqrt(10)
    )


def test_steps_without_a_reward_or_a_time_are_left_out() -> None:
    found = reward_curve([{"step": 1, "reward": 1.0}, *rows(1, 2.0), {"step": 3, "step_time": 1.0}], num_slots=1)
    assert found == [(1.0, 1, 2.0)]
    assert at_equal_seconds([found, []]) == [[], []]
