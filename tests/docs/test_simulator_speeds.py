"""The line of an engine's step times, from finished requests."""

import random

import pytest
from simulator.speeds import UNKNOWN, Sums


def test_the_speed_of_an_engine_is_found_again() -> None:
    source, sums = random.Random(0), Sums()
    for _ in range(200):
        size, depth = source.uniform(20, 400), source.uniform(1, 60)
        sums.observe(seconds=size * (0.012 + 0.0004 * depth), depth=depth, size=size)
    speed = sums.speed()
    assert speed.base == pytest.approx(0.012) and speed.per_request == pytest.approx(0.0004)


def test_one_depth_alone_is_no_evidence_of_free_batching() -> None:
    sums = Sums()
    for _ in range(9):
        sums.observe(seconds=2.0, depth=8.0, size=10.0)
    speed = sums.speed()
    assert speed.base == pytest.approx(0) and speed.step_s(8) == pytest.approx(0.2)


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
    sums = Sums()
    for served, seconds in enumerate(BURST, 1):
        sums.observe(seconds=seconds, depth=len(BURST) - served / 2, size=1.0, served=served)
    speed = sums.speed()
    assert speed.base == pytest.approx(0) and speed.per_request == pytest.approx(0.38, abs=0.05)


def test_completions_of_one_moment_are_no_queue() -> None:
    """They are written side by side: the short ones end first, and a token took as long for all."""
    sums = Sums()
    for served in range(1, 33):
        sums.observe(
            seconds=0.05 * 10 * served, depth=32 - served / 2, size=10.0 * served, served=served
        )
    assert sums.speed().base == pytest.approx(0.05)


def test_requests_without_seconds_leave_the_speed_unknown() -> None:
    """A clock may not move between two requests of a made-up engine; a speed of no seconds ended in a division by 0."""
    sums = Sums()
    sums.observe(seconds=0.0, depth=1.0, size=1.0)
    assert sums.speed() is UNKNOWN
