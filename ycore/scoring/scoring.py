"""Scoring: all reward sources of a run side by side, in the config's order.

A scorer receives a group while it is still being written. One that looks at completions one by one starts as each ends,
so that scoring overlaps with generation; one that compares completions waits for those that it compares.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ycore.engine.judge_engine import JudgeEngine, RemoteTeacher
from ycore.engine.vllm_engine import VllmRewardModel, VllmTeacher
from ycore.placement.slots import SlotLease, Slots
from ycore.run.images import ImageStore
from ycore.run.meter import CountMeter, Meter
from ycore.run.tasks import together
from ycore.scoring.reward_pool import RewardPool
from ycore.types import Completion, Draw, Image, Prompt, Score

TextOf = Callable[[Completion], str]  # the part of a completion that a reward source looks at
plain_text: TextOf = attrgetter("transcript")


@dataclass(frozen=True, slots=True)
class Writing:
    """A group while it is written. `tasks_G[g]` ends when completion `g` is written."""

    draw: Draw
    tasks_G: Sequence[asyncio.Task[Completion]]
    step: int
    slots: Slots

    def __len__(self) -> int:
        return len(self.tasks_G)

    async def all(self) -> list[Completion]:
        return list(await asyncio.gather(*self.tasks_G))

    @asynccontextmanager
    async def turn(self, role: str) -> AsyncIterator[SlotLease]:
        """A scorer's turn on a slot. Where slots are shared in time, it waits until the whole group is written."""
        if self.slots.gathers:
            await self.all()
        async with self.slots.turn(role) as turn:
            yield turn


class Scorer:
    """One or more reward sources of one kind. `engines` are those that it waits for and closes."""

    engines: Sequence[JudgeEngine | VllmRewardModel | VllmTeacher | RemoteTeacher] = ()

    async def start(self, *, timeout_s: float) -> None:
        await together([engine.wait_ready(timeout_s=timeout_s) for engine in self.engines])

    async def score(self, writing: Writing) -> list[list[Score]]:
        """Scores by completion and by the scorer's own source. A completion that cannot be scored is masked.

        Here: one source, whose completions are scored one by one as each is written.
        """
        scores = await together([self.score_one(writing, index) for index in range(len(writing))])
        return [[score] for score in scores]

    async def score_one(self, writing: Writing, index: int) -> Score:
        """The score of one completion, for scorers that do not compare completions."""
        raise AssertionError("a scorer defines score or score_one")

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


class Scoring:
    """All scorers of a run, each with the indices of the reward sources that it serves.

    Example: `Scoring([((0, 2), RuleScorer(pool)), ((1,), judge)])`: of three sources, the second is a judge.
    """

    def __init__(
        self, scorers: Sequence[tuple[Sequence[int], Scorer]], meters: Sequence[Meter] = ()
    ) -> None:
        self.meters, self._scorers = meters, scorers
        self._num_sources = sum(len(sources) for sources, _ in scorers)

    async def start(self, *, timeout_s: float) -> None:
        await together([scorer.start(timeout_s=timeout_s) for _, scorer in self._scorers])

    async def score(self, writing: Writing) -> list[list[Score]]:
        """`scores_GR`: a score for each completion and reward source."""
        parts = await together([scorer.score(writing) for _, scorer in self._scorers])
        scores_GR = [[Score(None)] * self._num_sources for _ in range(len(writing))]
        for (sources, _), part in zip(self._scorers, parts, strict=True):
            for scores_R, own_scores in zip(scores_GR, part, strict=True):
                for source, score in zip(sources, own_scores, strict=True):
                    scores_R[source] = score
        return scores_GR

    async def close(self) -> None:
        await asyncio.gather(*(scorer.close() for _, scorer in self._scorers))


NO_FOLDER = ImageStore(None)


class RuleScorer(Scorer):
    """Reward functions in worker processes. They receive whole groups, since a function may compare completions."""

    def __init__(self, pool: RewardPool, images: ImageStore = NO_FOLDER) -> None:
        self._pool, self._images = pool, images

    async def start(self, *, timeout_s: float) -> None:
        await self._pool.start()

    async def score(self, writing: Writing) -> list[list[Score]]:
        draw, completions = writing.draw, await writing.all()
        size = len(completions)
        columns = {name: [value] * size for name, value in draw.prompt.columns.items()}
        columns |= self.beside(draw.prompt, completions)
        return await self._pool.score(
            [draw.prompt.content] * size,
            [
                completion.messages if draw.prompt.is_chat else completion.text
                for completion in completions
            ],
            [list(completion.token_ids) for completion in completions],
            columns,
            step=writing.step,
        )

    def beside(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, list[Any]]:
        """What the functions may ask for beside the dataset's columns and the completions themselves."""
        columns: dict[str, list[Any]] = {}
        if prompt.images:
            columns["images"] = [[self.file_of(image) for image in prompt.images]] * len(
                completions
            )
        if any(completion.world is not None for completion in completions):
            columns["environments"] = [completion.world for completion in completions]
        return columns

    def file_of(self, image: Image) -> str:
        """Where a worker reads a picture."""
        return str(self._images.path(image.sha256))

    async def close(self) -> None:
        await self._pool.close()


@dataclass
class RewardModelMeter(CountMeter):
    """All reward models of a run. `seconds` are those of the requests, without the wait for a slot."""

    calls: float = 0
    seconds: float = 0
    tokens: float = 0

    def count(self, *, seconds: float, tokens: int) -> None:
        self.calls, self.seconds, self.tokens = (
            self.calls + 1,
            self.seconds + seconds,
            self.tokens + tokens,
        )

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return RewardModelMeter(*sums).named("reward_model")

    def named(self, kind: str) -> dict[str, float]:
        latency_s = self.seconds / max(1, self.calls)
        counts = {"calls": self.calls, "latency_s": latency_s, "tokens": self.tokens}
        return {f"ycore/{kind}/{name}": value for name, value in counts.items()}


@dataclass
class TeacherMeter(RewardModelMeter):
    """All teachers of a run."""

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return TeacherMeter(*sums).named("teacher")


@dataclass
class JudgeMeter(RewardModelMeter):
    """All judges of a run."""

    parse_failures: float = 0
    pairs: float = 0
    pairs_by_position: float = 0

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        total = JudgeMeter(*sums)
        metrics = {**total.named("judge"), "ycore/judge/parse_failures": total.parse_failures}
        if total.pairs:
            metrics["ycore/judge/pairs"] = total.pairs
            metrics["ycore/judge/position_bias"] = total.pairs_by_position / total.pairs
        return metrics


@dataclass(slots=True)
class WorkerMeter:
    """The worker processes of reward functions. `restarts` returns how many were started again so far.

    `level`: what confines them, as a number: 2 namespaces, 1 Landlock, 0 nothing.
    """

    restarts: Callable[[], int]
    level: int
    reported: int = 0

    def take(self) -> Sequence[float]:
        restarts = self.restarts()
        new, self.reported = restarts - self.reported, restarts
        return [float(new)]

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        return {"ycore/reward_restarts": sums[0], "ycore/sandbox_level": self.level}
