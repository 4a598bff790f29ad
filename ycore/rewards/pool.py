"""RewardPool: scores groups of completions in worker processes; a bad reward costs its items, never the run.

WorkerProcess: one `ycore.rewards.worker` seen from its parent: started when needed, asked with a deadline, killed.

Not here: the processes (`worker_process`), the functions (`builtin`, `importing`), weights and sums (the trainer's).
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from ycore.config.schema import RewardConfig, RewardSettings
from ycore.errors import RewardError
from ycore.rewards.child import reward_environment
from ycore.rewards.loading import Inputs, reward_names
from ycore.run.process_tree import kill_tree
from ycore.types import Content, Score

START_TIMEOUT_S = 120.0
MAX_STARTS = 3
_REAP_TIMEOUT_S = 5.0
_LONGEST_LINE = 64 * 2**20


class CallFailed(Exception):
    """One call gave no list of rewards; the message is the problem that its items will carry."""


class WorkerProcess:
    """Holds no process until `ready`, which replaces one that is gone; none any more after `close`."""

    def __init__(
        self,
        specs: Sequence[RewardConfig],
        *,
        deadline_s: float,
        log: Path,
        run_id: str,
        run_as: Literal["auto", "same"] = "auto",
    ) -> None:
        self._specs = [spec.model_dump(mode="json") for spec in specs]
        self._deadline_s = deadline_s
        self._log = log
        self._run_id = run_id
        self._run_as = run_as
        self._process: Process | None = None
        self._killed: Process | None = None
        self._is_closed = False
        self._num_calls = 0
        self._inputs: list[Inputs] = []
        self._was_ready = False
        self.restarts = 0
        """How often a process took the place of one that had been ready."""

    async def ready(self) -> list[Inputs]:
        """Have a process with the rewards loaded; what each asks for. RewardError after 3 failed starts in a row."""
        if self._process is not None and self._process.returncode is None:
            return self._inputs
        self._kill()
        reason = ""
        for attempt in range(MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                self._inputs = await self._launch()
                self.restarts += self._was_ready
                self._was_ready = True
                return self._inputs
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a reward worker did not start in {MAX_STARTS} attempts: {reason}; its output is in {self._log}"
        )

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One call's answer; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        if self._process is None:
            raise RuntimeError("ask a reward worker only when it is ready")
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
        if self._is_closed:
            raise RuntimeError("this reward worker is closed")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "ycore.rewards.worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env=reward_environment(self._run_id),
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        if self._is_closed:  # closed while the process was being made
            self._kill()
            raise RuntimeError("this reward worker is closed")
        reply = await self._exchange(
            process, {"specs": self._specs, "run_as": self._run_as, "id": None}, START_TIMEOUT_S
        )
        if "error" in reply:
            self._kill()
            raise CallFailed(reply["error"])
        return [Inputs(**inputs) for inputs in reply["ready"]]

    async def _exchange(self, process: Process, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one line, read the line that answers it. A process that did not answer is never asked again."""
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._send_and_read(process, message)
            answered = True
        except TimeoutError:
            raise CallFailed(f"timeout after {timeout_s:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise CallFailed(f"worker died ({await self._how_it_ended(process)})") from None
        except (ValueError, asyncio.LimitOverrunError) as error:
            raise CallFailed(f"no answer of a worker: {error}") from None
        finally:
            if not answered:
                self._kill()
        return reply

    async def _send_and_read(self, process: Process, message: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()
        while True:
            reply = json.loads(await process.stdout.readuntil(b"\n"))
            if isinstance(reply, dict) and reply.get("id") == message["id"]:
                return reply

    async def _how_it_ended(self, process: Process) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.wait()
        if process.returncode is None:
            return "it closed its output"
        return f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"

    def _kill(self) -> None:
        if self._process is None:
            return
        kill_tree(self._process.pid)
        self._process, self._killed = None, self._process

    async def _reap(self) -> None:
        if self._killed is not None:
            # Bounded: what a reward detached from its group may hold the pipes that `wait` also waits for.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REAP_TIMEOUT_S):
                    await self._killed.wait()
            self._killed = None


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
