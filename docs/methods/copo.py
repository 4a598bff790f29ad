"""COPO (arXiv 2508.04138): where the answers of a group agree, learn from how its prompt does against the others.

    ycore grpo --recipe quickstart --no-dynamic-sampling --advantage docs/methods/copo.py:blended

The local advantage is GRPO's. The global one compares the mean reward of the prompt with those of the other prompts of
the step, and is the same for all its completions. The local one weighs sigmoid(SLOPE (H - MIDDLE)), where H is the entropy
of the group's answers in bits, and the global one the rest: a group whose answers are all wrong, and all the same, still
teaches. The paper blends two clipped losses; with one optimizer step a round that is the loss of the blended advantage.
SLOPE and MIDDLE are those of the authors' script, which gives wrong answers the global advantage alone; the paper does not.
"""

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

SLOPE = 5.0
MIDDLE = 1.0
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def blended(group: Any) -> Tensor:
    """The advantages of a group."""
    scored = ~group.rewards.isnan()
    local = _standardised(group.rewards, group.rewards[scored])
    means = group.batch_rewards.nanmean(dim=1)
    of_prompt = _standardised(group.rewards[scored].mean(), means[~means.isnan()])
    weight = torch.sigmoid(SLOPE * (_entropy(group) - MIDDLE))
    return weight * local + (1 - weight) * of_prompt


def _standardised(values: Tensor, of: Tensor) -> Tensor:
    deviation = of.std() if len(of) > 1 else 0.0
    return (values - of.mean()) / (deviation + 1e-4)


def _entropy(group: Any) -> Tensor:
    """Return the entropy of the answers: the last number of each completion, or its text."""
    texts = [completion.text for completion in group.completions]
    answers = Counter((_NUMBER.findall(text) or [text.strip()])[-1] for text in texts)
    shares = torch.tensor(list(answers.values()), dtype=torch.float64) / len(texts)
    return -(shares * shares.log2()).sum()
