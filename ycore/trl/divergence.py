"""How far the policy is from the reference, token by token, as three f-divergences estimated from sampled tokens. Pure.

Not here: the coefficient (TRL's `beta`), the importance ratio (see below), and the reference's log-probabilities.
TRL's losses compute reverse-kl from two tensors and nothing else; `stand_in` gives them a reference for which that
formula has the value and the gradient of another divergence.

A token is sampled from the policy pi; let u = ref / pi at that token. For a convex f with f(1) = 0 the mean of f(u)
over the policy's own tokens is the f-divergence D_f(ref || pi) = sum over tokens of pi * f(ref / pi). Adding a multiple
of u - 1, whose mean is 0, makes f'(1) = 0, so that every single value is at least 0 and it is 0 where ref = pi:

    reverse-kl    f(u) = u - 1 - log u                              KL(pi || ref), the k3 estimate that TRL uses
    forward-kl    f(u) = u log u - (u - 1)                          KL(ref || pi)
    js            f(u) = (u log u - (u + 1) log((u + 1) / 2)) / 2   (KL(pi || m) + KL(ref || m)) / 2, m = (pi + ref) / 2

Definitions: reverse-kl as Schulman's k3 (Approximating KL Divergence, 2020) and GRPO (arXiv 2402.03300, eq. 4); the
generators of forward KL and Jensen-Shannon as in f-DPO (arXiv 2309.16240), with the js one halved, so that it is Lin's
divergence (IEEE Trans. Inf. Th. 37, 1991), at most log 2. DPH-RL (arXiv 2509.07430) is the reason to choose forward-kl
or js: they keep the mass of the reference. It samples from the reference; here the tokens are the policy's own.

The gradient: these are per-token values with their gradient in `logps`, but the tokens' own distribution moves too.
The gradient of the divergence itself comes from ratio * value, where ratio = pi / pi_old carries a gradient, also where
it is 1: that is TRL's `use_bias_correction_kl=True`, its default (arXiv 2512.02556). Without it the expected gradient
of reverse-kl is that of KL(ref || pi), and those of the other two are not their divergences' either.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ycore.errors import ConfigError, nearest


def divergence(name: str, logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Per-token values of at least 0, of the shape of `logps`, with gradient in `logps`.

    Args:
        name: `reverse-kl`, `forward-kl` or `js`.
        logps: log-probability of each sampled token under the policy, of any shape, natural logarithm, finite.
        ref_logps: the same tokens' under the reference.
    """
    if name not in DIVERGENCES:
        known = ", ".join(DIVERGENCES)
        raise ConfigError(f"a divergence is one of {known}; it is {name!r}{nearest(name, DIVERGENCES)}")
    # Next to equality js can round to just below 0; a penalty must not be negative.
    return DIVERGENCES[name](ref_logps - logps).clamp(min=0)


def stand_in(name: str, logps: Tensor, ref_logps: Tensor) -> Tensor:
    """Log-probabilities r, of the shape of `logps`, for which reverse-kl of `logps` and r is this divergence.

    Reverse-kl is a function k3(x) = exp(x) - 1 - x of the log ratio x alone; r = logps + y with k3(y) equal to the
    divergence D(x), y of the sign of x. The gradient follows from y' = D'(x) / k3'(y): that of k3(r - logps) is D's.
    """
    if name == "reverse-kl":
        return ref_logps
    with torch.enable_grad():
        x = (ref_logps - logps).detach().double().requires_grad_(True)
        value = DIVERGENCES[name](x)
        (slope,) = torch.autograd.grad(value.sum(), x)
    x, value = x.detach(), value.detach().clamp(min=0)
    y = torch.where(x < 0, -_inverse(value, sign=-1), _inverse(value, sign=1))
    near = x.abs() < _NEAR_EQUALITY  # both are parabolas there, and the quotient below would be 0 / 0
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


def reverse_kl(log_ratio: Tensor) -> Tensor:
    """f(u) = u - 1 - log u, from log u; its mean over the policy's tokens is KL(pi || ref)."""
    return torch.expm1(log_ratio) - log_ratio


def forward_kl(log_ratio: Tensor) -> Tensor:
    """f(u) = u log u - (u - 1), from log u; its mean over the policy's tokens is KL(ref || pi)."""
    return torch.exp(log_ratio) * log_ratio - torch.expm1(log_ratio)


def jensen_shannon(log_ratio: Tensor) -> Tensor:
    """f(u) = (u log u - (u + 1) log((u + 1) / 2)) / 2, from log u; its mean over the policy's tokens is the JSD."""
    middle = torch.log1p(torch.expm1(log_ratio) / 2)  # log((u + 1) / 2), precise near u = 1
    return (torch.exp(log_ratio) * (log_ratio - middle) - middle) / 2


_NEAR_EQUALITY = 1e-5
_NEWTON_STEPS = 8
_CURVATURES: Mapping[str, float] = {"forward-kl": 1.0, "js": 0.25}
"""The second derivative of each at equality; reverse-kl's is 1."""

DIVERGENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "reverse-kl": reverse_kl,
    "forward-kl": forward_kl,
    "js": jensen_shannon,
}
