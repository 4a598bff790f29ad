"""PROF (arXiv 2509.03403): a filter by the consistency of process and outcome.

    ycore grpo --recipe quickstart --reward exact_answer --reward judge:reasoning --set rewards.1.weight=0 \\
        --keep docs/methods/prof.py:consistent

The first reward is the outcome, and the last, of weight 0, the mean value of the steps, for example of a judge or a
process reward model. Of the right answers those with the highest values are kept, and of the wrong ones those with the
lowest, so many that right and wrong are as balanced as they can be. Each then counts in GRPO as always.
"""

from typing import Any

import torch
from torch import Tensor

KEPT = 0.5
"""The share of a group that is kept: m of n in the paper, which takes 4 of 8."""


def consistent(groups: list[Any]) -> list[Tensor]:
    """1 for what is kept, 0 for the rest."""
    return [_kept(group) for group in groups]


def _kept(group: Any) -> Tensor:
    sources = list(group.rewards_by_source.values())
    process = sources[-1].nan_to_num(0.0)
    right = sources[0] > 0
    wrong = (sources[0] <= 0) & ~group.rewards.isnan()
    wanted = max(1, round(len(right) * KEPT))
    # As many of either as there are, at most half; what one side lacks the other gives.
    num_right = min(int(right.sum()), max(wanted // 2, wanted - int(wrong.sum())))
    num_wrong = min(int(wrong.sum()), wanted - num_right)
    kept = torch.zeros_like(process)
    for chosen, number, values in ((right, num_right, process), (wrong, num_wrong, -process)):
        best = values.masked_fill(~chosen, -torch.inf).topk(number).indices
        kept[best] = 1.0
    return kept
