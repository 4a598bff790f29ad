"""PF-PPO (arXiv 2409.06957): learn from the best and the worst answers, whose rewards are the most reliable.

    ycore ppo --recipe ppo-quickstart --group-size 8 --keep docs/methods/pf_ppo.py:best_worst

The paper ranks n answers of a prompt by their reward and draws from them with replacement: `best_worst` from both ends,
`best_of_n` from the best, `best_random` the best and one other. A weight here is the expected number of draws, so that a
group keeps its total weight.
"""

from typing import Any

from torch import Tensor

_ENDS = 0.25
"""The share of a group that is the best, and that is the worst."""


def best_worst(groups: list[Any]) -> list[Tensor]:
    """The best and the worst quarter, each as often."""
    return [_weights(group, best=True, worst=True) for group in groups]


def best_of_n(groups: list[Any]) -> list[Tensor]:
    """The best quarter alone."""
    return [_weights(group, best=True, worst=False) for group in groups]


def _weights(group: Any, *, best: bool, worst: bool) -> Tensor:
    rewards = group.rewards
    scored = ~rewards.isnan()
    size = int(scored.sum())
    number = max(1, round(size * _ENDS))
    # Places from the worst, 0, to the best; those without a reward come last.
    places = rewards.nan_to_num(float("inf")).argsort(stable=True).argsort()
    kept = (best & (places >= size - number)) | (worst & (places < number))
    kept = (kept & scored).double()
    return kept * size / kept.sum().clamp(min=1)
