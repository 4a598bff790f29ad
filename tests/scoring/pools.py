"""Pools of reward workers, and the scores of all rewards of one."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ycore.config.schema import RewardConfig, RewardSettings, RunConfig, SandboxSettings
from ycore.run.files import RunFolder
from ycore.scoring.scoring import RewardPool
from ycore.types import Content, Score


class StartedPool(RewardPool):
    """Example: `async with StartedPool(config, folder, specs) as pool: await pool.score(0, offered, step=1)`."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def pool_in(
    folder: Path,
    *specs: RewardConfig,
    settings: RewardSettings | None = None,
    level: str = "auto",
) -> StartedPool:
    """Return the workers of these rewards, of a run in this folder."""
    config = RunConfig(
        model="m",
        dataset="d",
        output=str(folder),
        rewards=[*specs],
        reward_workers=settings or RewardSettings(),
        sandbox=SandboxSettings.model_validate({"level": level}),
    )
    return StartedPool(config, RunFolder(folder), specs)


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
