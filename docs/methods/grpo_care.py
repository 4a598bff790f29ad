"""GRPO-CARE (arXiv 2506.16141): of the right answers, those that follow from their reasoning get a bonus.

    ycore grpo --recipe quickstart --reward exact_answer --reward reference_probability \\
        --set rewards.1.weight=0 --set rewards.1.args.debias=false \\
        --no-dynamic-sampling --advantage docs/methods/grpo_care.py:consistent

The first reward is the outcome, and the last, of weight 0, how likely the right answer is after the completion's reasoning.
Of the completions whose outcome is at least the group's mean, those as likely as their mean get BONUS times their outcome
on top; likelihoods count up to CAP. The advantage is GRPO's. The paper asks a slow average of the policy for the
likelihood; `reference_probability` asks the policy itself. Without reasoning before the answer the bonus says nothing.
"""

from typing import Any

from torch import Tensor

BONUS = 0.5
CAP = 0.95
MARGIN = 0.01
"""How far below the mean a likelihood may be, as in the authors' scripts."""


def consistent(group: Any) -> Tensor:
    """The advantages of a group."""
    outcome, *_, likelihood = group.rewards_by_source.values()
    likelihood = likelihood.clamp(max=CAP)
    is_accurate = (outcome > 0.1) & (outcome >= outcome.nanmean())
    is_likely = likelihood >= likelihood[is_accurate].nanmean() - MARGIN
    rewards = outcome + BONUS * outcome * (is_accurate & is_likely)
    scored = ~group.rewards.isnan()
    deviation = rewards[scored].std() if scored.sum() > 1 else 0.0
    return (rewards - rewards[scored].mean()) / (deviation + 1e-4)
