"""The losses of a flow model on rewarded pictures: DiffusionNFT's, Flow-GRPO's, and distances to a reference.

Shapes: rewards and advantages are [B], points and velocities [B, C, H, W]. Losses are means over pictures.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ycore.flow.denoising import DenoisingStep

MIN_STD = 1e-4


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, limit: float = 5.0
) -> list[list[float]]:
    """A reward less its group's mean, over the deviation of all the round's rewards (Flow-GRPO, arXiv 2505.05470),
    within `limit`; 0 for a picture without a reward."""
    flat = [value for group in rewards for value in group if value is not None]
    mean = sum(flat) / len(flat) if flat else 0.0
    std = (sum((value - mean) ** 2 for value in flat) / len(flat)) ** 0.5 if flat else 0.0
    scale = std + MIN_STD
    advantages = []
    for group in rewards:
        known = [reward for reward in group if reward is not None]
        mean = sum(known) / len(known) if known else 0.0
        scaled = [0.0 if reward is None else (reward - mean) / scale for reward in group]
        advantages.append([max(-limit, min(limit, advantage)) for advantage in scaled])
    return advantages


def noised(x0: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The points at these times ([B]) on the straight lines from pictures to noise."""
    t = times.view(-1, *[1] * (x0.dim() - 1))
    return (1 - t) * x0 + t * noise


def nft_loss(
    v: torch.Tensor,
    v_old: torch.Tensor,
    x: torch.Tensor,
    x0: torch.Tensor,
    times: torch.Tensor,
    share: torch.Tensor,
    *,
    b: float = 1.0,
    adaptive: bool = True,
) -> torch.Tensor:
    """DiffusionNFT's loss (arXiv 2509.16117, eq. 5 to 8), [B].

    With `share` r in [0, 1], how good a picture is, and `v+ = (1 - b) v_old + b v`, `v- = (1 + b) v_old - b v`:
    `r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w-`, where `x0(v) = x - t v`, and w is the mean absolute error,
    without a gradient. Without `adaptive` both w are 1, and the minimum over v is
    `v_old + (2 / b) E[r | x] (v_good - v_old)`, with `v_good` the velocity of the pictures weighted by r.
    """
    t = times.view(-1, *[1] * (x.dim() - 1))

    def error(velocity: torch.Tensor) -> torch.Tensor:
        miss = x - t * velocity - x0
        weight = (
            miss.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
            if adaptive
            else torch.ones(len(x))
        )
        return (miss**2).flatten(1).mean(1) / weight

    better, worse = (1 - b) * v_old + b * v, (1 + b) * v_old - b * v
    return share * error(better) + (1 - share) * error(worse)


def share_of(advantages: torch.Tensor, *, limit: float = 1.0) -> torch.Tensor:
    """How good a picture is, in [0, 1], from its advantage: 1/2 for the mean of its group."""
    return 0.5 + (advantages / limit).clamp(-1, 1) / 2


class Clipped(NamedTuple):
    """Flow-GRPO's loss a picture, [B]; the ratio of the densities; whether the clip held it."""

    loss: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor


def grpo_loss(
    logprob: torch.Tensor,
    old_logprob: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: float = 0.2,
) -> Clipped:
    """PPO's clipped loss of one step, with densities over all of a picture's values (arXiv 2505.05470, eq. 5).

    The reference code takes the mean over values where this takes the sum, and so needs a clip of about 1e-4.
    """
    ratio = (logprob - old_logprob).exp()
    free, clipped = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return Clipped(-torch.minimum(free, clipped), ratio, clipped < free)


def step_kl(made: DenoisingStep, reference: DenoisingStep) -> torch.Tensor:
    """The KL divergence of a step from the reference's, exact: `|mean - mean_ref|^2 / (2 std^2)`, [B]."""
    distance = ((made.mean - reference.mean) ** 2).flatten(1).sum(1)
    return distance / (2 * made.std.flatten() ** 2)


def velocity_penalty(v: torch.Tensor, v_reference: torch.Tensor) -> torch.Tensor:
    """The mean of `(v - v_ref)^2` over a picture's values, [B]: a distance to the reference without densities."""
    return ((v - v_reference) ** 2).flatten(1).mean(1)
