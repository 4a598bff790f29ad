"""Reward functions in worker processes: a function that fails costs its completions their scores, never the run."""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from ycore.config.schema import (
    RewardConfig,
    RewardSettings,
    RunConfig,
    SandboxSettings,
    ScoredConfig,
)
from ycore.data.prompts import PromptSet
from ycore.rewards.loading import IN_THINKING, Inputs
from ycore.rewards.worker_client import AUTO, RewardWorker, check_reward, reward_confinement
from ycore.run.images import ImageStore
from ycore.run.paths import RunFolder
from ycore.run.tasks import together
from ycore.sandbox.confined_worker import CallFailed
from ycore.sandbox.level import LEVEL_NUMBERS, choose_level
from ycore.scoring.scoring import NO_IMAGES, PendingGroup, Scorer
from ycore.types import Completion, Content, Prompt, Score


class _Caller(NamedTuple):
    """The workers that call a reward, of which the idle ones wait, and its index among their rewards."""

    idle: asyncio.Queue[RewardWorker]
    source: int


class RewardPool:
    """Example: `async with RewardPool(specs, settings=..., log=..., run_id=...) as pool: await pool.score(...)`.

    Belongs to one event loop; its workers end with the thread that runs it. Rewards that may see or reach different
    things are never in one process.
    """

    def __init__(
        self,
        specs: Sequence[RewardConfig],
        *,
        settings: RewardSettings,
        log: Path,
        run_id: str,
        sandbox: SandboxSettings = AUTO,
        run_folder: Path | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            log: takes what the workers and the rewards print.
            run_id: marks the workers' environment, and decides their users where ycore is root.
            run_folder: what the rewards must not see.
        """
        self._deadline_s = settings.deadline_s
        self._workers: list[RewardWorker] = []
        self._restarts_reported = 0
        self.level = choose_level(sandbox.level).level
        callers: dict[int, _Caller] = {}
        for number, sources in enumerate(_by_sandbox(specs)):
            group = [specs[source] for source in sources]
            idle = asyncio.Queue[RewardWorker]()
            confinement = reward_confinement(
                group, settings=settings, sandbox=sandbox, run_folder=run_folder, run_id=run_id
            )
            for slot in range(settings.workers):
                worker = RewardWorker(group, confinement, log=log, name=f"{number}.{slot}")
                self._workers.append(worker)
                idle.put_nowait(worker)
            callers |= {source: _Caller(idle, index) for index, source in enumerate(sources)}
        self._callers = [callers[source] for source in range(len(specs))]

    def take(self) -> Sequence[float]:
        """Return how many workers were started since the last call in place of one that hung or ended."""
        restarts = sum(worker.restarts for worker in self._workers) - self._restarts_reported
        self._restarts_reported += restarts
        return [float(restarts)]

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return the restarts, and the sandbox level: 2 namespaces, 1 Landlock, 0 nothing."""
        level = LEVEL_NUMBERS[self.level]
        return {"ycore/reward_restarts": sums[0], "ycore/sandbox_level": level}

    async def start(self) -> None:
        """Start every worker now, not at its first call; RewardError when the rewards cannot be loaded."""
        await together([worker.ready() for worker in self._workers])

    async def score(
        self,
        prompts: list[Content],
        completions: list[Content],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        *,
        step: int,
        uncalled: Collection[int] = (),
    ) -> list[list[Score]]:
        """Score completions together; a call that fails is repeated item by item, so that only the guilty are masked.

        Args:
            uncalled: the rewards that give nothing.
            columns: the dataset's columns by name, one value per completion.
            step: the training step, which rewards see as `trainer_state.global_step`.

        Returns:
            `[completion][reward]`; the rewards in the order of `specs`.
        """
        if not completions:
            return []
        offered = {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids,
        }
        sources = range(len(self._callers))
        called = [source for source in sources if source not in uncalled]
        scores_RG = await together([self._score(source, offered, step) for source in called])
        scores = dict(zip(called, scores_RG, strict=True))
        nothing = [Score(None)] * len(completions)
        rows = zip(*(scores.get(source, nothing) for source in sources), strict=True)
        return [list(scores_R) for scores_R in rows]

    async def close(self) -> None:
        """Kill the workers, whatever they are doing; the pool cannot be used again."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _score(
        self, source: int, offered: Mapping[str, Sequence[Any]], step: int
    ) -> list[Score]:
        caller = self._callers[source]
        size = len(offered["completions"])
        worker = await caller.idle.get()
        try:
            inputs = (await worker.ready())[caller.source]
            return await worker.ask(
                caller.source,
                {"step": step, "inputs": _taken(inputs, offered)},
                count=size,
                deadline_s=self._deadline_s,
            )
        except CallFailed as failure:
            if size == 1:
                return [Score(None, problem=str(failure))]
        finally:
            caller.idle.put_nowait(worker)
        items = [
            {name: [values[index]] for name, values in offered.items()} for index in range(size)
        ]
        scores = await together([self._score(source, item, step) for item in items])
        return [score for (score,) in scores]


def _taken(inputs: Inputs, offered: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return what a reward takes and JSON can carry (no image, no date); CallFailed where it lacks something."""
    taken = {IN_THINKING: offered[IN_THINKING]} if IN_THINKING in offered else {}
    for name in filter(inputs.accepts, offered):
        try:
            json.dumps(offered[name])
            taken[name] = offered[name]
        except (TypeError, ValueError) as error:
            if name in inputs.required:
                raise CallFailed(
                    f"column {name!r} cannot be sent to a worker: {error}"
                ) from error
    return taken


def _by_sandbox(specs: Sequence[RewardConfig]) -> list[list[int]]:
    """The rewards in groups that may share a process, because the recipe allows each of a group the same."""
    groups: dict[str, list[int]] = {}
    for source, spec in enumerate(specs):
        groups.setdefault(spec.sandbox.model_dump_json(), []).append(source)
    return list(groups.values())


def reward_pool(
    config: ScoredConfig, folder: RunFolder, specs: Sequence[RewardConfig]
) -> RewardPool:
    """Return the workers of these reward functions; they see the run's images, and nothing else of it."""
    return RewardPool(
        specs,
        settings=config.reward_workers,
        log=folder.log("rewards"),
        run_id=folder.run_id,
        sandbox=config.sandbox,
        run_folder=folder.root,
    )


@dataclass(eq=False)
class RuleScorer(Scorer):
    """Reward functions in worker processes. They receive whole groups, since a function may compare completions."""

    pool: RewardPool
    images: ImageStore = NO_IMAGES
    uncalled: Mapping[str, Collection[int]] = field(default_factory=dict)

    @classmethod
    def check_rows(cls, spec: RewardConfig, config: RunConfig, prompts: PromptSet) -> None:
        check_reward(
            spec,
            [*prompts.columns, *(["environments"] if config.env else [])],
            settings=config.reward_workers,
            sandbox=config.sandbox,
            run_folder=Path(config.output),
        )

    @classmethod
    def image_problem(cls, spec: RewardConfig, config: RunConfig) -> str | None:
        return None

    async def start(self, *, timeout_s: float) -> None:
        await self.pool.start()

    async def score(self, group: PendingGroup) -> list[list[Score]]:
        completions = await group.all()
        prompt = group.draw.prompt
        num = len(completions)
        columns = {name: [value] * num for name, value in prompt.columns.items()}
        if prompt.is_chat:
            contents: list[Any] = [completion.messages for completion in completions]
        else:
            contents = [completion.text for completion in completions]
        return await self.pool.score(
            [prompt.content] * num,
            contents,
            [list(completion.token_ids) for completion in completions],
            columns | self.extra_columns(prompt, completions),
            step=group.step,
            uncalled=self.uncalled.get(prompt.dataset, ()),
        )

    def extra_columns(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> dict[str, list[Any]]:
        """Return what functions may ask for beside the dataset's columns and the completions themselves."""
        columns: dict[str, list[Any]] = {}
        if any(completion.in_thinking for completion in completions):
            columns[IN_THINKING] = [completion.in_thinking for completion in completions]
        if prompt.images:
            files = [str(self.images.path(image.sha256)) for image in prompt.images]
            columns["images"] = [files] * len(completions)
        if any(completion.env_state is not None for completion in completions):
            columns["environments"] = [completion.env_state for completion in completions]
        return columns

    async def close(self) -> None:
        await self.pool.close()
