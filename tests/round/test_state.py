"""The controller's state in a checkpoint."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulator.simulation import Demand, Lengths, Machine, SimulatedRound, Workload
from simulator.speeds import Speed

from ycore.placement.allocator import Allocator
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool
from ycore.placement.slots import Slots
from ycore.round.peers import Peers
from ycore.round.sampling import AcceptanceRate, DrawSource, Rules
from ycore.round.step import Controller
from ycore.scoring.scoring import Scoring

ROLES = (ROLLOUT, JUDGE)


@pytest.fixture
def make() -> Iterator[Callable[[], Controller]]:
    """Make controllers of four slots, two roles, no engine and no prompt."""
    made: list[Controller] = []

    def controller() -> Controller:
        made.append(
            Controller(
                engines=[],
                scoring=Scoring([]),
                draws=DrawSource([], seed=None, encode=lambda prompt: (), max_prompt_tokens=1),
                rules=Rules(group_size=2, seed=0, reward_weights=()),
                peers=Peers(),
                slots=Slots(
                    4, allocator=Allocator(SlotPool(4, ROLES, dict.fromkeys(ROLES, 64)))
                ),
            )
        )
        return made[-1]

    yield controller
    for made_controller in made:
        made_controller.close()


def learned() -> dict[str, Any]:
    """Return what an allocator knows after a round with as much to judge as to write."""
    allocator = Allocator(SlotPool(4, ROLES, dict.fromkeys(ROLES, 64)))
    speeds = dict.fromkeys(ROLES, Speed(0.01, 0.001))
    work = Workload(Lengths(200, 0.8, 1000), {JUDGE: 150.0})
    SimulatedRound([allocator], Machine(speeds, {}), work.group_at, Demand(8)).run()
    allocator.learn(allocator.measurements())
    return allocator.state()


def test_the_division_of_slots_is_part_of_it(make: Callable[[], Controller]) -> None:
    first, second, state = make(), make(), learned()
    assert state["division"][JUDGE] >= 1, "learned, not what a run begins with"
    first.restore({**first.state(), "placement": state})
    first.draws.cursor, first.acceptance = 7, AcceptanceRate(3.5, 5.25)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state() and second.state()["placement"] == state


def test_a_round_begins_with_what_was_restored_and_learns_from_there() -> None:
    async def work() -> Any:
        allocator = Allocator(SlotPool(4, ROLES, dict.fromkeys(ROLES, 64)))
        slots = Slots(4, allocator=allocator)
        slots.load_state_dict(learned())
        async with slots.round(), slots.turn(JUDGE):
            assert allocator.division == learned()["division"]
        await slots.end_round(list)
        return slots.state

    after, before = asyncio.run(work()), learned()
    num_before, num_after = before["work"][JUDGE][0], after["work"][JUDGE][0]
    assert num_after == pytest.approx((num_before + 1) / 2), (
        "earlier rounds and the one verdict"
    )
