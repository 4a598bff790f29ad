"""The scores of all rewards of a pool."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ycore.scoring.scoring import RewardPool
from ycore.types import Content, Score


async def rows_of(
    pool: RewardPool,
    prompts: Sequence[Content],
    completions: Sequence[Content],
    completion_ids: Sequence[list[int]],
    columns: Mapping[str, Sequence[Any]],
    *,
    step: int = 1,
) -> list[list[Score]]:
    """Return a row for each completion, with a score for each reward of the pool."""
    offered = {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
    }
    calls = (pool.score(source, offered, step=step) for source in range(len(pool._callers)))
    return [list(row) for row in zip(*await asyncio.gather(*calls), strict=True)]
