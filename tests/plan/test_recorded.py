"""A recorded round played again: its sizes, its speeds, its seconds."""

from dataclasses import replace

import pytest

from ycore.errors import DataError
from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT, Placement, SlotPool, parse_placement
from ycore.plan.comparison import Question, play_recorded
from ycore.plan.recording import Request, recorded
from ycore.plan.simulation import Assumed, Demand, Lengths, Machine, SimulatedRound

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.02, 0.002)
WORK = Assumed(Lengths(120, 0.7, 600), {JUDGE: 40.0}, group_size=4, seed=2)
QUESTION = Question(2, 0.0, 8, 2, 4, 6, False, 4, 600, 120.0, 0.3, (0.02, 0.002), 0)


def record(words: str, *, tokens: bool = True) -> list[list[Request]]:
    """What a run would have written down, from rounds whose truth is known."""
    allocator = Allocator(SlotPool(2, ROLES, dict.fromkeys(ROLES, 64)), parse_placement(words))
    rounds = []
    for number in range(4):
        one = SimulatedRound(allocator, Machine(dict.fromkeys(ROLES, SPEED), {}), WORK.group_at, Demand(6))
        one.position = 100 * number
        outcome = one.run()
        lanes = [lane for lane in outcome.lanes if lane.name != "swap"]
        sizes = sorted(
            (size, role)
            for position in range(one.position - outcome.drawn, one.position)
            for completion in WORK.group_at(position).completions
            for role, size in completion.items()
        )
        assert len(sizes) == len(lanes)
        requests = _requests(lanes, one.position - outcome.drawn, tokens=tokens)
        rounds.append([_later(request, 1000.0 * number) for request in requests])
    return rounds


def _requests(lanes: list, first: int, *, tokens: bool) -> list[Request]:  # type: ignore[type-arg]
    """Rollouts are numbered in the order they were asked, by matching lengths to lanes that began at 0."""
    lengths = [one[ROLLOUT] for position in range(first, first + 6) for one in WORK.group_at(position).completions]
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    rollouts = sorted((lane for lane in lanes if lane.name == ROLLOUT), key=lambda lane: lane.seconds)
    numbered = [
        Request(index, ROLLOUT, lane.slot, 0.0, lane.began, lane.began + lane.seconds, lengths[index] if tokens else 0)
        for index, lane in zip(order, rollouts, strict=True)
    ]
    judged = sorted((lane for lane in lanes if lane.name == JUDGE), key=lambda lane: lane.began)
    return numbered + [
        Request(100 + number, JUDGE, lane.slot, lane.began, lane.began, lane.began + lane.seconds, 40 if tokens else 0)
        for number, lane in enumerate(judged)
    ]


def _later(one: Request, seconds: float) -> Request:
    return replace(one, asked=one.asked + seconds, began=one.began + seconds, ended=one.ended + seconds)


def test_speeds_are_found_again() -> None:
    told = recorded(record("split:1:1"), group_size=4)
    for role in ROLES:
        for depth in (8, 16, 24):  # what it met; of one request alone the rounds say little
            assert told.speeds[role].step_s(depth) == pytest.approx(SPEED.step_s(depth), rel=0.05)
    assert len(told.rounds) == 4 and all(len(groups) == 6 for groups in told.rounds)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_the_recorded_placement_takes_as_long_as_it_took(tokens: bool) -> None:
    played = play_recorded(record("split:1:1", tokens=tokens), QUESTION)
    (again,) = [result for result in played.results if result.placement == Placement("split", (1, 1))]
    assert played.recorded_s is not None
    assert again.seconds == pytest.approx(played.recorded_s, rel=0.1)


def test_groups_that_came_later_come_later_again() -> None:
    first = [Request(n, ROLLOUT, 0, 0.0, 0.0, 1.0 + n, 10) for n in range(2)]
    second = [Request(n, ROLLOUT, 0, 2.5, 2.5, 4.0, 10) for n in (2, 3)]
    told = recorded([[*first, *second]], group_size=2)
    assert [group.after for group in told.rounds[0]] == [0, 1]


def test_an_empty_trace_is_said_to_be_one() -> None:
    with pytest.raises(DataError, match="no whole round"):
        recorded([[]], group_size=2)
