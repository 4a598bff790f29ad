"""How far the trainer's probabilities are from those the engine sampled with, and the weight that corrects for it.

Not here: the ratio between policy versions (TRL's loss); the two multiply.
"""

import math

import torch


def importance_ratio(
    trainer_logps: torch.Tensor,
    engine_logps: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str,
    clip_min: float | None,
    clip_max: float | None,
) -> torch.Tensor:
    """Importance weight of the trainer's policy over the engine's (truncated: arXiv 2508.03680; masked: IcePop).

    Args:
        trainer_logps, engine_logps, mask: (B, T); engine NaNs count as equal.
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, as in TRL.

    Returns:
        (B, T) for token modes, (B, 1) for sequence modes.
    """
    gap = torch.nan_to_num((trainer_logps - engine_logps) * mask, nan=0.0)
    level, _, action = mode.partition("_")
    ratio = torch.exp(gap.sum(dim=-1, keepdim=True) if level == "sequence" else gap)
    if action == "truncate":
        return torch.clamp(ratio, min=clip_min, max=clip_max)
    low = -math.inf if clip_min is None else clip_min
    high = math.inf if clip_max is None else clip_max
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def absolute_gap(trainer_logps: torch.Tensor, engine_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|log p_trainer - log p_engine| of every real token, as a flat tensor; tokens without an engine value left out."""
    gap = (trainer_logps - engine_logps).abs()
    return gap[mask.bool() & ~torch.isnan(gap)]
