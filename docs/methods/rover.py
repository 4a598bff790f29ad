"""ROVER (arXiv 2509.24981): fit the values of a uniformly random policy, and sample by their softmax.

    ycore grpo --recipe quickstart --advantage dr-grpo --loss docs/methods/rover.py:valued

The value of a token is RHO log(pi / pi_old), and is fitted by least squares to the reward less the mean of its group, plus
the mean value of the next token over the vocabulary. At the first optimizer step of a round pi is pi_old, so that every
value is 0: the gradient is exactly the paper's, and that of `--preset dr-grpo` averaged by tokens, 2 RHO times as large.
With more optimizer steps a round the next token's mean would be above 0; a loss gets the written tokens only, so it is
left out, as the authors' option `target_adv_only` does.
"""

from torch import Tensor

RHO = 1.0


def valued(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss by token, and the mean value; `advantages` are the rewards less the mean of their group."""
    values = RHO * (logprobs - old_logprobs)
    mean = (values.detach() * mask).sum() / mask.sum().clamp(min=1)
    return (values - advantages).square(), {"rover/value": mean}
