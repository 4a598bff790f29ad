"""Advantage estimators: from the rewards of a round's groups to one advantage a completion. Pure functions of tensors.

Not here: which estimator a run asks for (`presets`, `config.run`), gathering the groups of all ranks (needed where
`needs_global` says so), sampling the greedy completion (`needs_greedy`), and advantages of single tokens.

Axes: `_P` prompts, `_G` completions of a group. `mask_PG` is True where a completion counts; where it is False the
reward may be anything, also NaN: that completion gets advantage 0 and takes no part in a mean or a deviation.

Standard deviations are of the sample (divided by n - 1) and get 1e-4 added, as in TRL, so that the names below that
TRL knows too give TRL's numbers; a deviation of fewer than two values is 0. The arithmetic is in float64: the mean of
equal float32 rewards is then exactly that reward, and a group without spread has advantages of exactly 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ycore.errors import ConfigError, nearest

EPSILON = 1e-4
"""Added to every standard deviation: TRL's constant."""

_GROUP, _BATCH = (1,), (0, 1)


@dataclass(frozen=True, slots=True)
class Estimator:
    """A way to turn rewards into advantages: call it with `rewards_PG`, `mask_PG`, and `greedy_P` where it needs that.

    Example: `estimator("rloo")(rewards_PG, mask_PG)`
    """

    name: str
    function: Callable[..., Tensor]
    formula: str
    source: str
    needs_greedy: bool = False
    """Whether it takes the reward of each prompt's greedy completion."""
    needs_global: bool = False
    """Whether its statistics are those of the groups of all ranks."""

    def __call__(self, rewards_PG: Tensor, mask_PG: Tensor, *, greedy_P: Tensor | None = None) -> Tensor:
        """Advantages, (P, G) float32, without gradient, on the device of the rewards."""
        if rewards_PG.dim() != 2 or mask_PG.shape != rewards_PG.shape or mask_PG.dtype != torch.bool:
            given = f"{tuple(rewards_PG.shape)} and {tuple(mask_PG.shape)} of {mask_PG.dtype}"
            raise ValueError(f"rewards and mask must be (P, G), the mask of bools; they are {given}")
        if self.needs_greedy != (greedy_P is not None):
            raise ValueError(f"{self.name} {'needs' if self.needs_greedy else 'takes no'} greedy rewards")
        if greedy_P is not None and greedy_P.shape != rewards_PG.shape[:1]:
            raise ValueError(f"greedy rewards must be (P,) = {rewards_PG.shape[:1]}; they are {greedy_P.shape}")
        with torch.no_grad():
            return (
                self.function(rewards_PG, mask_PG) if greedy_P is None else self.function(rewards_PG, mask_PG, greedy_P)
            )


def estimator(name: str) -> Estimator:
    """The estimator of that name, or a ConfigError that names the nearest."""
    if name not in ESTIMATORS:
        known = ", ".join(ESTIMATORS)
        raise ConfigError(f"an advantage estimator is one of {known}; it is {name!r}{nearest(name, ESTIMATORS)}")
    return ESTIMATORS[name]


def group(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """GRPO: (r - mean of its group) / (deviation of its group + 1e-4).

    arXiv 2402.03300, section 4.1.2; TRL's `scale_rewards=group`. A completion alone in its group, and a group of equal
    rewards, get 0.
    """
    rewards = _counted(rewards_PG, mask_PG)
    return _result(_centred(rewards, mask_PG) / (_deviation(rewards, mask_PG, _GROUP) + EPSILON), mask_PG)


def dr_grpo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """Dr. GRPO: r - mean of its group, not divided, so that a prompt's weight does not depend on its difficulty.

    arXiv 2503.20783, section 3.2; TRL's `scale_rewards=none`. A completion alone in its group gets 0.
    """
    return _result(_centred(_counted(rewards_PG, mask_PG), mask_PG), mask_PG)


def rloo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """REINFORCE leave-one-out: r - mean of the other completions of its group = n / (n - 1) * (r - mean of all n).

    arXiv 2402.14740; TRL's RLOOTrainer. A completion alone in its group has no baseline and gets 0.
    """
    counts = mask_PG.sum(dim=1, keepdim=True).double()
    others = (counts - 1).clamp(min=1)
    return _result(_centred(_counted(rewards_PG, mask_PG), mask_PG) * counts / others, mask_PG)


def lite_ppo(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """Lite PPO: (r - mean of its group) / (deviation of all rewards of the batch + 1e-4).

    arXiv 2508.08221; TRL's `scale_rewards=batch`. The deviation is of the rewards themselves, so it
    also has the spread between prompts in it: compare `reinforce++-baseline`. One completion in all gets 0.
    """
    rewards = _counted(rewards_PG, mask_PG)
    return _result(_centred(rewards, mask_PG) / (_deviation(rewards, mask_PG, _BATCH) + EPSILON), mask_PG)


def reinforce_plus_plus(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """REINFORCE++: (r - mean of the batch) / (deviation of the batch + 1e-4); no group, so one completion a prompt is
    enough.

    arXiv 2501.03262, the global normalisation of its general form. There a token's advantage also has the KL penalty
    of the tokens after it, and every token counts once in the statistics; here the reward is the outcome's, and every
    completion counts once. A prompt on which all fail still pushes down, one on which all succeed still pushes up.
    One completion in all, and a batch of equal rewards, get 0.
    """
    rewards = _counted(rewards_PG, mask_PG)
    centred = rewards - _mean(rewards, mask_PG, _BATCH)
    return _result(centred / (_deviation(rewards, mask_PG, _BATCH) + EPSILON), mask_PG)


def reinforce_plus_plus_baseline(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """REINFORCE++ with baseline: c = r - mean of its group; c / (deviation of all c of the batch + 1e-4).

    arXiv 2501.03262, the form for groups. The mean of all c is 0 by construction, so it is not subtracted again. A
    completion alone in its group has c = 0, gets 0, and counts as that 0 in the deviation.
    """
    centred = _centred(_counted(rewards_PG, mask_PG), mask_PG)
    return _result(centred / (_deviation(centred, mask_PG, _BATCH) + EPSILON), mask_PG)


def remax(rewards_PG: Tensor, mask_PG: Tensor, greedy_P: Tensor) -> Tensor:
    """ReMax: r - the reward of the greedy completion of the same prompt.

    arXiv 2310.10505. `greedy_P` is (P,); where it is NaN (the greedy completion could not be scored) its
    prompt has no baseline and gets 0. The group plays no part: one completion a prompt is enough.
    """
    baseline = greedy_P.double().unsqueeze(1)
    return _result(rewards_PG.double() - baseline, mask_PG & ~baseline.isnan())


def maxrl(rewards_PG: Tensor, mask_PG: Tensor) -> Tensor:
    """MaxRL: (r - mean of its group) / mean of its group, and 0 for a group whose mean is not above 0.

    arXiv 2602.02710, algorithm 1. For rewards of 0 and 1: a prompt solved at rate p weighs about 1 / p, up to what
    n completions can tell. In expectation the sum over the group, divided by n, is the gradient of
    -sum over k < n of (1 - p)^k / k, the log-likelihood log p cut after n - 1 terms (n terms without the rule for
    groups of mean 0). Rewards must not be negative: a mean near 0 of mixed signs has no meaning as a rate. A completion
    alone in its group gets 0.
    """
    rewards = _counted(rewards_PG, mask_PG)
    means = _mean(rewards, mask_PG, _GROUP)
    rates = torch.where(means > 0, means, torch.inf)
    return _result(_centred(rewards, mask_PG) / rates, mask_PG)


def _counted(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards with 0 where they do not count; through float32, which is what rewards are stored in."""
    return torch.where(mask, rewards, 0).float().double()


def _mean(values: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    return torch.where(mask, values, 0).sum(axes, keepdim=True) / mask.sum(axes, keepdim=True).clamp(min=1)


def _deviation(values: Tensor, mask: Tensor, axes: tuple[int, ...]) -> Tensor:
    squares = torch.where(mask, values - _mean(values, mask, axes), 0).square().sum(axes, keepdim=True)
    return (squares / (mask.sum(axes, keepdim=True) - 1).clamp(min=1)).sqrt()


def _centred(rewards: Tensor, mask: Tensor) -> Tensor:
    return rewards - _mean(rewards, mask, _GROUP)


def _result(advantages: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, advantages, 0).float()


_GRPO, _DR_GRPO, _RLOO = (
    "arXiv 2402.03300, section 4.1.2",
    "arXiv 2503.20783, section 3.2",
    "arXiv 2402.14740",
)
_LITE_PPO, _REINFORCE = "arXiv 2508.08221", "arXiv 2501.03262"
_REMAX, _MAXRL = "arXiv 2310.10505", "arXiv 2602.02710, algorithm 1"

ESTIMATORS: Mapping[str, Estimator] = {
    found.name: found
    for found in (
        Estimator("group", group, "(r - mean_group) / (std_group + 1e-4)", _GRPO),
        Estimator("dr-grpo", dr_grpo, "r - mean_group", _DR_GRPO),
        Estimator("rloo", rloo, "r - mean of the others in the group", _RLOO),
        Estimator("lite-ppo", lite_ppo, "(r - mean_group) / (std_batch(r) + 1e-4)", _LITE_PPO, needs_global=True),
        Estimator(
            "reinforce++", reinforce_plus_plus, "(r - mean_batch) / (std_batch + 1e-4)", _REINFORCE, needs_global=True
        ),
        Estimator(
            "reinforce++-baseline",
            reinforce_plus_plus_baseline,
            "c = r - mean_group; c / (std_batch(c) + 1e-4)",
            _REINFORCE,
            needs_global=True,
        ),
        Estimator("remax", remax, "r - r_greedy", _REMAX, needs_greedy=True),
        Estimator("maxrl", maxrl, "(r - mean_group) / mean_group, 0 where mean_group <= 0", _MAXRL),
    )
}
