"""With dynamic sampling, what is drawn next depends on which group ends first; but no prompt is lost or comes twice.

Every prompt that was drawn is trained on, waits for a later step, or could teach nothing. The job's reward makes the
last of these a property of the prompt's row, so that it is known here.

Not here: runs that repeat to the bit (`comparison`).
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ycore.data.prompts import PromptOrder
from ycore.selftest.job import NUM_ROWS, is_dull

Rounds = Sequence[Mapping[str, Any]]


def read_rounds(journal: Path) -> Rounds:
    """The rounds of rank 0, in the order of their steps; the first line of each file is its label."""
    files = sorted(journal.glob("round-*-rank-0.json"))
    return [json.loads(file.read_bytes().partition(b"\n")[2]) for file in files]


def account(rounds: Rounds, *, steps: int, seed: int) -> list[str]:
    """What is wrong with the rounds of a run that took so many steps; nothing where the account is even. Pure."""
    if len(rounds) != steps:
        return [f"{len(rounds)} rounds for {steps} steps"]
    state, order = rounds[-1]["state"], PromptOrder(seed=seed, num_rows=NUM_ROWS)
    taken = Counter(_position(group) for told in rounds for group in told["groups"])
    taken.update(_position(item["group"]) for item in state["surplus"])
    drawn = range(state["cursor"])
    lost = [place for place in drawn if place not in taken and not is_dull(order.row_at(place))]
    twice = sorted(place for place, count in taken.items() if count > 1)
    unknown = sorted(taken.keys() - set(drawn))
    told = {"lost": lost, "taken twice": twice, "never drawn": unknown}
    return [f"prompts {what}, at positions {places}" for what, places in told.items() if places]


def _position(group: Mapping[str, Any]) -> int:
    return int(group["draw"]["position"])
