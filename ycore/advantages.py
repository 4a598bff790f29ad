"""Advantage estimators: from the rewards of a round's groups to one advantage per completion. Pure functions.

A new estimator is a function here and a row in docs/algorithms.md. The config takes its names from here, so this file
does not import torch: it calls methods of the tensors that it is given.

Axes: `_P` prompts, `_G` completions of a group. `mask_PG` is True where a completion counts. Elsewhere the reward may
be anything, also NaN: the completion gets advantage 0, and no mean or deviation includes it. An estimator's function
gets the rewards with 0 there.

Standard deviations are of the sample (divided by n - 1) and get 1e-4 added, as in TRL; a deviation of fewer than two
values is 0. The arithmetic is in float64: the mean of equal float32 rewards is then exactly that reward, and a group
without spread gets advantages of exactly 0. A completion alone in its group gets 0 wherever the group's mean is used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-4
"""Added to every standard deviation: TRL's constant."""

TOLERANCE = 1e-6
"""Rewards nearer than this count as equal: sums of floats are seldom equal to the bit."""

TOKEN_ADVANTAGE = "reinforce++"
"""REINFORCE++ has an advantage for each token, which `ycore.trl.grpo` computes."""

TURN_ADVANTAGE = "turn"
"""MT-GRPO has an advantage for each turn of the policy, which `ycore.trl.grpo` computes."""

_GROUP = (1,)
_BATCH = (0, 1)


@dataclass(frozen=True)
class Estimator:
    """Example: `ESTIMATORS["rloo"](rewards_PG, mask_PG)`."""

    function: "Callable[..., Tensor]"
    needs_greedy: bool  # whether it takes the reward of each prompt's greedy completion

    def __call__(
        self, rewards_PG: "Tensor", mask_PG: "Tensor", *, greedy_P: "Tensor | None" = None
    ) -> "Tensor":
        """Advantages, (P, G) float32, without gradient. `mask_PG` is of bools; `greedy_P` only where it is needed."""
        # Rewards are stored in float32.
        rewards = rewards_PG.detach().where(mask_PG, 0).float().double()
        baseline = [greedy_P] if self.needs_greedy else []
        return self.function(rewards, mask_PG, *baseline).where(mask_PG, 0).float()


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str, *, needs_greedy: bool = False
) -> "Callable[[Callable[..., Tensor]], Callable[..., Tensor]]":
    """Register a function as the estimator `--advantage NAME`."""

    def register(function: "Callable[..., Tensor]") -> "Callable[..., Tensor]":
        ESTIMATORS[name] = Estimator(function, needs_greedy)
        return function

    return register


@estimator("group")
def group(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """GRPO: (r - mean of its group) / (deviation of its group + 1e-4).

    arXiv 2402.03300, section 4.1.2; TRL's `scale_rewards=group`.
    """
    return _centred(rewards_PG, mask_PG) / (_deviation(rewards_PG, mask_PG, _GROUP) + EPSILON)


@estimator("dr-grpo")
def dr_grpo(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """Dr. GRPO: r - mean of its group, not divided, so that a prompt's weight does not depend on its difficulty.

    arXiv 2503.20783, section 3.2; TRL's `scale_rewards=none`.
    """
    return _centred(rewards_PG, mask_PG)


@estimator("rloo")
def rloo(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """REINFORCE leave-one-out: r - mean of the other completions of its group = n / (n - 1) * (r - mean of all n).

    arXiv 2402.14740; TRL's RLOOTrainer.
    """
    counts = mask_PG.sum(dim=1, keepdim=True).double()
    return _centred(rewards_PG, mask_PG) * counts / (counts - 1).clamp(min=1)


@estimator("lite-ppo")
def lite_ppo(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """Lite PPO: (r - mean of its group) / (deviation of all rewards of the batch + 1e-4).

    arXiv 2508.08221; TRL's `scale_rewards=batch`. Unlike in `reinforce++-baseline` the deviation is of the rewards
    themselves, so it includes the spread between prompts.
    """
    return _centred(rewards_PG, mask_PG) / (_deviation(rewards_PG, mask_PG, _BATCH) + EPSILON)


@estimator("reinforce++-baseline")
def reinforce_plus_plus_baseline(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """REINFORCE++ with baseline: c = r - mean of its group; c / (deviation of all c of the batch + 1e-4).

    arXiv 2501.03262, the form for groups. The mean of all c is 0 by construction. A completion alone in its group
    counts with c = 0 in the deviation.
    """
    centred = _centred(rewards_PG, mask_PG)
    return centred / (_deviation(centred, mask_PG, _BATCH) + EPSILON)


@estimator("remax", needs_greedy=True)
def remax(rewards_PG: "Tensor", mask_PG: "Tensor", greedy_P: "Tensor") -> "Tensor":
    """ReMax: r - the reward of the greedy completion of the same prompt, with one completion or more per prompt.

    arXiv 2310.10505. Where `greedy_P`, (P,), is NaN, the prompt has no baseline and gets 0.
    """
    baseline = greedy_P.double().unsqueeze(1)
    return (rewards_PG - baseline).where(~baseline.isnan(), 0)


@estimator("maxrl")
def maxrl(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """MaxRL: (r - mean of its group) / mean of its group, and 0 for a group whose mean is not above 0.

    arXiv 2602.02710, algorithm 1. For rewards of 0 and 1, a prompt solved at rate p weighs about 1 / p. In expectation
    the sum over the group, divided by n, is the gradient of -sum over k < n of (1 - p)^k / k, the log-likelihood log p
    cut after n - 1 terms. Rewards must not be negative: the mean is a rate.
    """
    means = _mean(rewards_PG, mask_PG, _GROUP)
    return _centred(rewards_PG, mask_PG) / means.where(means > 0, math.inf)


@estimator("raft")
def raft(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """RAFT: 1 for the best completion of its group, shared by those that are equal, 0 for the others.

    arXiv 2304.06767, algorithm 1: fine-tuning on the best of n. A group without spread has no best one.
    """
    highest = rewards_PG.where(mask_PG, -math.inf).amax(dim=1, keepdim=True)
    lowest = rewards_PG.where(mask_PG, math.inf).amin(dim=1, keepdim=True)
    differ = highest - lowest > TOLERANCE
    best = (mask_PG & (highest - rewards_PG <= TOLERANCE) & differ).double()
    return best / best.sum(dim=1, keepdim=True).clamp(min=1)


@estimator("crpg")
def crpg(rewards_PG: "Tensor", mask_PG: "Tensor") -> "Tensor":
    """CGPO's policy gradient: r - mean of the batch, where r is the reward under constraints (`constrained.gated`).

    arXiv 2409.20370, eq. 12.
    """
    return rewards_PG - _mean(rewards_PG, mask_PG, _BATCH)


ADVANTAGES = (*ESTIMATORS, TOKEN_ADVANTAGE, TURN_ADVANTAGE)
"""The names that `--advantage` takes; `group` leaves the advantage to TRL."""


def _mean(values: "Tensor", mask: "Tensor", axes: tuple[int, ...]) -> "Tensor":
    counts = mask.sum(axes, keepdim=True).clamp(min=1)
    return values.where(mask, 0).sum(axes, keepdim=True) / counts


def _deviation(values: "Tensor", mask: "Tensor", axes: tuple[int, ...]) -> "Tensor":
    centred = (values - _mean(values, mask, axes)).where(mask, 0)
    counts = mask.sum(axes, keepdim=True)
    return (centred.square().sum(axes, keepdim=True) / (counts - 1).clamp(min=1)).sqrt()


def _centred(rewards: "Tensor", mask: "Tensor") -> "Tensor":
    return rewards - _mean(rewards, mask, _GROUP)
