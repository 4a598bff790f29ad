"""What a controller must remember to go on exactly where it was: cursor, yield, surplus, and what placement learned.

Not here: the checkpoint that it becomes part of (`roles.checkpoints`).
"""

from typing import Any

from ycore.controller.source import Rounds
from ycore.controller.wire import finished_from_json, finished_to_json
from ycore.sampling.demand import Yield


def controller_state(rounds: Rounds) -> dict[str, Any]:
    """Plain JSON values."""
    yields = rounds.round.yields
    return {
        "cursor": rounds.draws.cursor,
        "yield": {"kept": yields.kept, "finished": yields.finished},
        "surplus": [finished_to_json(item) for item in rounds.surplus.waiting],
        "placement": rounds.round.slots.allocator.state(),
    }


def restore_controller(rounds: Rounds, state: dict[str, Any]) -> None:
    """Set a controller to what `controller_state` told."""
    rounds.draws.cursor = state["cursor"]
    rounds.round.yields = Yield(**state["yield"])
    rounds.surplus.waiting = [finished_from_json(item) for item in state["surplus"]]
    if "placement" in state:  # not yet in what earlier versions wrote
        rounds.round.slots.allocator.restore(state["placement"])
