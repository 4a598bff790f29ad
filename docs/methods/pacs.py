"""PACS (arXiv 2509.02522): reinforcement learning as a supervised problem, to foretell whether an answer is right.

    ycore grpo --recipe quickstart --beta 1e-6 --no-dynamic-sampling --loss docs/methods/pacs.py:supervised

The score of an answer is BETA times the sum of log(pi / pi_ref) over its tokens, less the mean of the other answers of its
prompt (leave-one-out). The loss is the cross-entropy of its sigmoid with the reward, 0 or 1. A micro-batch must hold
whole groups: --per-device-train-batch-size is a multiple of the group. `--beta` above 0 gives the reference, and its size
does not matter. The paper's weights by class are left out.
"""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

BETA = 1.0


def supervised(
    logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, mask: Tensor, group_size: int
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch, and how often the sign of the score is right."""
    sums = BETA * ((logprobs - ref_logprobs) * mask).sum(dim=1).view(-1, group_size)
    others = (sums.sum(dim=1, keepdim=True) - sums) / max(1, group_size - 1)
    scores = (sums - others).flatten()
    scored = ~rewards.isnan()
    right = (rewards > 0).float()
    losses = binary_cross_entropy_with_logits(scores, right, reduction="none")
    loss = torch.where(scored, losses, 0.0).sum() / scored.sum().clamp(min=1)
    return loss, {"pacs/accuracy": ((scores > 0) == right.bool())[scored].float().mean().item()}
