"""DPH-RL (arXiv 2509.07430): what the policy can do already is rehearsed against the first model, the rest is learned.

    ycore grpo --recipe quickstart --beta 1e-6 --no-dynamic-sampling --loss docs/methods/dph_rl.py:rehearsed

Groups that are solved get ETA times the forward KL to the reference and nothing else; all other groups get PPO's clip
without a KL. The paper draws answers of the reference once, before training, from the prompts that it solves. A loss
sees the policy's completions only, so each token weighs the reference's probability over the policy's, which gives the
same gradient in expectation. `--beta` above 0 gives the reference, and its size does not matter. A micro-batch must hold
whole groups. `--divergence forward-kl` and `js` put the divergence on every token instead.
"""

import torch
from torch import Tensor

ETA = 0.05
SOLVED = 1.0
"""The mean reward of a group from which on it is rehearsed."""


def rehearsed(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    engine_weights: Tensor,
    advantages: Tensor,
    rewards: Tensor,
    group_size: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss by token, and the share of groups that are rehearsed."""
    ratio = (logprobs - old_logprobs).exp()
    bounded = ratio.clamp(0.8, 1.2)
    learned = -torch.min(ratio * advantages, bounded * advantages) * engine_weights
    # The gradient of -E_ref[log pi]; the 1 changes no expectation, and much of the variance.
    weights = (ref_logprobs - logprobs).exp().detach() - 1
    kept = -ETA * weights * logprobs
    is_solved = rewards.view(-1, group_size).nanmean(dim=1) >= SOLVED
    by_row = is_solved.repeat_interleave(group_size).unsqueeze(1)
    return torch.where(by_row, kept, learned), {"dph/solved": is_solved.float().mean()}
