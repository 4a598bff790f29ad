"""A round as TRL sees it: one flat sequence a completion, in the order of the groups.

Not here: the batch that is made of them (TRL, `trl_seam`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ycore.types import Group, Score


@dataclass(frozen=True, slots=True)
class FlatSequence:
    """One completion with its row, flat, in the order TRL sees."""

    row: dict[str, Any]
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None
    rewards: list[float]
    greedy_rewards: list[float]
    policy_version: int


def sequences_of(group: Group) -> list[FlatSequence]:
    """One a completion, in the group's order; NaN where a source gave nothing."""
    prompt = group.draw.prompt
    row = {**prompt.columns, "prompt": prompt.content}
    return [
        FlatSequence(
            row=row,
            prompt_ids=list(group.draw.token_ids),
            completion_ids=list(completion.token_ids),
            logprobs=None if completion.logprobs is None else list(completion.logprobs),
            rewards=_values(scores),
            greedy_rewards=_values(group.greedy_scores_R or ()),
            policy_version=completion.policy_version,
        )
        for completion, scores in zip(group.completions, group.scores_GR, strict=True)
    ]


def _values(scores: Sequence[Score]) -> list[float]:
    return [float("nan") if score.value is None else score.value for score in scores]
