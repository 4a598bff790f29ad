"""Devices between training and engines: the division with the shortest step, where it saves enough."""

import re
from typing import Any

import pytest

from ycore.placement.placement import ENGINE_DEVICES, better_divisions

DEVICES = 8


def rows(
    engine_devices: int,
    train_s: float,
    engine_s: float,
    *,
    waits_s: float = 0.0,
    steps: int = 11,
) -> list[dict[str, Any]]:
    """Steps in which both sides have so much to do, in seconds of all their devices."""
    took_s = train_s / (DEVICES - engine_devices)
    round_s = engine_s / engine_devices
    row = {
        ENGINE_DEVICES: float(engine_devices),
        "ycore/time/step": max(took_s, round_s) + waits_s,
        "ycore/time/train": took_s,
        "ycore/time/round": 2 * round_s,
        "ycore/idle_share": 0.5,
    }
    return [dict(row) for _ in range(steps)]


def divisions_of(
    measured: list[dict[str, Any]], now: int, **options: Any
) -> list[tuple[int, str]]:
    return list(better_divisions(measured, now, DEVICES, **options))


@pytest.mark.parametrize(
    ("now", "best", "said"),
    [
        (2, 6, "training waited 89% of the last 10 steps; engine.devices=6 would take about 20.0 s a step instead of 60"),
        (7, 6, "engines idled 57% of the last 10 steps; engine.devices=6 would take about 20.0 s a step instead of 40.0"),
    ],
)  # fmt: skip
def test_the_side_that_starves_gives_devices(now: int, best: int, said: str) -> None:
    """40 device seconds of training and 120 of engines are even at two and six."""
    number, sentence = divisions_of(rows(now, 40, 120), now)[0]
    assert number == best and said in sentence


def test_others_that_are_better_too_follow_in_order() -> None:
    assert [number for number, _ in divisions_of(rows(2, 40, 120), 2)] == [6, 5, 4, 3, 7]


def test_what_is_even_stays() -> None:
    assert not divisions_of(rows(6, 40, 120), 6)
    assert not divisions_of(rows(6, 42, 120), 6), "another division saves less than a tenth"


def test_what_both_sides_wait_for_is_no_gain() -> None:
    """A step of 120 s of which neither side works 100 cannot become shorter by more than its work."""
    divisions = divisions_of(rows(6, 40, 120, waits_s=100), 6)
    assert not divisions
    (_, sentence), *_ = divisions_of(rows(2, 40, 120, waits_s=100), 2)
    assert "120.0 s a step instead of 160.0" in sentence


def test_the_gain_over_the_steps_to_come_pays_for_the_move() -> None:
    measured = rows(2, 40, 120)
    assert divisions_of(measured, 2, least_gain_s=39.9) and not divisions_of(
        measured, 2, least_gain_s=40.1
    )


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_fewer_steps_than_ten_after_the_first_say_nothing(steps: int) -> None:
    assert not divisions_of(rows(2, 40, 120, steps=steps), 2)


def test_steps_without_the_numbers_do_not_count() -> None:
    """Evaluations have rows of their own; a round from the journal has no times; another division is another time."""
    measured = rows(2, 40, 120)
    replayed = [{ENGINE_DEVICES: 2.0, "ycore/time/step": 0.1, "ycore/replayed": 1.0}] * 30
    evaluated = [{"step": 5, "ycore/eval/reward": 1.0}]
    said = divisions_of([*measured[:5], *replayed, *evaluated, *measured[5:]], 2)
    assert said == divisions_of(measured, 2) and said
    assert not divisions_of([*measured[:10], *rows(3, 40, 120, steps=1), *measured[:10]], 2)


def test_a_division_that_was_worse_is_not_tried_again() -> None:
    """By the work of both sides six devices are better than two. They were not, and the run went back, once."""
    first = rows(2, 40, 120)
    assert divisions_of(first, 2)[0][0] == 6
    worse = [
        {**row, "ycore/time/step": 70.0, "ycore/time/train": 70.0} for row in rows(6, 40, 120)
    ]
    back = divisions_of([*first, *worse], 6)
    assert 2 in dict(back)
    assert 6 not in dict(divisions_of([*first, *worse, *first], 2))


def test_no_division_is_left_for_one_and_taken_again() -> None:
    """Whatever each division really takes: a run that always takes the best ends where it was never better."""
    takes = {1: 50.0, 2: 60.0, 3: 70.0, 4: 80.0, 5: 90.0, 6: 100.0, 7: 110.0}
    now, measured, visited = 7, list[dict[str, Any]](), [7]
    for _ in range(20):
        measured += [{**row, "ycore/time/step": takes[now]} for row in rows(now, 40, 120)]
        better = divisions_of(measured, now)
        if not better:
            break
        now = better[0][0]
        visited.append(now)
    assert len(visited) == len(set(visited)) and len(visited) < 8
    assert re.search(r"engine\.devices=\d", str(divisions_of(rows(2, 40, 120), 2)))
