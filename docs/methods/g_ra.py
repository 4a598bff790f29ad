"""G-RA, gated reward accumulation (arXiv 2508.10548): rewards of the way count only where the outcome is good enough.

    ycore grpo --recipe quickstart --reward exact_answer --reward length --set rewards.1.weight=0 \\
        --set rewards.1.args.target=1 --advantage docs/methods/g_ra.py:gated

The first reward is the outcome; the others are added where it reaches THRESHOLD, and left out below it. A policy then
cannot live on the rewards of the way. The advantage is GRPO's.
"""

from typing import Any

import torch
from torch import Tensor

THRESHOLD = 0.5


def gated(group: Any) -> Tensor:
    """The advantages of a group."""
    outcome, *ways = [values.nan_to_num(0.0) for values in group.rewards_by_source.values()]
    immediate = torch.stack(ways).sum(dim=0) if ways else torch.zeros_like(outcome)
    rewards = outcome + immediate * (outcome >= THRESHOLD)
    scored = ~group.rewards.isnan()
    deviation = rewards[scored].std() if scored.sum() > 1 else 0.0
    return (rewards - rewards[scored].mean()) / (deviation + 1e-4)
