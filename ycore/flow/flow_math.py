"""The mathematics of flow models: sampling from noise to pictures, and the losses on rewarded pictures.

A point at time t is `x = (1 - t) x0 + t eps`, t from 1 (noise) to 0 (picture). A model's velocity is
`v = E[eps - x0 | x]`. Shapes: points and velocities are [B, C, H, W] in float32; times, rewards and advantages [B].
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from ycore.types import number_from

Velocity = Callable[[Tensor, Tensor], Tensor]
"""From points and times to velocities."""

MIN_STD = 1e-4


# -- sampling ----------------------------------------------------------------------------------------------------------


def time_grid(num_steps: int, *, shift: float = 1.0) -> tuple[float, ...]:
    """Return times from 1 to 0, one more than there are steps.

    `shift` moves them towards the noise as diffusers' FlowMatchEulerDiscreteScheduler does:
    `shift t / (1 + (shift - 1) t)`.
    """
    even = [1 - number / num_steps for number in range(num_steps + 1)]
    return tuple(shift * time / (1 + (shift - 1) * time) for time in even)


class NoisyStep(NamedTuple):
    """A Gaussian's `mean` and `std` ([B, 1, 1, 1]), and the log-density of the point reached, summed over a picture."""

    mean: Tensor
    std: Tensor

    def logprob(self, point: Tensor) -> Tensor:
        densities = (
            -((point - self.mean) ** 2) / (2 * self.std**2)
            - self.std.log()
            - 0.5 * math.log(2 * math.pi)
        )
        return densities.flatten(1).sum(1)


def euler_step(x: Tensor, v: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """Go from time `now` to the earlier time `then` without noise."""
    return x + v.float() * _per_picture(then - now)


def sde_step(
    x: Tensor,
    v: Tensor,
    now: Tensor,
    then: Tensor,
    path: "SamplingPath",
) -> NoisyStep:
    """Return the Gaussian of a step with noise from time `now` to the earlier time `then`.

    It keeps no state, and computes in float32 whatever the network's dtype: with the same velocities a replay gives the
    log-densities of the sampling to the bit. The grid's second time is taken for 1, because of a division by 1 - t.
    """
    v = v.float()
    now = _per_picture(now)
    dt = _per_picture(then) - now
    spread = path.level * (now / (1 - now.clamp_max(path.times[1]))).sqrt()
    pull = spread**2 / (2 * now)
    mean = x * (1 + pull * dt) + v * (1 + pull * (1 - now)) * dt
    return NoisyStep(mean, spread * (-dt).sqrt())


def _per_picture(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)


class SamplingPath(NamedTuple):
    """How pictures are drawn: by `rule`, as in `FlowSettings`, at these times; `length` steps have noise of the
    paper's a, `level`, and the others are Euler's."""

    times: tuple[float, ...]
    rule: str = "ode"
    level: float = 0.0
    length: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1

    def window(self, seed: int, position: int) -> int:
        """Return the first of the steps with noise for the group at this position of the run's order.

        It lies in the first half of the path where there is room (MixGRPO, arXiv 2507.21802).
        """
        starts = max(1, self.num_steps // 2 - self.length + 1)
        return number_from(f"window {seed}/{position}", bits=64) % starts


class DrawnPictures(NamedTuple):
    """Pictures, [B, C, H, W]; points of their steps with noise, [B, length + 1, C, H, W]; log-densities, [B, length]."""

    pictures: Tensor
    points: Tensor
    logprobs: Tensor


def draw(
    velocity: Velocity,
    path: SamplingPath,
    seeds: Sequence[int],
    shape: Sequence[int],
    *,
    firsts: Sequence[int] = (),
) -> DrawnPictures:
    """Draw a picture for each seed. Pictures in one batch may have their steps with noise at different places.

    Args:
        firsts: the first step with noise of each picture; none are needed without such steps.
    """
    size = len(seeds)
    length = path.length
    noises = torch.stack([noise_of(seed, (length + 1, *shape)) for seed in seeds])
    begins = torch.tensor(firsts or [0] * size)
    times = torch.tensor(path.times, dtype=torch.float32)
    points = torch.zeros_like(noises)
    logprobs = torch.zeros(size, length)
    x = noises[:, 0]
    for number in range(path.num_steps):
        now = times[number].expand(size)
        then = times[number + 1].expand(size)
        before = x
        v = velocity(x, now)
        x = euler_step(before, v, now, then)
        if path.rule == "heun" and number + 1 < path.num_steps:
            x = euler_step(before, (v + velocity(x, then)) / 2, now, then)
        places = number - begins
        rows = torch.nonzero((places >= 0) & (places < length))[:, 0]
        if not len(rows):
            continue
        place = places[rows]
        step = sde_step(before[rows], v[rows], now[rows], then[rows], path)
        reached = step.mean + step.std * noises[rows, 1 + place]
        points[rows, place] = before[rows]
        points[rows, place + 1] = reached
        logprobs[rows, place] = step.logprob(reached)
        x = x.index_copy(0, rows, reached)
    return DrawnPictures(x, points, logprobs)


def noise_of(seed: int, shape: Sequence[int]) -> Tensor:
    """Return normal noise from a generator of its own on the CPU: the same in any batch and on any device."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )


# -- losses ------------------------------------------------------------------------------------------------------------


def group_advantages(rewards: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return each reward less its group's mean, over the deviation of all the round's rewards, within 5.

    That is Flow-GRPO's (arXiv 2505.05470). A picture without a reward has 0.
    """
    flat = [value for group in rewards for value in group if value is not None]
    scale = MIN_STD + (pstdev(flat) if flat else 0.0)
    advantages = []
    for group in rewards:
        known = [reward for reward in group if reward is not None]
        mean = fmean(known) if known else 0.0
        scaled = [0.0 if reward is None else (reward - mean) / scale for reward in group]
        advantages.append([max(-5.0, min(5.0, advantage)) for advantage in scaled])
    return advantages


def noised(x0: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return the points at these times ([B]) on the straight lines from pictures to noise."""
    t = _per_picture(times)
    return (1 - t) * x0 + t * noise


def nft_loss(
    v: Tensor,
    v_old: Tensor,
    x: Tensor,
    x0: Tensor,
    times: Tensor,
    share: Tensor,
    *,
    b: float = 1.0,
    adaptive: bool = True,
) -> Tensor:
    """Return DiffusionNFT's loss (arXiv 2509.16117, eq. 5 to 8), [B].

    With `share` r in [0, 1], how good a picture is, and `v+ = (1 - b) v_old + b v`, `v- = (1 + b) v_old - b v`:
    `r |x0(v+) - x0|^2 / w+ + (1 - r) |x0(v-) - x0|^2 / w-`, where `x0(v) = x - t v`, and w is the mean absolute error,
    without a gradient. Without `adaptive` both w are 1, and the minimum over v is
    `v_old + (2 / b) E[r | x] (v_good - v_old)`, with `v_good` the velocity of the pictures weighted by r.
    """
    t = _per_picture(times)

    def error(velocity: Tensor) -> Tensor:
        miss = x - t * velocity - x0
        squares = (miss**2).flatten(1).mean(1)
        if not adaptive:
            return squares
        return squares / miss.detach().abs().flatten(1).mean(1).clamp_min(1e-5)

    better = (1 - b) * v_old + b * v
    worse = (1 + b) * v_old - b * v
    return share * error(better) + (1 - share) * error(worse)


def share_of(advantages: Tensor) -> Tensor:
    """Return how good each picture is, in [0, 1]: 1/2 for the mean of its group."""
    return 0.5 + advantages.clamp(-1, 1) / 2


class Clipped(NamedTuple):
    """Flow-GRPO's loss a picture, [B]; the ratio of the densities; whether the clip held it."""

    loss: Tensor
    ratio: Tensor
    is_clipped: Tensor


def grpo_loss(
    logprob: Tensor, old_logprob: Tensor, advantages: Tensor, *, clip: float
) -> Clipped:
    """Return PPO's clipped loss of one step, with densities over all of a picture's values (arXiv 2505.05470, eq. 5).

    The reference code takes the mean over values where this takes the sum, and so needs a clip of about 1e-4.
    """
    ratio = (logprob - old_logprob).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantages
    return Clipped(-torch.minimum(free, clipped), ratio, clipped < free)


def step_kl(step: NoisyStep, reference: NoisyStep) -> Tensor:
    """Return the exact KL divergence of a step from the reference's: `|mean - mean_ref|^2 / (2 std^2)`, [B]."""
    distance = ((step.mean - reference.mean) ** 2).flatten(1).sum(1)
    return distance / (2 * step.std.flatten() ** 2)


def velocity_penalty(v: Tensor, v_reference: Tensor) -> Tensor:
    """Return the mean of `(v - v_ref)^2` over a picture, [B]: a distance to the reference without densities."""
    return ((v - v_reference) ** 2).flatten(1).mean(1)
