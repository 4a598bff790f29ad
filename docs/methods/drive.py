"""DRIVE (arXiv 2511.06307): the hard focus of its second stage, which keeps the most difficult prompts.

    ycore grpo --recipe quickstart --keep docs/methods/drive.py:hardest

Of the groups of a step only those with the lowest mean reward are trained on: all at first, then fewer with each step,
and LAST of them from step STEPS on. The paper narrows the data set itself in this way, with 64 completions a prompt and
after a stage on all prompts; here the easy groups are still written. Dynamic sampling replaces the groups that no
completion solves, so the hardest are those that can be solved at times. Prompts that stay solved are dropped before
they are written by `--curriculum on`.
"""

import math
from typing import Any

import torch
from torch import Tensor

LAST = 0.5
STEPS = 10


def hardest(groups: list[Any]) -> list[Tensor]:
    """1 for the completions of the hard groups, 0 for those of the rest."""
    share = 1 - (1 - LAST) * min(1.0, groups[0].step / STEPS)
    means = torch.stack([group.rewards.nanmean() for group in groups])
    places = means.nan_to_num(math.inf).argsort(stable=True).argsort()
    is_kept = places < math.ceil(share * len(groups))
    return [
        torch.full_like(group.rewards, float(kept))
        for group, kept in zip(groups, is_kept, strict=True)
    ]
