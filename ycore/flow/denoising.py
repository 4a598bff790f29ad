"""Denoising: the grid of times, one step of a sampler, and the noise that a seed stands for.

A point at time t is `x = (1 - t) x0 + t eps`, t from 1 (noise) to 0 (picture). A model's velocity is
`v = E[eps - x0 | x]`. Shapes: points and velocities are [B, C, H, W] in float32, times [B].
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Rule = Literal["ode", "heun", "sde", "dance", "cps"]
"""How a step is made: Euler's, Heun's, and three with noise, each a Gaussian whose density is known.

`sde`: Flow-GRPO, arXiv 2505.05470, eq. 9. `dance`: DanceGRPO, arXiv 2505.07818, the same with constant noise. `cps`:
coefficients-preserving sampling, arXiv 2509.05952, which does not keep the marginals.
"""

NOISY = ("sde", "dance", "cps")

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From points and times to velocities."""


class Grid(NamedTuple):
    """Times from 1 to 0, one more than there are steps."""

    times: tuple[float, ...]

    @property
    def num_steps(self) -> int:
        return len(self.times) - 1


def grid(num_steps: int, *, shift: float = 1.0) -> Grid:
    """Even times, moved towards the noise by `shift` as diffusers' FlowMatchEulerDiscreteScheduler does:
    `shift t / (1 + (shift - 1) t)`."""
    even = [1 - number / num_steps for number in range(num_steps + 1)]
    return Grid(tuple(shift * time / (1 + (shift - 1) * time) for time in even))


def window_of(seed: int, position: int, *, num_steps: int, length: int) -> int:
    """The first of the `length` steps with noise for the group at this position of the run's order.

    It lies in the first half of the path where there is room (MixGRPO, arXiv 2507.21802).
    """
    starts = max(1, num_steps // 2 - length + 1)
    digest = hashlib.blake2b(f"window {seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % starts


@dataclass(frozen=True, slots=True)
class DenoisingStep:
    """Where a step leads: the Gaussian's `mean` and `std` ([B, 1, 1, 1]), the `point` drawn or replayed, and its
    log-density summed over a picture's values, [B]. Without noise the std is 0, and so is the log-density."""

    point: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor
    logprob: torch.Tensor


def step(
    rule: Rule,
    x: torch.Tensor,
    v: torch.Tensor,
    now: torch.Tensor,
    then: torch.Tensor,
    *,
    level: float,
    near_one: float,
    noise: torch.Tensor | None = None,
    reached: torch.Tensor | None = None,
) -> DenoisingStep:
    """One step from time `now` to the earlier time `then`, sampled from `noise` or replayed to `reached`.

    It keeps no state, and computes in float32 whatever the network's dtype: replayed with the same velocities it gives
    the log-densities of the sampling to the bit.

    Args:
        rule: `heun` is not one step of this kind; see `draw`.
        level: a of `sde`, eta of `dance` and `cps`.
        near_one: `sde` divides by 1 - t, and takes this time instead of 1: the grid's second.
    """
    x, v = x.float(), v.float()
    now, then = (time.float().view(-1, *[1] * (x.dim() - 1)) for time in (now, then))
    dt = then - now
    if rule == "cps":
        std = then * math.sin(level * math.pi / 2)
        mean = (1 - then) * (x - now * v) + (then**2 - std**2).clamp_min(0).sqrt() * (
            x + (1 - now) * v
        )
    elif rule in ("sde", "dance"):
        spread = torch.full_like(now, level)
        if rule == "sde":
            spread = level * (now / (1 - now.clamp_max(near_one))).sqrt()
        pull = spread**2 / (2 * now)
        mean = x * (1 + pull * dt) + v * (1 + pull * (1 - now)) * dt
        std = spread * (-dt).sqrt()
    else:
        mean, std = x + v * dt, torch.zeros_like(now)
    if reached is None:
        reached = mean if noise is None else mean + std * noise
    return DenoisingStep(reached, mean, std, log_density(reached, mean, std))


def log_density(point: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """The log-density of a Gaussian with one std, summed over each picture's values, [B]; 0 where the std is 0."""
    safe = std.clamp_min(1e-20)
    densities = (
        -((point - mean) ** 2) / (2 * safe**2) - safe.log() - 0.5 * math.log(2 * math.pi)
    )
    return torch.where((std > 0).flatten(), densities.flatten(1).sum(1), 0.0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How pictures are drawn. The steps from `first` on, `length` of them, follow `rule`; the others are Euler's.

    A rule without noise holds for all steps.
    """

    path: Grid
    rule: Rule = "ode"
    level: float = 0.0
    length: int = 0

    @property
    def near_one(self) -> float:
        return self.path.times[1]

    def rule_at(self, number: int, first: int) -> Rule:
        if self.rule not in NOISY:
            return self.rule
        return self.rule if first <= number < first + self.length else "ode"


@dataclass(frozen=True, slots=True)
class Drawn:
    """Pictures, [B, C, H, W], and of the steps with noise the points, [B, length + 1, C, H, W], and the
    log-densities, [B, length]."""

    pictures: torch.Tensor
    points: torch.Tensor
    logprobs: torch.Tensor


def draw(
    velocity: Velocity,
    sampling: Sampling,
    seeds: Sequence[int],
    shape: Sequence[int],
    *,
    firsts: Sequence[int] = (),
) -> Drawn:
    """Draw a picture for each seed. Pictures in one batch may have their steps with noise at different places.

    Args:
        firsts: the first step with noise of each picture; none are needed without such steps.
    """
    firsts = firsts or [0] * len(seeds)
    rule, near_one, num_steps = sampling.rule, sampling.near_one, sampling.path.num_steps
    num_noises = sampling.length + 1 if rule in NOISY else 1
    noises = [noise_of(seed, (num_noises, *shape)) for seed in seeds]
    times = torch.tensor(sampling.path.times, dtype=torch.float32)
    x = torch.stack([noise[0] for noise in noises])
    points: list[list[torch.Tensor]] = [[] for _ in seeds]
    logprobs: list[list[torch.Tensor]] = [[] for _ in seeds]
    for number in range(num_steps):
        now, then = (times[place].expand(len(seeds)) for place in (number, number + 1))
        before = x
        v = velocity(x, now)
        x = step("ode", x, v, now, then, level=0.0, near_one=near_one).point
        if rule == "heun" and number + 1 < num_steps:
            mean_v = (v + velocity(x, then)) / 2
            x = step("ode", before, mean_v, now, then, level=0.0, near_one=near_one).point
        noisy = [
            index
            for index, first in enumerate(firsts)
            if sampling.rule_at(number, first) in NOISY
        ]
        if not noisy:
            continue
        made = step(
            rule,
            before[noisy],
            v[noisy],
            now[noisy],
            then[noisy],
            level=sampling.level,
            near_one=near_one,
            noise=torch.stack([noises[index][1 + number - firsts[index]] for index in noisy]),
        )
        x = x.clone()
        x[noisy] = made.point
        for place, index in enumerate(noisy):
            points[index] += (
                [made.point[place]] if points[index] else [before[index], made.point[place]]
            )
            logprobs[index].append(made.logprob[place])
    if rule not in NOISY:
        return Drawn(x, x[:, None][:, :0], torch.zeros(len(seeds), 0))
    stacked_points = torch.stack([torch.stack(of_picture) for of_picture in points])
    return Drawn(x, stacked_points, torch.stack([torch.stack(values) for values in logprobs]))


def noise_of(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Normal noise in float32, from a generator of its own on the CPU: the same in any batch and on any device."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
