"""The parts of a controller's state, in checkpoints and in the journal, and what another number of ranks makes of each.

A part is an object of the controller with `state_dict()`, which returns plain JSON values, and `load_state_dict(state)`.
No position of the prompts' order is lost, none comes twice, and those to come keep their order.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from ycore.round.peers import GroupSummary, deal_groups
from ycore.round.sampling import Shard
from ycore.types import Group

State = Mapping[str, Any]


class CheckpointPart(NamedTuple):
    of: Callable[[Any], Any]
    """Returns the part of a controller; None where the run has none."""
    reshard: Callable[[Sequence[Any], int], list[Any]]
    """Returns the states for this number of ranks, from the states of all ranks before."""


def states_of(controller: Any, *, of_round: bool = False) -> dict[str, Any]:
    """Return the state of every part; with `of_round` only what the last round added where a part tells it."""
    states = {}
    for name, part in PARTS.items():
        owner = part.of(controller)
        method = (
            "round_state_dict"
            if of_round and hasattr(owner, "round_state_dict")
            else "state_dict"
        )
        states[name] = None if owner is None else getattr(owner, method)()
    return states


def load_states(controller: Any, states: State) -> None:
    for name, part in PARTS.items():
        owner = part.of(controller)
        if owner is not None and states[name] is not None:
            owner.load_state_dict(states[name])


def reshard_states(states: Sequence[State], *, world: int) -> list[dict[str, Any]]:
    """Return the states for `world` ranks, from those of all ranks before them, in order."""
    parts = {
        name: part.reshard([state[name] for state in states], world)
        for name, part in PARTS.items()
    }
    return [{name: of_ranks[rank] for name, of_ranks in parts.items()} for rank in range(world)]


def _same(states: Sequence[Any], world: int) -> list[Any]:
    """Give all ranks the first state that is known: all ranks have the same, or only the first has any."""
    return [next((state for state in states if state is not None), None)] * world


def _dealt_out(states: Sequence[Any], world: int) -> list[Any]:
    """Deal lists of groups out by their positions."""
    groups = sorted((group for state in states for group in state or ()), key=_position)
    return [groups[rank::world] for rank in range(world)]


def _position(item: State) -> int:
    draw = item["group"]["draw"] if "group" in item else item["draw"]
    return int(draw["position"])


def _reshard_draws(states: Sequence[State], world: int) -> list[Any]:
    first = states[0]
    gaps, start = positions_to_come(
        [state["cursor"] for state in states], first["gaps"], first["start"]
    )
    return [{"cursor": 0, "gaps": list(gaps), "start": start}] * world


PARTS: Mapping[str, CheckpointPart] = {
    "draws": CheckpointPart(attrgetter("draws"), _reshard_draws),
    "acceptance": CheckpointPart(attrgetter("acceptance"), _same),
    "leftover_groups": CheckpointPart(attrgetter("leftover_groups"), _dealt_out),
    "placement": CheckpointPart(attrgetter("slots"), _same),
    "curriculum": CheckpointPart(attrgetter("draws.curriculum"), _same),
    "lengths": CheckpointPart(attrgetter("lengths"), _same),
    "unfinished_groups": CheckpointPart(attrgetter("carrier"), _dealt_out),
    "constraints": CheckpointPart(attrgetter("rules.constraints"), _same),
}
"""To add a part: give its class the two methods, and add it here."""


def positions_to_come(
    cursors: Sequence[int], gaps: Sequence[int], start: int
) -> tuple[tuple[int, ...], int]:
    """Return the positions that no rank has drawn, as a new `Shard`'s `gaps` and `start`.

    Args:
        cursors: how many positions each rank has drawn from its shard.
        gaps, start: of the shards that they drew from.
    """
    world = len(cursors)
    all_positions = Shard(gaps=tuple(gaps), start=start)
    end = max(len(gaps), max(cursors) * world)
    left = [
        all_positions.position(place)
        for place in range(end)
        if place // world >= cursors[place % world]
    ]
    start = all_positions.position(end)
    while left and left[-1] == start - 1:
        start = left.pop()
    return tuple(left), start


def reshard_round(rounds: Sequence[Sequence[Group]], *, world: int) -> list[list[Group]]:
    """Return a round's groups for `world` ranks, about the same number of tokens each, from all ranks' groups.

    Groups are dropped from the end where they cannot be divided evenly; such a round has another size and is not used.
    """
    groups = sorted(
        (group for rank_groups in rounds for group in rank_groups),
        key=lambda group: group.draw.position,
    )
    summaries = [
        GroupSummary(
            number % world, number // world, group.draw.position, group.num_tokens, teaches=True
        )
        for number, group in enumerate(groups)
    ]
    deal = deal_groups(summaries, world=world, per_rank=len(groups) // world)
    return [
        [groups[summary.index * world + summary.rank] for summary in rank_summaries]
        for rank_summaries in deal.chosen
    ]
