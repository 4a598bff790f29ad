"""The round: every completion asked at once, each group scored as its last completion ends.

Not here: the weights before it (`controller.source`), the prompts (`draws`), what an engine is (`roles`).
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ycore.controller.draws import completion_seed
from ycore.rewards.pool import RewardPool
from ycore.roles.engine import Engine
from ycore.types import Completion, Content, Draw, Group, Score


@dataclass(slots=True)
class RoundStats:
    """What one round took; seconds, counted over all its parts."""

    generate_s: float = 0.0
    score_s: float = 0.0
    num_tokens: int = 0
    num_masked: int = 0
    problems: list[str] = field(default_factory=list)


class Dispatcher:
    """Sends each completion to the engine with the fewest in flight."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._in_flight = {index: 0 for index in range(len(engines))}
        self._engines = engines

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        index = min(self._in_flight, key=lambda i: self._in_flight[i])
        self._in_flight[index] += 1
        try:
            yield self._engines[index]
        finally:
            self._in_flight[index] -= 1


class Round:
    """Turns draws into scored groups."""

    def __init__(self, engines: Sequence[Engine], rewards: RewardPool, *, group_size: int, seed: int) -> None:
        self._dispatcher = Dispatcher(engines)
        self._rewards = rewards
        self._group_size = group_size
        self._seed = seed

    async def run(self, draws: Sequence[Draw], *, step: int) -> tuple[list[Group], RoundStats]:
        """Every draw's group, in the draws' order."""
        stats = RoundStats()
        async with asyncio.TaskGroup() as tasks:
            groups = [tasks.create_task(self.group(draw, step=step, stats=stats)) for draw in draws]
        return [group.result() for group in groups], stats

    async def group(self, draw: Draw, *, step: int, stats: RoundStats) -> Group:
        started = time.perf_counter()
        completions = await asyncio.gather(*(self._complete(draw, index) for index in range(self._group_size)))
        generated = time.perf_counter()
        scores = await self._score(draw, completions, step=step)
        stats.generate_s = max(stats.generate_s, generated - started)
        stats.score_s += time.perf_counter() - generated
        stats.num_tokens += sum(len(completion.token_ids) for completion in completions)
        stats.num_masked += sum(all(score.value is None for score in row) for row in scores)
        stats.problems += [score.problem for row in scores for score in row if score.problem]
        return Group(draw, tuple(completions), tuple(tuple(row) for row in scores))

    async def _complete(self, draw: Draw, index: int) -> Completion:
        with self._dispatcher.engine() as engine:
            return await engine.complete(draw.token_ids, completion_seed(self._seed, draw.position, index))

    async def _score(self, draw: Draw, completions: Sequence[Completion], *, step: int) -> list[list[Score]]:
        size = len(completions)
        return await self._rewards.score(
            [draw.prompt.content] * size,
            [as_content(completion.text, chat=draw.prompt.is_chat) for completion in completions],
            [list(completion.token_ids) for completion in completions],
            {name: [value] * size for name, value in draw.prompt.columns.items()},
            step=step,
        )


def as_content(text: str, *, chat: bool) -> Content:
    """A completion in the shape of its prompt, as TRL's rewards expect it."""
    return [{"role": "assistant", "content": text}] if chat else text

