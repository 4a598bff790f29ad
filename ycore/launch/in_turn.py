"""Starting engines: all at once, or where they share a device by sleeping, one after the other.

vLLM refuses to start where less of a device is free than its share, and while it measures, it takes for its own what
others come to hold. So each engine of a device is ready, and asleep, before the next one starts, and all of them before
the trainer does.

Not here: watching them afterwards (`engine_watch`), and waking them (`roles.sleeping`).
"""

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from ycore.errors import EngineError
from ycore.launch.engine_processes import EngineProcess
from ycore.launch.engine_watch import EngineWatch, LiveEngine
from ycore.launch.health import says_ok
from ycore.placement.levels import DROP, KEEP
from ycore.placement.placement import ROLLOUT
from ycore.roles.sleeping import SLEEP, asleep_file, note_asleep

_LOOK_EVERY_S = 0.2


def start_in_turn(
    planned: Sequence[EngineProcess],
    start: Callable[[EngineProcess], LiveEngine],
    *,
    start_timeout_s: float,
    say: Callable[[str], None],
) -> list[LiveEngine]:
    """The engines in their order; those that sleep are ready and asleep, others have just been started."""
    if not any(one.sleeps for one in planned):
        return [start(one) for one in planned]
    started: dict[str, LiveEngine] = {}
    for turn in turns(planned):
        begun = {one.name: start(one) for one in turn}
        watch = EngineWatch(list(begun.values()), start_timeout_s=start_timeout_s, say=say)
        while not watch.are_ready:
            watch.look()
            time.sleep(_LOOK_EVERY_S)
        for one in turn:
            _put_to_sleep(one, timeout_s=start_timeout_s)
        started |= begun
    return [started[one.name] for one in planned]


def turns(planned: Sequence[EngineProcess]) -> list[list[EngineProcess]]:
    """The first engine of every device together, then the second of each, and so on."""
    by_device: dict[str | None, list[EngineProcess]] = {}
    for one in planned:
        by_device.setdefault(one.device, []).append(one)
    return [[one for one in turn if one is not None] for turn in zip_longest(*by_device.values())]


def _put_to_sleep(engine: EngineProcess, *, timeout_s: float) -> None:
    """The policy's weights are sent before they are used first; frozen ones are kept."""
    level = DROP if engine.role == ROLLOUT else KEEP
    if not says_ok(engine.socket, "POST", SLEEP.format(level=level), timeout_s=timeout_s):
        raise EngineError(
            f"{engine.name} does not sleep; see logs/{engine.name}.log, or let engines stay awake: engine.sleep=false"
        )
    note_asleep(asleep_file(engine.socket), level)
