"""The policy against the one that wrote the tokens (importance weights, trust regions) and against its reference.

Pure functions.

DPPO (arXiv 2602.04879) says which tokens may still move the policy. PPO clips the ratio of a token's probabilities,
which stops rare tokens early and lets likely ones go far. DPPO looks at the divergence from the policy that wrote the
token, and drops a token only where its gradient would lead further away.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LIMITS = {"dppo-tv": 0.15, "dppo-kl": 0.05}
"""The largest divergence: of the token's probability, or of the two outcomes "this token" and "another" in nats."""

BOUNDS = {"icepop": (0.5, 5.0), "geometric": (0.999, 1.001)}
"""The least and the largest weight of a token (arXiv 2510.18855), or geometric mean of a completion's weights."""

RATIO_CAP = 20.0
"""The importance weight is truncated there."""


def importance_ratio(
    trainer_logps: Tensor,
    engine_logps: Tensor,
    mask: Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> Tensor:
    """Importance weight of the trainer's policy over the engine's (truncated: arXiv 2508.03680; masked: IcePop).

    Args:
        trainer_logps, engine_logps, mask: (B, T); engine NaNs count as equal.
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, as in TRL.

    Returns:
        (B, T) for token modes, (B, 1) for sequence modes. TRL's loss multiplies it with the ratio of policy versions.
    """
    gap = torch.nan_to_num((trainer_logps - engine_logps) * mask, nan=0.0)
    level, _, action = mode.partition("_")
    ratio = torch.exp(gap.sum(dim=-1, keepdim=True) if level == "sequence" else gap)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    if action == "truncate":
        return torch.clamp(ratio, min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def absolute_gap(trainer_logps: Tensor, engine_logps: Tensor, mask: Tensor) -> Tensor:
    """|log p_trainer - log p_engine| in nats of every real token that the engine scored: (B, T) -> (N,)."""
    gap = (trainer_logps - engine_logps).abs()
    return gap[mask.bool() & ~torch.isnan(gap)]


def keeps(name: str, logps: Tensor, behaviour_logps: Tensor, advantages: Tensor) -> Tensor:
    """True where a token counts: it is within the limit, or its gradient leads back.

    Args:
        name: a key of `LIMITS`.
        logps: of each sampled token under the policy in training.
        behaviour_logps: the same under the policy that wrote it.
        advantages: of which the sign counts; their shape, or one that broadcasts to it.
    """
    new = logps.double().exp()
    old = behaviour_logps.double().exp()
    leads_away = (new - old) * advantages > 0
    if name == "dppo-tv":
        distance = (new - old).abs()
    else:
        rest_old = (1 - old).clamp(min=1e-12)
        rest_new = (1 - new).clamp(min=1e-12)
        of_token = old * (behaviour_logps - logps).double()
        distance = of_token + rest_old * (rest_old.log() - rest_new.log())
    return ~(leads_away & (distance > LIMITS[name]))


def effective_share(log_weights: Tensor) -> float:
    """Effective sample size over n: (sum w)^2 / (n sum w^2), 1 where all weights are equal. `log_weights`: (N,)."""
    if not log_weights.numel():
        return 1.0
    weights = (log_weights.double() - log_weights.max()).exp()
    return float(weights.sum().square() / weights.square().sum() / weights.numel())


def region_weights(
    name: str, logps: Tensor, behaviour_logps: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """The factor of each token's advantage: the truncated importance weight, or 0 outside of the region.

    Args:
        mask: (B, T), the tokens that count in a completion's mean.
    """
    gap = logps - behaviour_logps
    weights = gap.exp().clamp(max=RATIO_CAP)
    if name in LIMITS:
        return weights * keeps(name, logps, behaviour_logps, advantages)
    low, high = map(math.log, BOUNDS[name])
    if name == "geometric":
        gap = (gap * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return weights * ((gap >= low) & (gap <= high))


def old_by_completion(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    """Old log-probabilities with which the ratio of every token is that of its whole completion, (B, T).

    A loss that clips by token then clips whole completions: the ratio's gradient adds up over its tokens.
    """
    return logps - ((logps - old_logps) * mask).sum(dim=1, keepdim=True)


def behaviour_logps(sampled: Tensor | None, old: Tensor | None, logps: Tensor) -> Tensor:
    """Log-probabilities of the policy that wrote the tokens: the engine's, else those at the round's start."""
    behaviour = sampled if sampled is not None else old
    return logps if behaviour is None else torch.where(behaviour.isnan(), logps, behaviour)


# -- the distance to the reference -------------------------------------------------------------------------------------
#
# How far the policy is from its reference by the tokens that it wrote: three f-divergences. Pure functions.
#
# A token is sampled from the policy pi; let u = ref / pi at that token. For a convex
# f with f(1) = 0 the mean of f(u) over the policy's own tokens is the f-divergence D_f(ref || pi) = sum over tokens of
# pi * f(ref / pi). Adding a multiple of u - 1, whose mean is 0, makes f'(1) = 0, so that every single value is at least 0
# and it is 0 where ref = pi:
#
#     reverse-kl    f(u) = u - 1 - log u                              KL(pi || ref), the k3 estimate that TRL uses
#     forward-kl    f(u) = u log u - (u - 1)                          KL(ref || pi)
#     js            f(u) = (u log u - (u + 1) log((u + 1) / 2)) / 2   (KL(pi || m) + KL(ref || m)) / 2, m = (pi + ref) / 2
#
# Sources: reverse-kl is Schulman's k3 (Approximating KL Divergence, 2020), as in GRPO (arXiv 2402.03300, eq. 4). The
# generators of forward-kl and js are f-DPO's (arXiv 2309.16240), js halved to be Lin's divergence (IEEE Trans. Inf. Th.
# 37, 1991), at most log 2. Both keep the mass of the reference, as DPH-RL (arXiv 2509.07430) argues; its tokens are the
# reference's, ours are the policy's own.
#
# The values have a gradient in `logps`, but the tokens' own distribution moves too. The gradient of the divergence itself
# comes from ratio * value, where ratio = pi / pi_old carries a gradient even where it is 1: TRL's default
# `use_bias_correction_kl=True` (arXiv 2512.02556). Without it, reverse-kl has the expected gradient of KL(ref || pi), and
# the other two do not have their divergences' gradients either.


_NEAR_EQUALITY = 1e-5
_NEWTON_STEPS = 8
_CURVATURES: Mapping[str, float] = {"forward-kl": 1.0, "js": 0.25}
"""The second derivative of each at equality; reverse-kl's is 1."""


def stand_in(name: str, logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Log-probabilities r, of the shape of `logps`, for which TRL's reverse-kl of `logps` and r is this divergence.

    Args:
        name: `reverse-kl`, `forward-kl` or `js`.
        logps: log-probability of each sampled token under the policy, of any shape, in nats, finite.
        ref_logps: the same tokens' under the reference.

    TRL's losses compute only reverse-kl, which is a function k3(x) = exp(x) - 1 - x of the log ratio x. Here
    r = logps + y, with k3(y) equal to the divergence D(x) and y of the sign of x. With y' = D'(x) / k3'(y) the gradient
    of k3(r - logps) is that of D.
    """
    if name == "reverse-kl":
        return ref_logps
    with torch.enable_grad():
        x = (ref_logps - logps).detach().double().requires_grad_(True)
        value = DIVERGENCES[name](x)
        (slope,) = torch.autograd.grad(value.sum(), x)
    x = x.detach()
    value = value.detach().clamp(min=0)
    y = torch.where(x < 0, -_inverse(value, sign=-1), _inverse(value, sign=1))
    # Near equality both are parabolas, and the quotient below would be 0 / 0.
    near = x.abs() < _NEAR_EQUALITY
    flatness = _CURVATURES[name] ** 0.5
    y = torch.where(near, flatness * x, y)
    y_slope = torch.where(near, flatness, slope / torch.where(near, 1.0, torch.expm1(y)))
    moving = ref_logps - logps
    return logps + y.to(logps.dtype) + y_slope.to(logps.dtype) * (moving - moving.detach())


def _inverse(value: Tensor, *, sign: int) -> Tensor:
    """z >= 0 with k3(sign * z) = value, by Newton's method: k3 is convex, and the first guess is near."""
    root = (2 * value).sqrt()
    z = torch.log1p(value + root) if sign > 0 else root + value / 3
    for _ in range(_NEWTON_STEPS):
        slope = sign * torch.expm1(sign * z)
        error = torch.expm1(sign * z) - sign * z - value
        z = torch.where(slope > 0, z - error / slope.clamp(min=1e-300), z)
    return z


def _jensen_shannon(log_ratio: Tensor) -> Tensor:
    middle = torch.log1p(torch.expm1(log_ratio) / 2)  # log((u + 1) / 2), precise near u = 1
    return (torch.exp(log_ratio) * (log_ratio - middle) - middle) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "reverse-kl": lambda log_u: torch.expm1(log_u) - log_u,
    "forward-kl": lambda log_u: torch.exp(log_u) * log_u - torch.expm1(log_u),
    "js": _jensen_shannon,
}
"""f(u) by name, from log u."""
