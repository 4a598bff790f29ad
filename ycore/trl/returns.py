"""From rewards and values of tokens to advantages and value targets. Pure functions.

Axes: `_BT` completions and their tokens; `mask` is 1 at the policy's own tokens, which alone are actions: what an
environment wrote between them is skipped. There is no discount: gamma is 1. The arithmetic is in float64.

`AddUp` sums a vector over all ranks.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

AddUp = Callable[[Tensor], Tensor]
EPSILON = 1e-8
"""Added to the deviation of the tokens' advantages."""


def last_token(mask_BT: Tensor) -> Tensor:
    """(B, T), True at each completion's last action."""
    counts = mask_BT.cumsum(dim=1)
    return mask_BT.bool() & (counts == counts[:, -1:])


def to_go(rewards_BT: Tensor) -> Tensor:
    """(B, T): the sum of each token's reward and of those after it."""
    return rewards_BT.flip(1).cumsum(1).flip(1)


def advantages_and_targets(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    lam: float,
    target_lam: float,
    alpha: float | None = None,
    macro_tokens: int = 1,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16): A_t = sum over l of lam^l * delta_(t+l).

    delta_t = r_t + V_(t+1) - V_t, and after the last action V is 0.

    Args:
        lam: of the policy's advantages.
        target_lam: of the value targets A_t + V_t (decoupled GAE, arXiv 2503.01491); 1 gives Monte Carlo returns.
        alpha: lam is 1 - 1 / (alpha * l) instead, at least 0, for a completion of l actions (arXiv 2504.05118, eq. 5).
        macro_tokens: tokens of a macro action (arXiv 2410.02743). Its reward is the sum over its tokens, its value
            their mean, and its advantage and target count for each of them. 1 is PPO.

    Returns:
        Advantages and targets, (B, T) float64, 0 outside of the mask.
    """
    mask = mask_BT.bool()
    place = ((mask.long().cumsum(dim=1) - 1) // macro_tokens).clamp(min=0)

    def by_action(values_of_tokens: Tensor) -> Tensor:
        of_actions = torch.where(mask, values_of_tokens.double(), 0)
        return torch.zeros_like(of_actions).scatter_add(1, place, of_actions)

    sizes = by_action(mask)
    rewards = by_action(rewards_BT)
    values = by_action(values_BT) / sizes.clamp(min=1)
    is_action = sizes > 0
    policy_lam = torch.full_like(values[:, 0], lam)
    if alpha is not None:
        num_actions = is_action.sum(dim=1).clamp(min=1).double()
        policy_lam = (1 - 1 / (alpha * num_actions)).clamp(min=0)

    def by_token(values_of_actions: Tensor) -> Tensor:
        return torch.where(mask, values_of_actions.gather(1, place), 0)

    estimate = partial(_advantages_of_actions, rewards, values, is_action)
    targets = values + estimate(torch.full_like(policy_lam, target_lam))
    return by_token(estimate(policy_lam)), by_token(targets)


def _advantages_of_actions(
    rewards: Tensor, values: Tensor, is_action: Tensor, lam_B: Tensor
) -> Tensor:
    """Return A_t of each action, from the last one back."""
    advantages = torch.zeros_like(values)
    next_value_B = torch.zeros_like(lam_B)
    sum_B = torch.zeros_like(lam_B)
    for step in range(int(is_action.sum(dim=1).max()) - 1, -1, -1):
        acts_B = is_action[:, step]
        value_B = values[:, step]
        new_sum_B = rewards[:, step] + next_value_B - value_B + lam_B * sum_B
        sum_B = torch.where(acts_B, new_sum_B, sum_B)
        next_value_B = torch.where(acts_B, value_B, next_value_B)
        advantages[:, step] = torch.where(acts_B, sum_B, 0)
    return advantages


def whitened(advantages_BT: Tensor, mask_BT: Tensor, add_up: AddUp) -> Tensor:
    """(A - mean) / (deviation + EPSILON) over the tokens of all ranks (n - 1), 0 outside of the mask.

    Per rank it would be wrong: two ranks with different rewards would then push in opposite directions.
    """
    mask = mask_BT.bool()
    count, total = add_up(torch.stack([mask.sum().double(), advantages_BT[mask].sum()]))
    centred = torch.where(mask, advantages_BT - total / count.clamp(min=1), 0)
    variance = add_up(centred.square().sum().reshape(1))[0] / (count - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)


def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, add_up: AddUp
) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens of all ranks; None where all returns are equal.

    Above 0 the critic's advantages vary less than those of the batch's mean (arXiv 2604.19485). `returns_BT` must be
    Monte Carlo returns: targets that hold the critic's own values make a bad critic look good.
    """
    mask = mask_BT.bool()
    returns = returns_BT[mask].double()
    errors = (returns_BT - values_BT)[mask].double()
    own_count = returns.new_tensor(float(returns.numel()))
    count, total, total_error = add_up(torch.stack([own_count, returns.sum(), errors.sum()]))
    count = count.clamp(min=1)
    squares = (returns - total / count).square().sum()
    error_squares = (errors - total_error / count).square().sum()
    all_squares, all_error_squares = add_up(torch.stack([squares, error_squares])).tolist()
    if all_squares <= EPSILON * float(count):
        return None
    return float(1 - all_error_squares / all_squares)


def value_losses(
    values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None
) -> Tensor:
    """Half the squared error; with `clip`, the larger of it and that of values moved at most so far from the old."""
    losses = (values - targets).square()
    if clip is not None:
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        losses = torch.maximum(losses, (clipped - targets).square())
    return losses / 2
