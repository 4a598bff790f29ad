"""The policy against the one that wrote the tokens: importance weights, and trust regions. Pure functions.

DPPO (arXiv 2602.04879) says which tokens may still move the policy. PPO clips the ratio of a token's probabilities,
which stops rare tokens early and lets likely ones go far. DPPO looks at the divergence from the policy that wrote the
token, and drops a token only where its gradient would lead further away.
"""

import math

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
