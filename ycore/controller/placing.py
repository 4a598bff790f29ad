"""From a run's configuration and its engines to the Slots of one rank, and to who sleeps there.

Not here: whether the placement can be had (`launch.placing`), and what follows from it (`placement.allocator`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from ycore.config.run import RunConfig
from ycore.controller.dispatch import Sleeper, Slots
from ycore.placement.allocator import Allocator
from ycore.placement.hall import Hall
from ycore.placement.levels import SleepLevels
from ycore.placement.placement import ROLLOUT
from ycore.placement.words import in_order, parse_placement
from ycore.roles.engine import Engine
from ycore.roles.server import Server
from ycore.roles.sleeping import SleepingEngine, SleepTogether, reload_from_disk
from ycore.roles.vllm_engine import VllmEngine
from ycore.run_folder.paths import RunFolder
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
    sleepers: Mapping[str, Sequence[Sleeper]] | None = None,
) -> Slots:
    """This rank's slots under the run's placement. `scorers`: the roles that have an engine beside each rollout engine.

    Without `sleepers`, engines of all roles stay up, so a change of role is one of who gets requests; with rollouts
    only nothing changes. With them one role of a slot is awake at a time, and a change of role is a sleep and a wake.
    """
    roles = in_order([ROLLOUT, *scorers])
    capacity = None if len(roles) == 1 else dict.fromkeys(roles, max_num_seqs or _AT_ONCE)
    hall = Hall(num_slots, roles, capacity, exclusive=sleepers is not None)
    allocator = Allocator(hall, parse_placement(config.placement))
    return Slots(num_slots, allocator=allocator, sleepers=sleepers, trace=TraceWriter(trace), rank=rank)


def slot_sleepers(
    folder: RunFolder, engines: Sequence[Engine], scorers: Sequence[tuple[str, Sequence[Server]]]
) -> dict[str, list[Sleeper]]:
    """Who sleeps on this rank's slots, by role and slot. `scorers`: each model's role, and its servers slot by slot.

    A policy's weights are sent anew, so they are dropped; of a frozen model the level is learned, on all slots at once.
    """
    by_role: dict[str, list[list[SleepingEngine]]] = {}
    for role, servers in scorers:
        levels = SleepLevels()
        beds = [
            SleepingEngine(server, folder.socket(server.name), refill=partial(reload_from_disk, server), levels=levels)
            for server in servers
        ]
        by_role.setdefault(role, []).append(beds)
    rollouts: list[Sleeper] = [
        engine.sleeper for engine in engines if isinstance(engine, VllmEngine) and engine.sleeper is not None
    ]
    frozen: dict[str, list[Sleeper]] = {
        role: [SleepTogether(on_slot) for on_slot in zip(*models, strict=True)] for role, models in by_role.items()
    }
    return {ROLLOUT: rollouts, **frozen}
