"""Tools and environments as the trainer asks them: a process for each completion that uses them, used again after it.

A call that raises is an answer. A call that hangs is ended at its deadline, with its process; a call that ends its
process is an answer too. The environment in such a process is lost, and its completion masked. Nothing ends the run.
"""

import asyncio
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ycore.config.schema import NO_ENVIRONMENT, RunConfig
from ycore.errors import ConfigError, RewardError
from ycore.foreign import (
    ForeignRefused,
    foreign_json,
    foreign_line,
    foreign_reward,
    foreign_text,
    read_tool,
)
from ycore.rollout.mcp_server import MCP_PREFIX
from ycore.rollout.tool_host import MAX_TEXT, PYTHON
from ycore.run.files import RunFolder
from ycore.sandbox import Confinement, Limits, View
from ycore.sandbox.confined_worker import START_TIMEOUT_S, CallFailed, ConfinedWorker
from ycore.sandbox.level import choose_level, require_sandbox
from ycore.sandbox.program_pool import PROGRAM_LIMITS
from ycore.sandbox.user_code import user_code_confinement
from ycore.types import NO_PROMPT, Prompt, Record, Score, number_from

T = TypeVar("T")

_DESCRIBE_TIMEOUT_S = 300.0
"""A worker that describes tools imports transformers, which takes long where a machine is busy."""
_MAX_REPLY_BYTES = (
    12 * MAX_TEXT + 4096
)  # JSON takes 12 bytes for a character beyond the first plane


class ToolSet(NamedTuple):
    """The tools that the policy may call: JSON schemas as transformers makes them.

    `takes_text`: the environment's only tool is `step(text)`, and gets whole turns. `pays`: it has `get_reward`.
    `pays_turns`: it pays for single turns too.
    """

    tools: tuple[Record, ...]
    takes_text: bool = False
    pays: bool = False
    pays_turns: bool = False


class Answer(NamedTuple):
    """A call's answer, as the policy reads it, and whether the call failed."""

    text: str
    failed: bool = False


class OutOfTime(Exception):
    """The completion has had its seconds of tools and environment."""


class ToolWorker(ConfinedWorker[ToolSet]):
    """A process with tools and perhaps an environment."""

    module = "ycore.rollout.tool_host"
    kind = "tool worker"

    def __init__(
        self,
        tools: Sequence[str],
        env: str | None,
        confinement: Confinement,
        *,
        name: str,
        log: Path | None,
        python: str | None,
        describe: bool = False,
    ) -> None:
        """`python` is another Python to run in; `describe` asks for schemas, which takes seconds."""
        super().__init__(
            {"tools": list(tools), "env": env, "describe": describe},
            _read_tool_set,
            confinement,
            name=name,
            log=log,
            start_timeout_s=_DESCRIBE_TIMEOUT_S if describe else START_TIMEOUT_S,
        )
        self.env = env
        if python is not None:
            self.arguments = (python_files(python)[0],)

    async def ask(self, op: str, *, deadline_s: float, **request: Any) -> Any:
        """Return the value of an operation; CallFailed where it raised, hung or ended the process."""
        reply = await self.exchange(
            {"op": op, **request}, max_bytes=_MAX_REPLY_BYTES, timeout_s=deadline_s
        )
        return _read_value(reply)


def _read_tool_set(ready: Any) -> ToolSet:
    try:
        return ToolSet(**{**ready, "tools": tuple(map(read_tool, ready["tools"]))})
    except (KeyError, TypeError, ValueError) as problem:
        raise CallFailed(
            f"no answer of a tool worker: no description of its tools ({foreign_line(str(problem))})"
        ) from None


def _read_value(reply: Record) -> Any:
    value = reply.get("value")
    if "value" not in reply or not (value is None or isinstance(value, str | int | float)):
        raise CallFailed("no answer of a tool worker: no value")
    return foreign_text(value, max_characters=MAX_TEXT) if isinstance(value, str) else value


def describe_tools(
    config: RunConfig, *, run_folder: Path | None = None
) -> dict[str | None, ToolSet]:
    """Return the tools of each environment, by its name: loaded once in confined processes; {} without tools.

    Raises:
        ConfigError: a tool or environment cannot be used.
    """
    if not config.tools and not config.env:
        return {}
    if PYTHON in config.tools:
        require_sandbox(choose_level(config.sandbox.level), f"tool {PYTHON!r}")
    confinement = _tools_confinement(config, run_folder=run_folder, run_id="check")
    environments = dict[str | None, str | None](config.environments.items())
    if not config.env:
        environments[None] = None
    if any(part.environment == NO_ENVIRONMENT for part in config.mixture):
        environments.setdefault(NO_ENVIRONMENT)
    return {
        name: asyncio.run(_describe(config, env, confinement))
        for name, env in environments.items()
    }


async def _describe(config: RunConfig, env: str | None, confinement: Confinement) -> ToolSet:
    worker = ToolWorker(
        config.tools,
        env,
        confinement,
        name="describe",
        log=None,
        python=config.env_python,
        describe=True,
    )
    try:
        tool_set = await worker.start()
        has_prompts = config.dataset or await worker.ask(
            "reset", deadline_s=config.turns.call_s, row={"prompt": NO_PROMPT}
        )
    except CallFailed as failure:
        message = str(failure)
        if message.startswith(("worker died", "timeout")):
            message += f" (its last words: {worker.last_line})"
        raise ConfigError(message) from None
    finally:
        await worker.close()
    if not has_prompts:
        raise ConfigError(
            f"environment {env!r} says nothing at its reset, and there is no dataset; say --dataset"
        )
    return tool_set


def _tools_confinement(
    config: RunConfig, *, run_folder: Path | None, run_id: str
) -> Confinement:
    names = [
        MCP_PREFIX if name.startswith(MCP_PREFIX) else name
        for name in config.tools
        if name != PYTHON
    ]
    names += config.environments.values()
    read = [] if config.env_python is None else python_files(config.env_python)[1:]
    return turns_confinement(config, names, read=read, run_folder=run_folder, run_id=run_id)


def turns_confinement(
    config: RunConfig,
    names: Sequence[str],
    *,
    read: Sequence[str] = (),
    run_folder: Path | None,
    run_id: str,
) -> Confinement:
    """Return the confinement of a user's code of these names, by `turns.sandbox`; it may also `read` these paths."""
    allowed = config.turns.sandbox
    return user_code_confinement(
        names,
        read=[*allowed.read, *read],
        network=allowed.network,
        gpu=allowed.gpu,
        level=config.sandbox.level,
        memory_gib=config.turns.memory_gib,
        run_folder=run_folder,
        run_id=run_id,
    )


@cache
def python_files(python: str) -> tuple[str, ...]:
    """Return a Python's executable, then what it must read to start and import; ConfigError where it is unusable.

    Its files say so: it is run where it is confined, and nowhere else.
    """
    executable = Path(os.path.abspath(shutil.which(os.path.expanduser(python)) or python))
    real = executable.resolve()
    base = real.parent.parent
    prefix = executable.parent.parent
    is_python = real.name.startswith(("python", "pypy")) and any(base.glob("lib/*/os.py"))
    if not is_python or not os.access(executable, os.X_OK):
        raise ConfigError(
            f"env_python {python!r} is no Python; give the path of a Python, as its sys.executable says it"
        )
    paths = [str(base)]
    if (prefix / "pyvenv.cfg").is_file():
        paths.append(str(prefix))
        for file in prefix.glob("lib/*/site-packages/*.pth"):  # editable installs
            paths += filter(os.path.isabs, file.read_text(errors="replace").splitlines())
    return (str(executable), *(path for path in paths if path != "/usr" and path.strip("/")))


class ToolPool:
    """Example: `pool = ToolPool(config, folder); episode = Episode(pool, ...); await pool.close()`.

    Processes are started when they are needed, `turns.at_once` at most of a kind: those of the user's tools and
    environment, and those of the tool `python`, which see no file. A process serves completion after completion, but
    for one with an MCP server or the tool `python`, which keep state.
    """

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.config = config
        self.workers: list[ToolWorker] = []
        self.has_servers = any(name.startswith(MCP_PREFIX) for name in config.tools)
        self._idle: list[ToolWorker] = []
        self._log = folder.log("tools")
        self._confinement = _tools_confinement(
            config, run_folder=folder.root, run_id=folder.run_id
        )
        limits: Limits = replace(PROGRAM_LIMITS, memory=int(config.turns.memory_gib * 2**30))
        self._python_confinement = self._confinement._replace(view=View(), limits=limits)
        self._worker_slots = asyncio.Semaphore(config.turns.at_once)
        self._interpreter_slots = asyncio.Semaphore(config.turns.at_once)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def worker(self, env: str | None) -> AsyncIterator[ToolWorker]:
        """Hold a process with the user's tools and this environment."""
        async with self._worker_slots:
            worker = await self._take_idle(env) or self._new(
                [name for name in self.config.tools if name != PYTHON],
                env,
                self._confinement,
                python=self.config.env_python,
            )
            try:
                yield worker
            finally:
                if self.has_servers:
                    await self._end(worker)
                else:
                    self._idle.append(worker)

    async def _take_idle(self, env: str | None) -> ToolWorker | None:
        """Return the last used worker of this environment; without any, make room for a new worker."""
        for worker in reversed(self._idle):
            if worker.env == env:
                self._idle.remove(worker)
                return worker
        if self._idle and len(self.workers) >= self.config.turns.at_once:
            await self._end(self._idle.pop(0))
        return None

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[ToolWorker]:
        """Hold a new process for what the model writes; it is ended afterwards, with all that was done to it."""
        async with self._interpreter_slots:
            worker = self._new([PYTHON], None, self._python_confinement, python=None)
            try:
                yield worker
            finally:
                await self._end(worker)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))

    async def _end(self, worker: ToolWorker) -> None:
        self.workers.remove(worker)
        await worker.close()

    def _new(
        self,
        tools: Sequence[str],
        env: str | None,
        confinement: Confinement,
        *,
        python: str | None,
    ) -> ToolWorker:
        name = f"tools.{next(self._numbers)}"
        worker = ToolWorker(tools, env, confinement, name=name, log=self._log, python=python)
        self.workers.append(worker)
        return worker


class Episode:
    """A completion's tools and environment: `async with Episode(...) as episode`, `begin`, calls or steps, `reward`.

    All that is random in it follows from the run's seed, the prompt's position, the completion's index and the number
    of the call. The beginning does not depend on the index: the completions of a group start alike.
    """

    def __init__(self, pool: ToolPool, prompt: Prompt, *, position: int, index: int) -> None:
        self._prompt = prompt
        self.seconds = 0.0
        self._pool = pool
        self._settings = pool.config.turns
        self._seed_key = f"{pool.config.seed}/{position}"
        self._index = index
        environment = pool.config.environment_of(prompt.dataset, prompt.columns)
        self._env = pool.config.environments.get(environment or "")
        self._stack = AsyncExitStack()
        self._worker: ToolWorker | None = None
        self._interpreter: ToolWorker | None = None
        self._num_calls = 0
        self._problem: str | None = None

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    async def begin(self) -> str | None:
        """Reset the environment, if there is one; return its first observation, or None."""
        if self._env is None:
            return None
        try:
            return await self._timed(self._begin(self._env))
        except (CallFailed, RewardError) as failure:
            self.lose(f"reset: {failure}")
        return None

    def lose(self, problem: str) -> None:
        """Take the environment for lost: its later answers are errors, and its reward is masked."""
        self._problem = self._problem or problem

    async def call(self, name: str, arguments: Record) -> Answer:
        """Return a tool's answer; OutOfTime where no time is left."""
        request = {"name": name, "arguments": dict(arguments)}
        in_interpreter = name == PYTHON and PYTHON in self._pool.config.tools
        answer = await self._answer(
            self._interpret(request) if in_interpreter else self._ask("call", **request)
        )
        assert answer is not None
        return answer

    async def step(self, text: str) -> Answer | None:
        """Return the answer of an environment that takes text; None where it is over."""
        return await self._answer(self._ask("step", text=text))

    async def _answer(self, work: Awaitable[Any]) -> Answer | None:
        try:
            value = await self._timed(work)
        except (CallFailed, RewardError) as failure:
            return Answer(str({"error": str(failure)}), failed=True)  # TRL's form
        return None if value is None else Answer(str(value))

    async def turn_reward(self) -> float | None:
        """Return what the environment paid since the last turn; None where it paid no finite number, or is lost."""
        with suppress(CallFailed, RewardError):
            return foreign_reward(await self._timed(self._ask("turn_reward")))
        return None

    async def reward(self) -> Score:
        """Return what the environment pays for the whole episode."""
        if self._env is None:
            return Score(None)
        if self._problem is None and self._worker is not None:
            try:
                value = await self._timed(self._ask("reward"))
                paid = foreign_reward(value)
                if value is None or paid is not None:
                    return Score(paid)
                self.lose(f"get_reward gave {foreign_line(repr(value), max_characters=60)}")
            except (CallFailed, RewardError, OutOfTime) as failure:
                self.lose(f"get_reward: {failure or 'out of time'}")
        return Score(None, problem=f"environment: {self._problem}"[:300])

    async def attributes(self) -> str | None:
        """Return the environment's attributes as JSON; None where it is lost, or there is none."""
        if self._env is None:
            return None
        with suppress(CallFailed, RewardError, OutOfTime, ForeignRefused):
            value = await self._timed(self._ask("attributes"))
            return json.dumps(foreign_json(value)) if isinstance(value, str) else None
        return None

    async def _timed(self, work: Awaitable[T]) -> T:
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds += time.perf_counter() - began

    async def _ask(self, op: str, **request: Any) -> Any:
        if self._problem is not None:
            raise CallFailed(f"the environment is gone: {self._problem}")
        if self._env is None and not self._pool.has_servers:
            async with self._pool.worker(None) as worker:
                await worker.ready()
                return await self._send(worker, op, request)
        if self._worker is None:
            self._worker = await self._stack.enter_async_context(self._pool.worker(self._env))
            await self._worker.ready()
        try:
            return await self._send(self._worker, op, request)
        except CallFailed as failure:
            if not self._worker.is_running:
                self.lose(str(failure))
            raise

    async def _interpret(self, request: Record) -> Any:
        if self._interpreter is None:
            self._interpreter = await self._stack.enter_async_context(self._pool.interpreter())
        await self._interpreter.ready()
        return await self._send(self._interpreter, "call", request)

    async def _send(self, worker: ToolWorker, op: str, request: Record) -> Any:
        time_left_s = self._settings.completion_s - self.seconds
        if time_left_s <= 0:
            raise OutOfTime
        self._num_calls += 1
        return await worker.ask(
            op,
            deadline_s=min(time_left_s, self._settings.call_s),
            seed=number_from(f"{self._seed_key}/{self._index}/{self._num_calls}", bits=32),
            **request,
        )

    async def _begin(self, env: str) -> str | None:
        """Reset the environment; in a new process where a used one does not answer any more."""
        worker = await self._stack.enter_async_context(self._pool.worker(env))
        self._worker = worker
        was_used = worker.is_running
        try:
            return await self._reset(worker)
        except CallFailed:
            if worker.is_running or not was_used:
                raise
        return await self._reset(worker)

    async def _reset(self, worker: ToolWorker) -> str | None:
        await worker.ready()
        row = {**self._prompt.columns, "prompt": self._prompt.content}
        if len(self._pool.config.env) > 1:  # then `environment` is not passed on, as in TRL
            row.pop("environment", None)
        observation: str | None = await worker.ask(
            "reset",
            deadline_s=self._settings.call_s,
            seed=number_from(self._seed_key, bits=32),
            row=json.loads(json.dumps(row, default=str)),
        )
        return observation
