"""A reward model as it is declared: a sequence classifier with one number, and how that number becomes a reward.

Not here: its server (`roles.reward_model`).
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from ycore.config.run import Positive, Strict


class RewardModel(Strict):
    """`--reward rm:MODEL`; these are its `args`."""

    model: str
    """A hub id or folder of a sequence classifier with one label."""

    center: float = 0.0
    """Taken from the model's number: its mean over ordinary completions, say."""

    multiplier: Annotated[float, Field(gt=0)] = 1.0
    clip: tuple[float, float] | None = None
    """The least and the most that it may give, after both."""

    max_model_len: Positive | None = None
    """Longest prompt plus completion, in tokens; None is the model's own context, 4096 at most."""

    @model_validator(mode="after")
    def _clips_a_range(self) -> Self:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip is the least and the most, in this order; it is {list(self.clip)}")
        return self

    def reward(self, logit: float) -> float:
        value = (logit - self.center) * self.multiplier
        return value if self.clip is None else min(max(value, self.clip[0]), self.clip[1])
