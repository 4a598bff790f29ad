"""RewardPool: scores groups of completions in worker processes; a bad reward costs its items, never the run."""

import asyncio
import json
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from ycore.config.schema import RewardConfig, RewardSettings
from ycore.errors import RewardError
from ycore.rewards.child import WORKER, reward_environment
from ycore.rewards.loading import Inputs, reward_names
from ycore.run.process_tree import kill_tree
from ycore.types import Content, Score

_START_TIMEOUT_S = 120.0
_MAX_STARTS = 3
_REAP_TIMEOUT_S = 5.0
_MAX_LINE = 64 * 2**20  # bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Batch:
    """Completions to score together: everything that a reward may ask for, by keyword, one value per completion."""

    offered: Mapping[str, Sequence[Any]]
    step: int
    size: int

    def item(self, index: int) -> "_Batch":
        """One completion alone."""
        return _Batch({name: [values[index]] for name, values in self.offered.items()}, self.step, size=1)

    def request(self, source: int, inputs: Inputs) -> dict[str, Any]:
        """A worker's request, with only what the reward takes and JSON can carry (no image, no date)."""
        sent = {}
        for name in filter(inputs.accepts, self.offered):
            try:
                json.dumps(self.offered[name])
                sent[name] = self.offered[name]
            except (TypeError, ValueError) as error:
                if name in inputs.required:
                    raise CallFailed(f"column {name!r} cannot be sent to a worker: {error}") from error
        return {"source": source, "step": self.step, "count": self.size, "inputs": sent}


class RewardPool:
    """Example: `async with RewardPool(specs, settings=..., log=..., run_id=...) as pool: await pool.score(...)`.

    Belongs to one event loop; its workers end with the thread that runs it. `problems` counts masked items by
    `<reward>: <kind of problem>`.
    """

    def __init__(self, specs: Sequence[RewardConfig], *, settings: RewardSettings, log: Path, run_id: str) -> None:
        """Start nothing yet.

        Args:
            log: takes what the workers and the rewards print.
            run_id: marks the workers' environment, and decides their user where they give up root.
        """
        self.problems: Counter[str] = Counter()
        self._names = reward_names(specs)
        self._workers = [_Worker(specs, settings, log, run_id) for _ in range(settings.workers)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def restarts(self) -> int:
        """How many workers were started so far in place of one that hung or ended."""
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
        """Score completions together; a call that fails is repeated item by item, so that only the guilty are masked.

        Args:
            columns: the dataset's columns by name, one value per completion.
            step: the training step, which rewards see as `trainer_state.global_step`.

        Returns:
            `[completion][reward]`; the rewards in the order of `specs`.
        """
        if not completions:
            return []
        offered = {**columns, "prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        batch = _Batch(offered, step, len(completions))
        scores_RG = await _together([self._score(source, batch) for source in range(len(self._names))])
        for name, scores in zip(self._names, scores_RG, strict=True):
            kinds = [score.problem.partition(":")[0] for score in scores if score.problem is not None]
            self.problems.update(f"{name}: {kind}" for kind in kinds)
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
        worker = await self._idle.get()
        try:
            inputs = await worker.ready()
            reply = await worker.ask(batch.request(source, inputs[source]))
            return [Score(*pair) for pair in zip(reply["values"], reply["problems"], strict=True)]
        except CallFailed as failure:
            if batch.size == 1:
                return [Score(None, problem=str(failure))]
        finally:
            self._idle.put_nowait(worker)
        scores = await _together([self._score(source, batch.item(index)) for index in range(batch.size)])
        return [score for (score,) in scores]


class CallFailed(Exception):
    """One call gave no list of rewards; the message is the problem that its items will carry."""


class _Worker:
    """One `ycore.rewards.worker` seen from its parent. It has no process until `ready`, and none after `close`."""

    def __init__(self, specs: Sequence[RewardConfig], settings: RewardSettings, log: Path, run_id: str) -> None:
        self._first = {"specs": [spec.model_dump(mode="json") for spec in specs], "run_as": settings.run_as, "id": None}
        self._deadline_s, self._log, self._run_id = settings.deadline_s, log, run_id
        self._process: Process | None = None
        self._killed: Process | None = None
        self._inputs: list[Inputs] = []
        self._is_closed = False
        self._num_calls = self.restarts = 0

    async def ready(self) -> list[Inputs]:
        """The parameters of each reward, once a process has loaded them; RewardError after 3 failed starts in a row."""
        if self._process is not None and self._process.returncode is None:
            return self._inputs
        self._kill()
        reason = ""
        for attempt in range(_MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                was_ready = bool(self._inputs)
                self._inputs = await self._launch()
                self.restarts += was_ready
                return self._inputs
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a reward worker did not start in {_MAX_STARTS} attempts: {reason}; its output is in {self._log}"
        )

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One call's answer; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        assert self._process is not None, "ask a reward worker only when it is ready"
        self._num_calls += 1
        reply = await self._exchange(self._process, {**request, "id": self._num_calls}, self._deadline_s)
        if "failed" in reply:
            raise CallFailed(reply["failed"])
        return reply

    async def close(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        self._is_closed = True
        self._kill()
        await self._reap()

    async def _launch(self) -> list[Inputs]:
        await self._reap()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        environment = reward_environment(self._run_id)
        with self._log.open("ab") as log:
            self._require_open()
            process = self._process = await asyncio.create_subprocess_exec(
                *WORKER, stdin=PIPE, stdout=PIPE, stderr=log, env=environment, start_new_session=True, limit=_MAX_LINE
            )
        self._require_open()  # it may have been closed while the process was being made
        reply = await self._exchange(process, self._first, _START_TIMEOUT_S)
        if "error" in reply:
            self._kill()
            raise CallFailed(reply["error"])
        return [Inputs(**inputs) for inputs in reply["ready"]]

    def _require_open(self) -> None:
        if self._is_closed:
            self._kill()
            raise RuntimeError("this reward worker is closed")

    async def _exchange(self, process: Process, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line, read the line that answers it. A process that did not answer is never asked again."""
        assert process.stdin is not None and process.stdout is not None
        reply: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(json.dumps(message).encode() + b"\n")
                await process.stdin.drain()
                while reply is None:
                    line = json.loads(await process.stdout.readuntil(b"\n"))
                    if isinstance(line, dict) and line.get("id") == message["id"]:
                        reply = line
            return reply
        except TimeoutError:
            raise CallFailed(f"timeout after {timeout_s:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise CallFailed(f"worker died ({await self._how_it_ended(process)})") from None
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise CallFailed(f"no answer of a worker: {error}") from None
        finally:
            if reply is None:
                self._kill()

    async def _how_it_ended(self, process: Process) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 1.0)
        if process.returncode is None:
            return "it closed its output"
        return f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"

    def _kill(self) -> None:
        if self._process is not None:
            kill_tree(self._process.pid)
            self._process, self._killed = None, self._process

    async def _reap(self) -> None:
        if self._killed is not None:
            # Bounded: what a reward detached from its group may hold the pipes that `wait` also waits for.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._killed.wait(), _REAP_TIMEOUT_S)
            self._killed = None


async def _together(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run side by side; when one fails, end the others before its error goes on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
