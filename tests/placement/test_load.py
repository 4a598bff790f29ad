"""How busy the slots of a round were, and with what."""

import pytest

from ycore.placement.allocator import Allocator, SlotClock, usage_metrics
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool

ROLES = (ROLLOUT, JUDGE)


def test_roles_at_work_share_a_slot_evenly() -> None:
    clock = SlotClock(ROLES, 0.0)
    clock.in_flight[ROLLOUT] = 3
    clock.advance(2.0)
    clock.in_flight[JUDGE] = 1
    clock.advance(6.0)
    clock.in_flight = dict.fromkeys(ROLES, 0)
    clock.advance(9.0)
    assert clock.busy_s == {ROLLOUT: 4.0, JUDGE: 2.0}


def test_a_round_is_measured_by_role() -> None:
    allocator = Allocator(SlotPool(2, ROLES, exclusive=True, swap_s=5.0))
    for request, role in enumerate((ROLLOUT, ROLLOUT, JUDGE)):
        allocator.ask(request, role)
    allocator.decide(0.0)
    for request in range(3):
        allocator.ended(request, 1.0 + request)
    assert allocator.end_round(4.0) == pytest.approx([8.0, 5.0, 0.0, 0.0])
    assert allocator.measurements() == [2.0, 3.0, 2.0, 1.0, 3.0, 3.0, 5.0, 1.0]


def test_usage_of_several_machines_adds_up() -> None:
    metrics = usage_metrics([2 * value for value in (20.0, 14.0, 1.0, 1.0)])
    assert metrics["ycore/idle_share"] == pytest.approx(0.25)
    assert metrics["ycore/bound_ratio"] == pytest.approx(20 / 14)
