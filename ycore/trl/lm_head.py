"""Log-probabilities of chosen tokens from hidden states, without keeping the logits of the whole vocabulary.

For devices without Triton: there TRL's fused head scores every position, prompts and padding included, and repeats the
projection in its backward. Here only the wanted positions are projected, in tiles. If the head is frozen, the gradient
is computed in the forward, tile by tile, so that each product with the vocabulary is done once.
"""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

TILE = 512
"""Tokens projected at a time: a tile of 512 x 49,152 float32 logits is 100 MB."""


def score_tokens(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution.

    Args:
        hidden: (N, H) states, each just before its target.
        weight: (V, H) output embedding; `bias`: (V,) or None.
        targets: (N,) token ids.
        temperature: the logits are divided by it.

    Returns:
        (N,) float32 log-probabilities, with gradient, and (N,) float32 entropies in nats, without.
    """
    if torch.is_grad_enabled() and not weight.requires_grad and hidden.requires_grad:
        logps, entropies = _FrozenHead.apply(hidden, weight, bias, targets, temperature)
        return logps, entropies
    tiles = [
        checkpoint(_score_tile, states, weight, bias, ids, temperature, use_reentrant=False)
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True)
    ]
    logps = torch.cat([logp for logp, _ in tiles])
    return logps, torch.cat([entropy for _, entropy in tiles])


def _log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    return torch.log_softmax(logits / temperature, dim=-1)


def _score_tile(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = _log_softmax(hidden, weight, bias, temperature)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


class _FrozenHead(torch.autograd.Function):
    """d logp / d hidden = (weight[target] - softmax @ weight) / temperature, known as soon as the softmax is."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logps, entropies, slopes = [], [], []
        for states, ids in zip(hidden.split(TILE), targets.split(TILE), strict=True):
            log_p = _log_softmax(states, weight, bias, temperature)
            probabilities = log_p.exp()
            logps.append(log_p.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(probabilities * log_p).sum(-1))
            expected = probabilities.to(weight.dtype) @ weight
            slopes.append((weight[ids] - expected) / temperature)
        ctx.save_for_backward(torch.cat(slopes))
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logps), entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return grads[0].unsqueeze(-1).to(slopes.dtype) * slopes, None, None, None, None
