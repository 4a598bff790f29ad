"""TTRL (arXiv 2504.16084): without any labels, the answer that most of the group give counts as the right one.

    ycore grpo --recipe quickstart --no-dynamic-sampling --advantage docs/methods/ttrl.py:majority

The reward is 1 for the answer with the most votes of its prompt, else 0; the advantage is GRPO's. The rewards of the run
are measured and not learned from, so `exact_answer` shows whether the votes are right. It makes a policy surer of what it
does already, and can make it sure of what is wrong.
"""

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def majority(group: Any) -> Tensor:
    """The advantages of a group; the first of several answers with as many votes wins."""
    found = [_NUMBER.findall(completion.text) for completion in group.completions]
    answers = [numbers[-1] if numbers else None for numbers in found]
    votes = Counter(answer for answer in answers if answer is not None).most_common(1)
    elected = votes[0][0] if votes else None
    rewards = [float(answer is not None and answer == elected) for answer in answers]
    values = torch.tensor(rewards, dtype=torch.float64, device=group.mask.device)
    return (values - values.mean()) / (values.std() + 1e-4)
