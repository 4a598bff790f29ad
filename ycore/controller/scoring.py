"""Scoring: the reward sources of a run side by side, whatever kind each is, in the config's order.

A scorer is given a group while it is still being written. One that looks at completions one by one starts as each ends,
so that its work overlaps with the writing of the others; one that compares waits for those that it compares.

Not here: the kinds (`judge_scorer`, `reward_model_scorer`; rules are the workers of `rewards.pool`), weights and sums
(`sampling.keep`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ycore.controller.dispatch import Slots, Turn
from ycore.controller.meters import Meter, collect
from ycore.controller.peers import AddUp
from ycore.rewards.pool import RewardPool
from ycore.types import Completion, Content, Draw, Score

T = TypeVar("T")


TextOf = Callable[[Completion], str]
"""The part of a completion that a reward source looks at."""


def plain_text(completion: Completion) -> str:
    """All of it."""
    return completion.text


@dataclass(frozen=True, slots=True)
class Writing:
    """A group while it is written: a completion is there when its task has ended."""

    draw: Draw
    tasks_G: Sequence[asyncio.Task[Completion]]
    step: int
    slots: Slots

    def __len__(self) -> int:
        return len(self.tasks_G)

    async def all(self) -> list[Completion]:
        return list(await asyncio.gather(*self.tasks_G))

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[Turn]:
        """A scorer's turn on a slot; where the group's are better asked together, once all of it is written."""
        if self.slots.gathers:
            await self.all()
        async with self.slots.turn(role) as turn:
            yield turn


class Scorer(Protocol):
    """One or more reward sources of one kind."""

    async def start(self, *, timeout_s: float) -> None:
        """Return once it can score; an error of ycore's when it cannot."""

    async def score(self, writing: Writing) -> list[list[Score]]:
        """`[completion][its own source]`; what cannot be scored is masked, and only that."""

    async def close(self) -> None:
        """Let go of what it holds."""


class Scoring:
    """Example: `Scoring([((0, 2), RuleScorer(pool)), ((1,), judge)])`: source 1 of three is a judge's."""

    def __init__(self, scorers: Sequence[tuple[Sequence[int], Scorer]], meters: Sequence[Meter] = ()) -> None:
        self._scorers = scorers
        self._meters = meters
        self._num_sources = sum(len(sources) for sources, _ in scorers)

    async def start(self, *, timeout_s: float) -> None:
        await together([scorer.start(timeout_s=timeout_s) for _, scorer in self._scorers])

    async def score(self, writing: Writing) -> list[list[Score]]:
        """`[completion][reward source]`."""
        parts = await together([scorer.score(writing) for _, scorer in self._scorers])
        rows = [[Score(None)] * self._num_sources for _ in range(len(writing))]
        for (sources, _), part in zip(self._scorers, parts, strict=True):
            for row, scores in zip(rows, part, strict=True):
                for source, score in zip(sources, scores, strict=True):
                    row[source] = score
        return rows

    def take_metrics(self, add_up: AddUp) -> dict[str, float]:
        """What judges and reward models did since this was last asked, over all ranks."""
        return collect(self._meters, add_up)

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for _, scorer in self._scorers))


class RuleScorer:
    """Plain functions in worker processes. They get whole groups: a function may compare completions."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool

    async def start(self, *, timeout_s: float) -> None:
        await self._pool.start()

    async def score(self, writing: Writing) -> list[list[Score]]:
        draw, completions = writing.draw, await writing.all()
        size = len(completions)
        return await self._pool.score(
            [draw.prompt.content] * size,
            [as_content(completion.text, chat=draw.prompt.is_chat) for completion in completions],
            [list(completion.token_ids) for completion in completions],
            {name: [value] * size for name, value in draw.prompt.columns.items()},
            step=writing.step,
        )

    async def close(self) -> None:
        await self._pool.close()


def rules_alone(pool: RewardPool, *, num_sources: int = 1) -> Scoring:
    """The scoring of a run whose rewards are all plain functions."""
    return Scoring([(tuple(range(num_sources)), RuleScorer(pool))])


def as_content(text: str, *, chat: bool) -> Content:
    """A completion in the shape of its prompt, as TRL's rewards expect it."""
    return [{"role": "assistant", "content": text}] if chat else text


async def together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side; when one fails, end the others before its error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
