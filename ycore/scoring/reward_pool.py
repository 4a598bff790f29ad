"""RewardPool: scores groups of completions in worker processes; a bad reward costs its items, never the run."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings
from ycore.rewards.loading import Inputs
from ycore.rewards.worker_client import AUTO, RewardWorker, reward_confinement
from ycore.run.tasks import together
from ycore.sandbox.confined_worker import CallFailed
from ycore.sandbox.level import choose_level
from ycore.types import Content, Score


@dataclass(frozen=True, slots=True)
class _Batch:
    """Completions to score together: everything that a reward may ask for, by keyword, one value per completion."""

    offered: Mapping[str, Sequence[Any]]
    step: int
    size: int

    def item(self, index: int) -> "_Batch":
        """One completion alone."""
        return _Batch(
            {name: [values[index]] for name, values in self.offered.items()}, self.step, size=1
        )

    def request(self, inputs: Inputs) -> dict[str, Any]:
        """A worker's request, with only what the reward takes and JSON can carry (no image, no date)."""
        sent = {}
        for name in filter(inputs.accepts, self.offered):
            try:
                json.dumps(self.offered[name])
                sent[name] = self.offered[name]
            except (TypeError, ValueError) as error:
                if name in inputs.required:
                    raise CallFailed(
                        f"column {name!r} cannot be sent to a worker: {error}"
                    ) from error
        return {"step": self.step, "inputs": sent}


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
        self.level = choose_level(sandbox.level).level
        callers: dict[int, _Caller] = {}
        for number, sources in enumerate(_by_sandbox(specs)):
            group, idle = [specs[source] for source in sources], asyncio.Queue[RewardWorker]()
            held = reward_confinement(
                group, settings=settings, sandbox=sandbox, run_folder=run_folder, run_id=run_id
            )
            for slot in range(settings.workers):
                worker = RewardWorker(group, held, log=log, name=f"{number}.{slot}")
                self._workers.append(worker)
                idle.put_nowait(worker)
            callers |= {source: _Caller(idle, index) for index, source in enumerate(sources)}
        self._callers = [callers[source] for source in range(len(specs))]

    @property
    def restarts(self) -> int:
        """How many workers were started so far in place of one that hung or ended."""
        return sum(worker.restarts for worker in self._workers)

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
    ) -> list[list[Score]]:
        """Score completions together; a call that fails is repeated item by item, so that only the guilty are masked.

        Args:
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
        batch = _Batch(offered, step, len(completions))
        scores_RG = await together(
            [self._score(source, batch) for source in range(len(self._callers))]
        )
        return [list(scores_R) for scores_R in zip(*scores_RG, strict=True)]

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

    async def _score(self, source: int, batch: _Batch) -> list[Score]:
        caller = self._callers[source]
        worker = await caller.idle.get()
        try:
            inputs = await worker.ready()
            request = batch.request(inputs[caller.source])
            return await worker.ask(
                caller.source, request, count=batch.size, deadline_s=self._deadline_s
            )
        except CallFailed as failure:
            if batch.size == 1:
                return [Score(None, problem=str(failure))]
        finally:
            caller.idle.put_nowait(worker)
        scores = await together(
            [self._score(source, batch.item(index)) for index in range(batch.size)]
        )
        return [score for (score,) in scores]


def _by_sandbox(specs: Sequence[RewardConfig]) -> list[list[int]]:
    """The rewards in groups that may share a process, because the recipe allows each of a group the same."""
    groups: dict[str, list[int]] = {}
    for source, spec in enumerate(specs):
        groups.setdefault(spec.sandbox.model_dump_json(), []).append(source)
    return list(groups.values())
