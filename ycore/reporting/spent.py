"""Where every device second of a run went, and what a group that taught something cost. Pure.

A step's seconds are its sync, its round and its training, and what is left over. The round's are divided by what its
engines did: idle and swapping as measured, judging by its share of the busy seconds in the run's trace, and the rest by
the groups that were written: those that taught, those without variance and other groups that were not trained on. Of
what taught, the completions that were cut off at the limit stand apart.

Not here: reading a run (`record`), drawing (`figures`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ycore.telemetry.trace import ROUND, SWAP, Span, busy_stretches

Row = Mapping[str, Any]

PARTS = (
    "useful tokens",
    "cut off at the limit",
    "groups not trained on",
    "judging",
    "swaps",
    "idle",
    "weight sync",
    "training",
    "other",
)
_WRITES = "rollout"  # the role whose turns are completions; the others score them


@dataclass(frozen=True, slots=True)
class Spent:
    """Device seconds of a run, by what they went into, in the order of PARTS."""

    seconds: Mapping[str, float]
    informative_groups: float
    num_slots: int

    @property
    def total(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def per_informative_group(self) -> float | None:
        """Device seconds for each group with a gradient; None where there was none."""
        return self.total / self.informative_groups if self.informative_groups > 0 else None


def judging_share(spans: Iterable[Span]) -> float:
    """Of the seconds with requests in flight, slot by slot and role by role, those of judges and reward models.

    Where a judge and a rollout are in flight on one slot at once, both count.
    """
    lanes: dict[tuple[int, int, str], list[Span]] = {}
    for span in spans:
        if span.name not in (SWAP, ROUND):
            lanes.setdefault((span.rank, span.slot, span.name), []).append(span)
    busy = {lane: math.fsum(seconds for _, seconds in busy_stretches(own)) for lane, own in lanes.items()}
    whole = math.fsum(busy.values())
    return math.fsum(seconds for (*_, role), seconds in busy.items() if role != _WRITES) / whole if whole else 0.0


def spent(metrics: Sequence[Row], *, prompts_per_step: int, num_slots: int, judging: float = 0.0) -> Spent:
    """The sum over the run's steps; every slot is counted for the whole of every step.

    `judging` is the run's `judging_share`, taken as that of every step.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    informative = 0.0
    for row in metrics:
        if "ycore/time/step" not in row and "step_time" not in row:
            continue
        for part, value in _step(row, prompts_per_step, judging).items():
            seconds[part] += value * num_slots
        informative += prompts_per_step * (1 - _number(row, "frac_reward_zero_std"))
    return Spent(seconds, informative, num_slots)


def _step(row: Row, prompts: int, judging_share: float) -> dict[str, float]:
    """One step's seconds, by part."""
    whole = _number(row, "ycore/time/step", _number(row, "step_time"))
    sync, in_round, train = (_number(row, f"ycore/time/{name}") for name in ("sync", "round", "train"))
    idle = in_round * min(1.0, _number(row, "ycore/idle_share"))
    swaps = min(_number(row, "ycore/swap_s"), in_round - idle)
    judging = (in_round - idle - swaps) * judging_share
    writing = in_round - idle - swaps - judging
    drawn = max(_number(row, "ycore/sampling/drawn", prompts), 1.0)
    taught = min(1.0, prompts * (1 - _number(row, "frac_reward_zero_std")) / drawn)
    cut = min(1.0, _number(row, "completions/clipped_ratio"))
    return {
        "useful tokens": writing * taught * (1 - cut),
        "cut off at the limit": writing * taught * cut,
        "groups not trained on": writing * (1 - taught),
        "judging": judging,
        "swaps": swaps,
        "idle": idle,
        "weight sync": sync,
        "training": train,
        "other": max(0.0, whole - sync - in_round - train),
    }


def _number(row: Row, name: str, otherwise: float = 0.0) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else otherwise
