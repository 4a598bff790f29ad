"""Rewards under constraints (CGPO, arXiv 2409.20370). Pure functions.

`_N` are completions, whole groups next to each other, and NaN is a reward that nothing gave. The paper compares with one
given answer a prompt, and here the baseline is the mean of the prompt's own completions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ycore.scoring.group_rewards import Constraint


def broken(rewards_NR: Tensor, constraints: Sequence[Constraint]) -> Tensor:
    """(N, C) float64: 1 where a completion breaks a constraint, 0 where it keeps it, NaN where that is not known."""
    values_NC = rewards_NR[:, [constraint.source for constraint in constraints]]
    least_C = values_NC.new_tensor([constraint.least for constraint in constraints])
    return torch.where(values_NC.isnan(), torch.nan, (values_NC < least_C).double())


def kept(broken_NC: Tensor) -> Tensor:
    """(N,): 1 where all constraints hold, 0 where one is broken, whatever is known of the others, else NaN.

    All must hold, as in the paper's text; its Algorithm 1 writes "or".
    """
    any_broken = (broken_NC == 1).any(dim=1)
    unknown = broken_NC.isnan().any(dim=1) & ~any_broken
    return (~any_broken).double().masked_fill(unknown, torch.nan)


def calibrated(totals: Tensor, baseline: Tensor | float) -> Tensor:
    """sigmoid(r - baseline): how likely a completion is preferred to the baseline (eq. 5), between 0 and 1."""
    return torch.sigmoid(totals.double() - baseline)


def gated(totals_N: Tensor, kept_N: Tensor, group_size: int) -> Tensor:
    """`calibrated` by the group's mean where all constraints hold, else 0 (eq. 8), so below any that holds them.

    A 0 counts: unlike a completion that is left out, it lowers the mean and has a negative advantage.
    """
    totals_PG = totals_N.double().view(-1, group_size)
    rewards_PG = calibrated(totals_PG, totals_PG.nanmean(dim=1, keepdim=True))
    return (rewards_PG.flatten() * kept_N).masked_fill(kept_N.isnan(), torch.nan)
