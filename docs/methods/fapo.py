"""FAPO (arXiv 2510.22543): a right answer by a flawed way is worth less than one by a sound way.

    ycore grpo --recipe quickstart --reward exact_answer --reward judge:reasoning --set rewards.1.weight=0 \\
        --no-dynamic-sampling --advantage docs/methods/fapo.py:flaw_aware

The first reward is the outcome, and the last, of weight 0, says 1 where the reasoning is sound and 0 where it is flawed
(the paper's generative reward model). The reward is 1 where the answer is right, -1 where it is wrong, less LAMBDA where
it is right and flawed; the advantage is GRPO's. With LAMBDA = 1 a flawed right answer gains where wrong ones are the most,
and loses where sound ones are.
"""

from typing import Any

from torch import Tensor

LAMBDA = 1.0


def flaw_aware(group: Any) -> Tensor:
    """The advantages of a group."""
    sources = list(group.rewards_by_source.values())
    right = (sources[0] > 0).double()
    flawed = (sources[-1] <= 0).double()
    rewards = 2 * right - 1 - LAMBDA * right * flawed
    scored = ~group.rewards.isnan()
    deviation = rewards[scored].std() if scored.sum() > 1 else 0.0
    return (rewards - rewards[scored].mean()) / (deviation + 1e-4)
