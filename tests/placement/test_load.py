"""What is learned of a role's requests."""

import random

import pytest

from ycore.placement.allocator import Allocator
from ycore.placement.load import Load, Speed, Sums, as_late_as, as_numbers, faded, from_numbers
from ycore.placement.placement import SlotPool

ROLES = ("rollout", "judge")


def observed(base: float, each: float, *, num: int = 200, seed: int = 0) -> Sums:
    source, sums = random.Random(seed), Sums(rounds=1.0)
    for _ in range(num):
        size, depth = source.uniform(20, 400), source.uniform(1, 60)
        sums.observe(seconds=size * (base + each * depth), depth=depth, size=size)
    return sums


def test_the_speed_of_an_engine_is_found_again() -> None:
    load = observed(0.012, 0.0004).load()
    assert load is not None
    assert load.speed.base == pytest.approx(0.012) and load.speed.each == pytest.approx(0.0004)
    assert load.num_requests == 200 and load.engine_s(30) == pytest.approx(
        load.size * 0.024 / 30
    )
    assert load.speed.good_depth == pytest.approx(120)


def test_the_longest_is_known_from_sums() -> None:
    sums = Sums(rounds=1.0)
    for size in (10.0, 20.0, 500.0):
        sums.observe(seconds=size, depth=1.0, size=size)
    load = sums.load()
    assert load is not None and load.longest == pytest.approx(500, rel=0.01)


def test_one_depth_alone_is_no_evidence_of_free_batching() -> None:
    sums = Sums(rounds=1.0)
    for _ in range(9):
        sums.observe(seconds=2.0, depth=8.0, size=10.0)
    load = sums.load()
    assert load is not None
    assert load.speed.base == pytest.approx(0) and load.speed.step_s(8) == pytest.approx(0.2)


BURST = [
    1.1,
    1.1,
    2.2,
    2.2,
    3.3,
    3.3,
    4.5,
    4.5,
    5.6,
    5.6,
    6.8,
    6.8,
    7.9,
    7.9,
    9.0,
    9.0,
    10.1,
    10.1,
    11.2,
    11.2,
]
BURST += [12.4, 12.4, 13.5, 13.5]
"""Seconds of verdicts that were asked for at one moment, of a judge that reads 720 tokens, on a CPU core."""


def test_requests_that_wait_for_each_other_show_that_more_in_flight_gain_nothing() -> None:
    sums = Sums(rounds=1.0)
    for served, seconds in enumerate(BURST, 1):
        sums.observe(seconds=seconds, depth=len(BURST) - served / 2, size=1.0, served=served)
    load = sums.load()
    assert load is not None
    assert load.speed.base == pytest.approx(0) and load.speed.each == pytest.approx(
        0.38, abs=0.05
    )
    assert load.depth(2, 256, moves=True) == 3, "the others wait, and any slot can take them"


def test_an_engine_tells_how_many_it_served_meanwhile() -> None:
    allocator = Allocator(SlotPool(1))
    for request in range(3):
        allocator.ask(request, "rollout")
    allocator.decide(0.0)
    for request in range(3):
        allocator.ended(request, 2.0 + request, size=1.0)
    squared, with_step_s = allocator.measurements()[-5:-3]
    assert (squared, with_step_s) == (1 + 4 + 9, 1 * 2.0 + 2 * 3.0 + 3 * 4.0)


def test_completions_of_one_moment_are_no_queue() -> None:
    """They are written side by side: the short ones end first, and a token took as long for all."""
    sums = Sums(rounds=1.0)
    for served in range(1, 33):
        sums.observe(
            seconds=0.05 * 10 * served, depth=32 - served / 2, size=10.0 * served, served=served
        )
    load = sums.load()
    assert load is not None and load.speed.base == pytest.approx(0.05)


def test_sums_of_two_controllers_say_what_one_with_all_would() -> None:
    one, two = (
        {"rollout": observed(0.01, 0.001, seed=1)},
        {"rollout": observed(0.01, 0.001, seed=2)},
    )
    added = [a + b for a, b in zip(as_numbers(one, ROLES), as_numbers(two, ROLES), strict=True)]
    both = from_numbers(added, ROLES)
    load, alone = both["rollout"].load(), one["rollout"].load()
    assert load is not None and alone is not None
    assert load.num_requests == 200, "a load is that of the mean controller"
    assert load.speed.base == pytest.approx(alone.speed.base)
    assert both["judge"].load() is None


def test_old_rounds_fade() -> None:
    slow, fast = observed(0.1, 0.0), observed(0.01, 0.0)
    sums = slow
    for _ in range(12):
        sums = faded(sums, fast)
    load = sums.load()
    assert load is not None and load.speed.base == pytest.approx(0.01, rel=0.05)
    assert load.num_requests == pytest.approx(200)


def test_late_requests_are_counted_by_moment_and_carried_over() -> None:
    before = Sums(rounds=2.0)
    for at, is_first in ((0.5, True), (0.5, False), (0.9, True), (0.9, False)):
        before.observe_late(at, is_first=is_first)
        before.observe(seconds=1.0, depth=1.0, size=10.0)
    load = before.load()
    assert load is not None
    assert (load.num_late, load.num_times_late, load.late_at) == (2.0, 1.0, pytest.approx(0.7))
    now = Sums(rounds=1.0)
    now.observe(seconds=1.0, depth=1.0, size=10.0)
    carried = as_late_as(before, now).load()
    assert carried is not None
    assert (carried.num_late, carried.num_times_late, carried.late_at) == (
        2.0,
        1.0,
        pytest.approx(0.7),
    )
    assert carried.num_requests == 1.0 and now.late == 0.0


def test_a_slot_holds_no_more_than_its_engine_needs_where_others_may_come_to_help() -> None:
    """256 requests on 2 slots: 128 each, or what gives 95 % of the highest throughput, at least a quarter of 128."""
    shallow = Load(
        256, 100, 0.0, 100, Speed(0.01, 0.004), 0.0
    )  # half of the throughput with 2.5 in flight
    assert shallow.depth(2, 512) == 128 and shallow.depth(2, 512, moves=True) == 50
    assert Load(256, 100, 0.0, 100, Speed(0.01, 0.01), 0.0).depth(2, 512, moves=True) == 32
    assert Load(256, 100, 0.0, 100, Speed(0.01, 1e-6), 0.0).depth(2, 512, moves=True) == 512
