"""What a checkpoint says of a controller, and what it takes back from one."""

import json
from types import SimpleNamespace
from typing import Any

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool
from ycore.plan.simulation import Assumed, Demand, Lengths, Machine, SimulatedRound
from ycore.round.journal import controller_state, restore_controller
from ycore.round.sampling import Yield

ROLES = (ROLLOUT, JUDGE)


def controller() -> Any:
    """Only what its state is told from."""
    slots = SimpleNamespace(allocator=Allocator(SlotPool(4, ROLES, dict.fromkeys(ROLES, 64))))
    return SimpleNamespace(
        draws=SimpleNamespace(cursor=0),
        surplus=SimpleNamespace(waiting=[]),
        round=SimpleNamespace(yields=Yield(), slots=slots),
    )


def play(allocator: Allocator) -> None:
    speeds = dict.fromkeys(ROLES, Speed(0.01, 0.001))
    work = Assumed(Lengths(200, 0.8, 1000), {JUDGE: 150.0})
    SimulatedRound(allocator, Machine(speeds, {}), work.group_at, Demand(8)).run()
    allocator.learn(allocator.numbers())


def test_the_division_of_slots_is_part_of_it() -> None:
    first, second = controller(), controller()
    play(first.round.slots.allocator)
    first.draws.cursor, first.round.yields = 7, Yield(3.5, 5.25)
    restore_controller(second, json.loads(json.dumps(controller_state(first))))
    assert controller_state(second) == controller_state(first)
    assert second.round.slots.allocator.division == first.round.slots.allocator.division
    assert second.round.slots.allocator.division[JUDGE] >= 1, "learned, not what a run begins with"


def test_a_checkpoint_from_before_placement_was_in_it_is_taken() -> None:
    told = controller_state(controller())
    del told["placement"]
    again = controller()
    restore_controller(again, {**told, "cursor": 5})
    assert again.draws.cursor == 5
