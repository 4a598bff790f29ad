"""Advantage estimators: from the rewards of a round's groups to one advantage per completion. Pure functions.

Axes: `_P` prompts, `_G` completions of a group. `mask_PG` is True where a completion counts. Elsewhere the reward may
be anything, also NaN: the completion gets advantage 0, and no mean or deviation includes it. An estimator's function
gets the rewards with 0 there.

Standard deviations are of the sample (divided by n - 1) and get 1e-4 added, as in TRL; a deviation of fewer than two
values is 0. The arithmetic is in float64: the mean of equal float32 rewards is then exactly that reward, and a group
without spread gets advantages of exactly 0. A completion alone in its group gets 0 wherever the group's mean is used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ycore.scoring.constraints import Constraint

EPSILON = 1e-4
"""Added to every standard deviation: TRL's constant."""

_GROUP, _BATCH = (1,), (0, 1)


@dataclass(frozen=True, slots=True)
class Estimator:
    """Example: `ESTIMATORS["rloo"](rewards_PG, mask_PG)`."""

    name: str
    function: Callable[..., Tensor]
    needs_greedy: bool  # whether it takes the reward of each prompt's greedy completion

    def __call__(
        self, rewards_PG: Tensor, mask_PG: Tensor, *, greedy_P: Tensor | None = None
    ) -> Tensor:
        """Advantages, (P, G) float32, without gradient, on the device of the rewards."""
        if (
            rewards_PG.dim() != 2
            or mask_PG.shape != rewards_PG.shape
            or mask_PG.dtype != torch.bool
        ):
            given = f"{tuple(rewards_PG.shape)} and {tuple(mask_PG.shape)} of {mask_PG.dtype}"
            raise ValueError(
                f"rewards and mask must be (P, G), the mask of bools; they are {given}"
            )
        if self.needs_greedy != (greedy_P is not None):
            raise ValueError(
                f"{self.name} {'needs' if self.needs_greedy else 'takes no'} greedy rewards"
            )
        if greedy_P is not None and greedy_P.shape != rewards_PG.shape[:1]:
            raise ValueError(
                f"greedy rewards must be (P,) = {rewards_PG.shape[:1]}; they are {greedy_P.shape}"
            )
        with torch.no_grad():
            counted = (
                torch.where(mask_PG, rewards_PG, 0).float().double()
            )  # float32 is what rewards are stored in
            advantages = self.function(counted, mask_PG, *([] if greedy_P is None else [greedy_P]))
            return torch.where(mask_PG, advantages, 0).float()


ESTIMATORS: dict[str, Estimator] = {}


def _named(
    name: str, *, needs_greedy: bool = False
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        ESTIMATORS[name] = Estimator(name, function, needs_greedy)
        return function

    return register


@_named("group")
def group(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """GRPO: (r - mean of its group) / (deviation of its group + 1e-4).

    arXiv 2402.03300, section 4.1.2; TRL's `scale_rewards=group`.
    """
    return _centred(rewards_PG, mask_PG) / (_deviation(rewards_PG, mask_PG, _GROUP) + EPSILON)


@_named("dr-grpo")
def dr_grpo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """Dr. GRPO: r - mean of its group, not divided, so that a prompt's weight does not depend on its difficulty.

    arXiv 2503.20783, section 3.2; TRL's `scale_rewards=none`.
    """
    return _centred(rewards_PG, mask_PG)


@_named("rloo")
def rloo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """REINFORCE leave-one-out: r - mean of the other completions of its group = n / (n - 1) * (r - mean of all n).

    arXiv 2402.14740; TRL's RLOOTrainer.
    """
    counts = mask_PG.sum(dim=1, keepdim=True).double()
    others = (counts - 1).clamp(min=1)
    return _centred(rewards_PG, mask_PG) * counts / others


@_named("lite-ppo")
def lite_ppo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """Lite PPO: (r - mean of its group) / (deviation of all rewards of the batch + 1e-4).

    arXiv 2508.08221; TRL's `scale_rewards=batch`. Unlike in `reinforce++-baseline` the deviation is of the rewards
    themselves, so it includes the spread between prompts.
    """
    return _centred(rewards_PG, mask_PG) / (_deviation(rewards_PG, mask_PG, _BATCH) + EPSILON)


@_named("reinforce++-baseline")
def reinforce_plus_plus_baseline(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """REINFORCE++ with baseline: c = r - mean of its group; c / (deviation of all c of the batch + 1e-4).

    arXiv 2501.03262, the form for groups. The mean of all c is 0 by construction. A completion alone in its group
    counts with c = 0 in the deviation.
    """
    centred = _centred(rewards_PG, mask_PG)
    return centred / (_deviation(centred, mask_PG, _BATCH) + EPSILON)


@_named("remax", needs_greedy=True)
def remax(rewards_PG: Tensor, mask_PG: Tensor, greedy_P: Tensor) -> Tensor:
    """ReMax: r - the reward of the greedy completion of the same prompt, with one completion or more per prompt.

    arXiv 2310.10505. Where `greedy_P`, (P,), is NaN, the prompt has no baseline and gets 0.
    """
    baseline = greedy_P.double().unsqueeze(1)
    return torch.where(baseline.isnan(), 0, rewards_PG - baseline)


@_named("maxrl")
def maxrl(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """MaxRL: (r - mean of its group) / mean of its group, and 0 for a group whose mean is not above 0.

    arXiv 2602.02710, algorithm 1. For rewards of 0 and 1, a prompt solved at rate p weighs about 1 / p. In expectation
    the sum over the group, divided by n, is the gradient of -sum over k < n of (1 - p)^k / k, the log-likelihood log p
    cut after n - 1 terms. Rewards must not be negative: the mean is a rate.
    """
    means = _mean(rewards_PG, mask_PG, _GROUP)
    return _centred(rewards_PG, mask_PG) / torch.where(means > 0, means, torch.inf)


@_named("raft")
def raft(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """RAFT: 1 for the best completion of its group, shared by those that are equal, 0 for the others.

    arXiv 2304.06767, algorithm 1: fine-tuning on the best of n. A group without spread has no best one.
    """
    highest = torch.where(mask_PG, rewards_PG, -torch.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(mask_PG, rewards_PG, torch.inf).amin(dim=1, keepdim=True)
    best = (mask_PG & (rewards_PG == highest) & (highest > lowest)).double()
    return best / best.sum(dim=1, keepdim=True).clamp(min=1)


@_named("crpg")
def crpg(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """CGPO's policy gradient: r - mean of the batch, where r is the reward under constraints (`gated`).

    arXiv 2409.20370, eq. 12.
    """
    return rewards_PG - _mean(rewards_PG, mask_PG, _BATCH)


# -- rewards under constraints (CGPO, arXiv 2409.20370) ----------------------------------------------------------------
#
# `_N` are completions, whole groups next to each other, and NaN is a reward that nothing gave. The paper compares with
# one given answer a prompt, and here the baseline is the mean of the prompt's own completions.


def broken(rewards_NR: Tensor, held: Sequence[Constraint]) -> Tensor:
    """(N, C) float64: 1 where a completion breaks a constraint, 0 where it keeps it, NaN where that is not known."""
    values = torch.stack([rewards_NR[:, one.source] for one in held], dim=1)
    least = torch.tensor([one.least for one in held], device=values.device)
    return torch.where(values.isnan(), torch.nan, (values < least).double())


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
    totals = totals_N.double().view(-1, group_size)
    return (calibrated(totals, totals.nanmean(dim=1, keepdim=True)).flatten() * kept_N).masked_fill(
        kept_N.isnan(), torch.nan
    )


def near(log_ratios_N: Tensor, kl_max: float) -> Tensor:
    """max(1 - log(pi / pi_ref) / `kl_max`, 0) of whole completions: the factor of eq. 11."""
    return (1 - log_ratios_N / kl_max).clamp(min=0)


def _mean(values: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    return torch.where(mask, values, 0).sum(axes, keepdim=True) / mask.sum(
        axes, keepdim=True
    ).clamp(min=1)


def _deviation(values: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    squares = (
        torch.where(mask, values - _mean(values, mask, axes), 0).square().sum(axes, keepdim=True)
    )
    return (squares / (mask.sum(axes, keepdim=True) - 1).clamp(min=1)).sqrt()


def _centred(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards - _mean(rewards, mask, _GROUP)
