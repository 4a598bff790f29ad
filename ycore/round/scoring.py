"""Scoring: the reward sources of a run side by side, whatever kind each is, in the config's order.

A scorer is given a group while it is still being written. One that looks at completions one by one starts as each ends,
so that its work overlaps with the writing of the others; one that compares waits for those that it compares.

What judges, reward models and reward workers did in a step, added up over sources and ranks, as the step's metrics.

Not here: the kinds (`judge_scorer`, `reward_model_scorer`; rules are the workers of `rewards.pool`), weights and sums
(`sampling.keep`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, fields
from typing import Any, Protocol, TypeVar

from ycore.rewards.pool import RewardPool
from ycore.round.peers import AddUp
from ycore.round.slots import Slots, Turn
from ycore.types import Completion, Content, Draw, Score


class Meter(Protocol):
    """Counts that can be added to those of other ranks."""

    def take(self) -> Sequence[float]:
        """The counts since this was last asked; as many numbers on every rank."""

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """The step's metrics, of the sums over all ranks."""


@dataclass(slots=True)
class JudgeMeter:
    """All judges of a run; `seconds` are those of the calls, from a slot's turn on."""

    calls: float = 0
    parse_failures: float = 0
    seconds: float = 0
    tokens: float = 0
    pairs: float = 0
    pairs_by_position: float = 0

    def take(self) -> Sequence[float]:
        return _taken(self)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        all_ranks = JudgeMeter(*sums)
        told = {
            "ycore/judge/calls": all_ranks.calls,
            "ycore/judge/parse_failures": all_ranks.parse_failures,
            "ycore/judge/latency_s": _ratio(all_ranks.seconds, all_ranks.calls),
            "ycore/judge/tokens": all_ranks.tokens,
        }
        if all_ranks.pairs:
            told["ycore/judge/position_bias"] = all_ranks.pairs_by_position / all_ranks.pairs
        return told


@dataclass(slots=True)
class RewardModelMeter:
    """All reward models of a run."""

    calls: float = 0
    seconds: float = 0
    tokens: float = 0

    def take(self) -> Sequence[float]:
        return _taken(self)

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        all_ranks = RewardModelMeter(*sums)
        return {
            "ycore/reward_model/calls": all_ranks.calls,
            "ycore/reward_model/latency_s": _ratio(all_ranks.seconds, all_ranks.calls),
            "ycore/reward_model/tokens": all_ranks.tokens,
        }


@dataclass(slots=True)
class WorkerMeter:
    """The processes of plain functions; `restarts` tells how many were started again so far."""

    restarts: Callable[[], int]
    told: int = 0

    def take(self) -> Sequence[float]:
        now = self.restarts()
        new, self.told = now - self.told, now
        return [float(new)]

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {"ycore/reward_restarts": sums[0]}


def collect(meters: Sequence[Meter], add_up: AddUp) -> dict[str, float]:
    """The metrics of all meters, over all ranks, by one sum."""
    taken = [meter.take() for meter in meters]
    flat = [value for counts in taken for value in counts]
    sums = add_up(flat) if flat else []
    told: dict[str, float] = {}
    for meter, counts in zip(meters, taken, strict=True):
        told |= meter.metrics(sums[: len(counts)])
        sums = sums[len(counts) :]
    return told


def _taken(meter: JudgeMeter | RewardModelMeter) -> tuple[float, ...]:
    counts = astuple(meter)
    for field in fields(meter):
        setattr(meter, field.name, 0)
    return counts


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0


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
