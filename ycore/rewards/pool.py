"""RewardPool: scores groups of completions in worker processes; a bad reward costs its items, never the run.

Not here: the processes (`worker_process`), the functions (`builtin`, `importing`), weights and sums (the trainer's).
"""

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ycore.config.run import RewardConfig, RewardSettings
from ycore.rewards.inputs import Inputs
from ycore.rewards.loading import reward_names
from ycore.rewards.worker_process import CallFailed, WorkerProcess
from ycore.types import Content, Score

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Batch:
    """Completions to score together, with everything that a reward may ask for."""

    prompts: Sequence[Content]
    completions: Sequence[Content]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    step: int

    def __len__(self) -> int:
        return len(self.completions)

    def item(self, index: int) -> "Batch":
        """The same, of one completion alone."""
        return Batch(
            prompts=[self.prompts[index]],
            completions=[self.completions[index]],
            completion_ids=[self.completion_ids[index]],
            columns={name: [values[index]] for name, values in self.columns.items()},
            step=self.step,
        )

    def request(self, source: int, inputs: Inputs) -> dict[str, Any]:
        """The line that asks a worker: only what the reward takes travels."""
        offered = {
            **self.columns,
            "prompts": self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
        }
        wanted = {name: values for name, values in offered.items() if inputs.accepts(name)}
        sendable = {name: values for name, values in wanted.items() if _is_sendable(name, values, inputs)}
        return {"source": source, "step": self.step, "count": len(self), "inputs": sendable}


class RewardPool:
    """Example: `async with RewardPool(specs, settings=..., log=..., run_id=...) as pool: await pool.score(...)`.

    Belongs to one event loop; its workers end with the thread that runs it. `problems` counts what was masked, by
    `<reward>: <kind>`.
    """

    def __init__(self, specs: Sequence[RewardConfig], *, settings: RewardSettings, log: Path, run_id: str) -> None:
        self.problems: Counter[str] = Counter()
        self._names = reward_names(specs)
        self._workers = [
            WorkerProcess(specs, deadline_s=settings.deadline_s, log=log, run_id=run_id, run_as=settings.run_as)
            for _ in range(settings.workers)
        ]
        self._idle: asyncio.Queue[WorkerProcess] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def restarts(self) -> int:
        """Workers that were started in place of one that hung or ended, so far."""
        return sum(worker.restarts for worker in self._workers)

    async def start(self) -> None:
        """Start every worker now, not at its first call; RewardError when the rewards cannot be loaded."""
        await _together([worker.ready() for worker in self._workers])

    async def score(
        self,
        prompts: list[Content],
        completions: list[Content],
        completion_ids: list[list[int]],
        columns: Mapping[str, list[Any]],
        *,
        step: int,
    ) -> list[list[Score]]:
        """`[completion][reward source]`. A call that fails is repeated item by item, so only the guilty are masked."""
        if not completions:
            return []
        batch = Batch(prompts, completions, completion_ids, columns, step)
        scores_RG = await _together([self._score(source, batch) for source in range(len(self._names))])
        for name, scores in zip(self._names, scores_RG, strict=True):
            self.problems.update(f"{name}: {_kind(score.problem)}" for score in scores if score.problem is not None)
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _score(self, source: int, batch: Batch) -> list[Score]:
        try:
            return await self._call(source, batch)
        except CallFailed as failure:
            if len(batch) == 1:
                return [Score(None, problem=str(failure))]
        scores = await _together([self._score(source, batch.item(index)) for index in range(len(batch))])
        return [score for (score,) in scores]

    async def _call(self, source: int, batch: Batch) -> list[Score]:
        worker = await self._idle.get()
        try:
            inputs = await worker.ready()
            reply = await worker.ask(batch.request(source, inputs[source]))
        finally:
            self._idle.put_nowait(worker)
        values = zip(reply["values"], reply["problems"], strict=True)
        return [Score(value, problem) for value, problem in values]


async def _together(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run side by side; when one fails, end the others before its error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _kind(problem: str) -> str:
    """`raised ValueError: bad literal` is of the kind `raised ValueError`."""
    return problem.partition(":")[0]


def _is_sendable(name: str, values: Sequence[Any], inputs: Inputs) -> bool:
    """Whether JSON can carry it (no image, no date); a reward that cannot do without it has failed."""
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        if name in inputs.required:
            raise CallFailed(f"column {name!r} cannot be sent to a worker: {error}") from error
        return False
    return True
