"""Lanes: which cell is whose, how high, where a swap is; and that the picture stands still between two cells."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.run.trace import merge_intervals
from ycore.view.lanes import Lane, Window, cell_seconds, draw_lane, draw_legend, lane_names

WINDOW = Window(
    until=110.0, cell_s=1.0, num_cells=10
)  # the seconds 101 to 110, and the one that has just begun

times = st.floats(0, 100, allow_nan=False)
stretches = st.lists(st.tuples(times, st.floats(0, 20, allow_nan=False)), max_size=20)
whole_numbers = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=20)


def styles(lane: Lane, window: Window = WINDOW) -> list[str]:
    drawn = draw_lane(lane, window)
    return [
        str(next((span.style for span in drawn.spans if span.start <= at < span.end), ""))
        for at in range(10)
    ]


def test_a_cell_has_the_colour_of_whoever_worked_most_and_the_height_of_how_much() -> None:
    lane = Lane({"rollout": [(101.0, 3.5), (107.0, 0.2)], "judge": [(104.2, 1.8)]})
    assert draw_lane(lane, WINDOW).plain == "▇▇▇▆▇·▂···"
    assert styles(lane)[:4] == ["bright_blue", "bright_blue", "bright_blue", "dark_orange"]
    assert styles(lane)[6:8] == ["bright_blue", "bright_black"]


def test_a_swap_is_marked_in_the_colour_of_the_role_that_woke() -> None:
    lane = Lane(
        {"rollout": [(101.0, 9.0)]},
        swaps=[(103.5, 0.0, "judge"), (106.0, 1.5, "rollout"), (50.0, 1, "judge")],
    )
    assert draw_lane(lane, WINDOW).plain == "▇▇┃▇▇┃┃▇▇·"
    assert styles(lane)[2] == "dark_orange" and styles(lane)[5] == "bright_blue"


def test_what_is_in_flight_lasts_until_now() -> None:
    assert draw_lane(Lane(), WINDOW, open_since={"judge": 107.5}).plain == "······▄▇▇·"
    later = Window(110.5, 1.0, 10)
    assert draw_lane(Lane(), later, open_since={"judge": 107.5}).plain == "······▄▇▇▇"


def test_cells_stand_still_until_a_new_one_begins() -> None:
    lane = Lane({"rollout": [(103.3, 4.1)]})
    drawn = {draw_lane(lane, Window(110 + part / 10, 1.0, 10)).plain for part in range(10)}
    assert len(drawn) == 1
    assert draw_lane(lane, Window(111.0, 1.0, 10)).plain == next(iter(drawn))[1:] + "·"


@given(whole_numbers, whole_numbers)
def test_stretches_may_come_in_any_order(
    first: list[tuple[int, int]], then: list[tuple[int, int]]
) -> None:
    lane = Lane()
    lane.add("rollout", first)
    lane.add("rollout", then)
    assert lane.busy.get("rollout", []) == merge_intervals([*first, *then])


@given(stretches, st.floats(20, 130), st.sampled_from([1.0, 2.0, 5.0]), st.integers(1, 60))
def test_shares_add_up_to_the_seconds_covered(
    told: list[tuple[float, float]], until: float, cell_s: float, num_cells: int
) -> None:
    window, whole = Window(until, cell_s, num_cells), merge_intervals(told)
    shares = window.shares(whole)
    assert len(shares) == num_cells and all(0 <= share <= 1 for share in shares)
    assert until - cell_s <= window.since + window.cell_s * window.num_cells - cell_s <= until
    lengths = [min(cell_s, until - window.since - place * cell_s) for place in range(num_cells)]
    covered = math.fsum(max(0.0, min(until, a + s) - max(window.since, a)) for a, s in whole)
    assert math.fsum(map(math.prod, zip(shares, lengths, strict=True))) == pytest.approx(
        covered, abs=1e-6
    )


@pytest.mark.parametrize(
    ("step_s", "cell"), [(0, 1), (60, 1), (61, 2), (400, 10), (10**6, 600)]
)
def test_the_cells_show_a_minute_or_the_longest_step(step_s: float, cell: float) -> None:
    assert cell_seconds(step_s) == cell


def test_names_and_legend() -> None:
    assert lane_names([(0, 0), (0, 1)]) == ["slot 0", "slot 1"]
    assert lane_names([(0, 0), (1, 0)]) == ["rank 0, 0", "rank 1, 0"]
    legend = draw_legend(
        {"reward_model", "judge", "rollout"}, Window(0, 1, 60), swaps=True
    ).plain
    assert legend == "the last 60 s: ▇ rollout  ▇ judge  ▇ reward model  · idle  ┃ swap"
