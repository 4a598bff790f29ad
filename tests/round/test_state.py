"""The controller's state in a checkpoint."""

import json
from collections.abc import Callable, Iterator

import pytest

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool
from ycore.plan.simulation import Demand, Lengths, Machine, SimulatedRound, Workload
from ycore.round.peers import Peers
from ycore.round.sampling import DrawSource, Rules, Yield
from ycore.round.scoring import Scoring
from ycore.round.slots import Slots
from ycore.round.step import Controller

ROLES = (ROLLOUT, JUDGE)


@pytest.fixture
def make() -> Iterator[Callable[[], Controller]]:
    """Controllers of four slots, two roles, no engine and no prompt."""
    made: list[Controller] = []

    def controller() -> Controller:
        made.append(
            Controller(
                engines=[],
                scoring=Scoring([]),
                draws=DrawSource([], seed=None, encode=lambda prompt: (), max_prompt_tokens=1),
                rules=Rules(group_size=2, seed=0, reward_weights=()),
                peers=Peers(),
                slots=Slots(4, allocator=Allocator(SlotPool(4, ROLES, dict.fromkeys(ROLES, 64)))),
            )
        )
        return made[-1]

    yield controller
    for one in made:
        one.close()


def play(allocator: Allocator) -> None:
    speeds = dict.fromkeys(ROLES, Speed(0.01, 0.001))
    work = Workload(Lengths(200, 0.8, 1000), {JUDGE: 150.0})
    SimulatedRound(allocator, Machine(speeds, {}), work.group_at, Demand(8)).run()
    allocator.learn(allocator.numbers())


def test_the_division_of_slots_is_part_of_it(make: Callable[[], Controller]) -> None:
    first, second = make(), make()
    play(first.slots.allocator)
    first.draws.cursor, first.yields = 7, Yield(3.5, 5.25)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    assert second.slots.allocator.division == first.slots.allocator.division
    assert second.slots.allocator.division[JUDGE] >= 1, "learned, not what a run begins with"


def test_a_checkpoint_from_before_placement_was_in_it_is_taken(make: Callable[[], Controller]) -> None:
    state = make().state()
    del state["placement"]
    again = make()
    again.restore({**state, "cursor": 5})
    assert again.draws.cursor == 5
