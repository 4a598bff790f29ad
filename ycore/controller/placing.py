"""From a run's configuration and its engines to the Slots of one rank.

Not here: whether the placement can be had (`launch.placing`), and what follows from it (`placement.allocator`).
"""

from collections.abc import Sequence
from pathlib import Path

from ycore.config.run import RunConfig
from ycore.controller.dispatch import Slots
from ycore.placement.allocator import Allocator, Hall
from ycore.placement.placement import ROLLOUT
from ycore.placement.words import in_order, parse_placement
from ycore.telemetry.trace import TraceWriter

_AT_ONCE = 64
"""Requests a slot holds of a role, where the engines' own limit is not known."""


def placed_slots(
    config: RunConfig,
    scorers: Sequence[str],
    *,
    num_slots: int,
    max_num_seqs: int | None,
    trace: Path,
    rank: int = 0,
) -> Slots:
    """This rank's slots under the run's placement. `scorers`: the roles that have an engine beside each rollout engine.

    Engines of all roles stay up, so a change of role is one of who gets requests; with rollouts only nothing changes.
    """
    roles = in_order([ROLLOUT, *scorers])
    capacity = None if len(roles) == 1 else dict.fromkeys(roles, max_num_seqs or _AT_ONCE)
    allocator = Allocator(Hall(num_slots, roles, capacity), parse_placement(config.placement))
    return Slots(num_slots, allocator=allocator, trace=TraceWriter(trace), rank=rank)
