"""Divergences of two distributions, by their definitions."""

import torch
from torch import Tensor


def kl(left: Tensor, right: Tensor) -> Tensor:
    """Return KL(left || right)."""
    return (left * (left.log() - right.log())).sum()


def exact(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Return the divergence of this name: `reverse-kl`, `forward-kl`, or `js` with equal parts."""
    middle = (policy + reference) / 2
    if name == "js":
        return (kl(policy, middle) + kl(reference, middle)) / 2
    return kl(policy, reference) if name == "reverse-kl" else kl(reference, policy)


def gradient(loss: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of a loss, which may be asked for again."""
    return torch.autograd.grad(loss, weights, retain_graph=True)[0]
