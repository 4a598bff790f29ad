"""How far the policy is from its reference by the tokens that it wrote: three f-divergences. Pure functions.

A token is sampled from the policy pi; let u = ref / pi at that token. For a convex
f with f(1) = 0 the mean of f(u) over the policy's own tokens is the f-divergence D_f(ref || pi) = sum over tokens of
pi * f(ref / pi). Adding a multiple of u - 1, whose mean is 0, makes f'(1) = 0, so that every single value is at least 0
and it is 0 where ref = pi:

    reverse-kl    f(u) = u - 1 - log u                              KL(pi || ref), the k3 estimate that TRL uses
    forward-kl    f(u) = u log u - (u - 1)                          KL(ref || pi)
    js            f(u) = (u log u - (u + 1) log((u + 1) / 2)) / 2   (KL(pi || m) + KL(ref || m)) / 2, m = (pi + ref) / 2

Sources: reverse-kl is Schulman's k3 (Approximating KL Divergence, 2020), as in GRPO (arXiv 2402.03300, eq. 4). The
generators of forward-kl and js are f-DPO's (arXiv 2309.16240), js halved to be Lin's divergence (IEEE Trans. Inf. Th.
37, 1991), at most log 2. Both keep the mass of the reference, as DPH-RL (arXiv 2509.07430) argues; its tokens are the
reference's, ours are the policy's own.

The values have a gradient in `logps`, but the tokens' own distribution moves too. The gradient of the divergence itself
comes from ratio * value, where ratio = pi / pi_old carries a gradient even where it is 1: TRL's default
`use_bias_correction_kl=True` (arXiv 2512.02556). Without it, reverse-kl has the expected gradient of KL(ref || pi), and
the other two do not have their divergences' gradients either.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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


def _reverse_kl(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def _forward_kl(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio) * log_ratio - torch.expm1(log_ratio)


def _jensen_shannon(log_ratio: Tensor) -> Tensor:
    middle = torch.log1p(torch.expm1(log_ratio) / 2)  # log((u + 1) / 2), precise near u = 1
    return (torch.exp(log_ratio) * (log_ratio - middle) - middle) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "reverse-kl": _reverse_kl,
    "forward-kl": _forward_kl,
    "js": _jensen_shannon,
}
"""f(u) by name, from log u."""
