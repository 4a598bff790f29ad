"""How a round is to go: the division it starts with, and the manner in which slots change their role afterwards.

Not here: which plan promises the shortest round (`division`), and what was learned of the manners (`experience`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ycore.placement.placement import Division

Manner = Literal["divided", "held", "phases", "together", "shared"]
"""
divided: roles have slots of their own from the start, and single slots move when they run dry and it pays.
held: the same without moves, as a split.
phases: all roll out, then all change together; deep batches, no overlap.
together: all roll out, and single slots leave as they run dry.
shared: every slot does every role's work at once, as it comes; only where the engines of all roles stay up.
"""

MANNERS: tuple[Manner, ...] = ("divided", "held", "phases", "together", "shared")


@dataclass(frozen=True, slots=True)
class Plan:
    """Example: `Plan({"rollout": 3, "judge": 1}, "divided")`."""

    division: Division
    manner: Manner


Factors = Mapping[Manner, float]
"""By manner: what a round takes, over its forecast."""
