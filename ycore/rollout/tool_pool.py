"""Tools and environments as the trainer asks them: a process for each completion that is with one, used again after it.

A call that raises is an answer. One that hangs is ended at its deadline, with its process; one that ends its process is
an answer too. An environment that was lost so begins anew and takes its earlier calls again. Nothing ends the run.
"""

import asyncio
import hashlib
import itertools
import json
import math
import os
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError, RewardError
from ycore.rollout.mcp_server import PREFIX
from ycore.rollout.openenv_local import PREFIX as OPENENV
from ycore.rollout.tool_host import MOST_TEXT, PYTHON
from ycore.sandbox import Confinement, Limits, View
from ycore.sandbox.confined_worker import (
    START_TIMEOUT_S,
    CallFailed,
    ConfinedWorker,
    foreign_line,
    reply_in,
)
from ycore.sandbox.level import choose_level, require_sandbox
from ycore.sandbox.program_pool import PROGRAM_LIMITS
from ycore.sandbox.user_code import user_code_confinement
from ycore.types import NO_PROMPT, Prompt, Score

_CHECK_DEADLINE_S = (
    300.0  # it imports transformers, for the schemas, which takes long where a machine is busy
)
_BYTES_A_LETTER = 12  # in JSON, a letter beyond the first plane


@dataclass(frozen=True, slots=True)
class Description:
    """What a run's tools and environment are: JSON schemas, as transformers makes them, of everything to be called.

    `takes_text`: the environment's only tool is `step(text)`, and gets whole turns. `pays`: it has `get_reward`.
    `pays_turns`: it pays for single turns too.
    """

    tools: tuple[Mapping[str, Any], ...]
    takes_text: bool = False
    pays: bool = False
    pays_turns: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool["function"]["name"] for tool in self.tools)


class Answer(NamedTuple):
    """What a call gave, as the policy is told it, and whether it failed."""

    text: str
    failed: bool = False


class ToolHost(ConfinedWorker[Description]):
    """One process with tools and perhaps an environment."""

    module, kind = "ycore.rollout.tool_host", "tool worker"

    def __init__(
        self,
        tools: Sequence[str],
        env: str | None,
        held: Confinement,
        *,
        python: str | None = None,
        describe: bool = False,
        **how: Any,
    ) -> None:
        """`python` is another one to run in, `describe` asks for schemas (seconds), `how` is `ConfinedWorker`'s."""
        super().__init__(
            {"tools": list(tools), "env": env, "describe": describe}, _description, held, **how
        )
        self.arguments = () if python is None else (_other_python(python)[0],)
        self.env = env

    async def ask(self, op: str, *, deadline_s: float, **request: Any) -> Any:
        """The value that an operation gives; CallFailed where it raised, hung or ended the process."""
        message = {"op": op, **request}
        return await self.exchange(
            message, _value, max_bytes=_BYTES_A_LETTER * MOST_TEXT + 4096, timeout_s=deadline_s
        )


def _description(line: bytes, nonce: str) -> Description:
    reply = reply_in(line, nonce)
    if isinstance(reply.get("error"), str):
        raise CallFailed(foreign_line(reply["error"], max_characters=600))
    try:
        ready = reply["ready"]
        told = (bool(ready[name]) for name in ("takes_text", "pays", "pays_turns"))
        found = Description(tuple(ready["tools"]), *told)
        if all(isinstance(name, str) for name in found.names):
            return found
    except (KeyError, TypeError):
        pass
    raise CallFailed("no answer of a tool worker: no description")


def _value(line: bytes, nonce: str) -> Any:
    reply = reply_in(line, nonce)
    if isinstance(reply.get("failed"), str):
        raise Raised(foreign_line(reply["failed"]))
    value = reply.get("value")
    if "value" not in reply or not (value is None or isinstance(value, str | int | float)):
        raise CallFailed("no answer of a tool worker: no value")
    return value[:MOST_TEXT] if isinstance(value, str) else value


class Raised(CallFailed):
    """The code raised, and its process goes on."""


def describe_tools(
    config: RunConfig, *, run_folder: Path | None = None
) -> dict[str | None, Description]:
    """What the policy may call in each environment, by its name: loaded once in confined processes; {} without tools.

    Raises:
        ConfigError: one cannot be used.
    """
    if not config.tools and not config.env:
        return {}
    if PYTHON in config.tools:
        require_sandbox(choose_level(config.sandbox.level), f"tool {PYTHON!r}")
    held = _confinement(config, run_folder=run_folder, run_id="check")
    if not config.env:
        return {None: asyncio.run(_described(config, None, held))}
    return {
        name: asyncio.run(_described(config, env, held))
        for name, env in config.environments.items()
    }


async def _described(config: RunConfig, env: str | None, held: Confinement) -> Description:
    how: dict[str, Any] = {"log": None, "name": "describe", "start_timeout_s": _CHECK_DEADLINE_S}
    host = ToolHost(config.tools, env, held, python=config.env_python, describe=True, **how)
    try:
        found = await host.start()
        asks = config.dataset or await host.ask(
            "reset", deadline_s=config.turns.call_s, row={"prompt": NO_PROMPT}
        )
    except CallFailed as failure:
        where = (
            f" (its last words: {host.last_line})"
            if str(failure).startswith(("worker died", "timeout"))
            else ""
        )
        raise ConfigError(f"{failure}{where}") from None
    finally:
        await host.close()
    if not asks:
        raise ConfigError(
            f"environment {env!r} says nothing at its reset, and there is no dataset; say --dataset"
        )
    if not found.tools and not found.takes_text and env is None:
        raise ConfigError("there is no tool and no environment; name one with --tools or --env")
    return found


def _confinement(config: RunConfig, *, run_folder: Path | None, run_id: str) -> Confinement:
    """That of the person's own tools and environment."""
    if config.env_python is not None:
        read = [*config.turns.sandbox.read, *_other_python(config.env_python)[1:]]
        opened = config.turns.sandbox.model_copy(update={"read": read})
        config = config.model_copy(
            update={"turns": config.turns.model_copy(update={"sandbox": opened})}
        )
    names = [PREFIX if name.startswith(PREFIX) else name for name in config.tools if name != PYTHON]
    names += [env.removeprefix(OPENENV) for env in config.environments.values()]
    return held_like_rewards(config, names, run_folder=run_folder, run_id=run_id)


def held_like_rewards(
    config: RunConfig, names: Sequence[str], *, run_folder: Path | None, run_id: str
) -> Confinement:
    """The confinement of a person's own code of these names, by `turns.sandbox`."""
    allowed = config.turns.sandbox
    return user_code_confinement(
        names,
        read=allowed.read,
        network=allowed.network,
        gpu=allowed.gpu,
        level=config.sandbox.level,
        memory_gib=config.turns.memory_gib,
        run_folder=run_folder,
        run_id=run_id,
    )


@cache
def _other_python(python: str) -> tuple[str, ...]:
    """Its executable, then what it must read to start and import; ConfigError where none starts that can be used."""
    asked = (
        "import json, os, sys, sysconfig; print(json.dumps([sys.version_info[:2], [sys.executable, sys.prefix, "
        "sys.base_prefix, os.path.realpath(sys.executable), *sysconfig.get_paths().values(), *sys.path]]))"
    )
    try:
        command = [os.path.expanduser(python), "-I", "-c", asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        version, paths = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            f"env_python {python!r} does not start ({why}); give the path of a Python"
        ) from None
    if tuple(version) < (3, 11):
        raise ConfigError(
            f"env_python {python!r} is Python {version[0]}.{version[1]}; tools need 3.11 or later"
        )
    found = dict.fromkeys(os.path.abspath(path) for path in paths if os.path.exists(path))
    return (paths[0], *(path for path in found if not f"{path}/".startswith("/usr/")))


class ToolPool:
    """Example: `pool = ToolPool(config, log=..., run_id=...); episode = Episode(pool, ...); await pool.close()`.

    Processes are started when they are needed, `turns.at_once` at most of a kind: those of the person's tools and
    environment, and those of the tool `python`, which see no file and serve one completion each.
    """

    def __init__(
        self, config: RunConfig, *, log: Path, run_id: str, run_folder: Path | None = None
    ) -> None:
        self.config, self._log = config, log
        self._own = _confinement(config, run_folder=run_folder, run_id=run_id)
        limits: Limits = replace(PROGRAM_LIMITS, memory=int(config.turns.memory_gib * 2**30))
        self._code = replace(self._own, view=View(), limits=limits)
        self._room = {name: asyncio.Semaphore(config.turns.at_once) for name in ("own", PYTHON)}
        self._idle: list[ToolHost] = []
        self.hosts: list[ToolHost] = []
        self._numbers = itertools.count()

    @property
    def has_servers(self) -> bool:
        """Whether there are MCP servers, which may keep things: a completion has its own."""
        return any(name.startswith(PREFIX) for name in self.config.tools)

    @asynccontextmanager
    async def own(self, env: str | None) -> AsyncIterator[ToolHost]:
        """A process with the person's tools and this environment, for this holder alone."""
        async with self._room["own"]:
            host = next((one for one in reversed(self._idle) if one.env == env), None)
            if host is not None:
                self._idle.remove(host)
            else:
                if (
                    len(self.hosts) >= self.config.turns.at_once and self._idle
                ):  # of other environments
                    self.hosts.remove(oldest := self._idle.pop(0))
                    await oldest.close()
                host = self._new(self._own_tools, env, self._own, python=self.config.env_python)
            try:
                yield host
            finally:
                if self.has_servers and host.is_running:
                    with suppress(CallFailed):
                        await host.ask("end_servers", deadline_s=self.config.turns.call_s)
                self._idle.append(host)

    @asynccontextmanager
    async def interpreter(self) -> AsyncIterator[ToolHost]:
        """A new process for what the model writes; it is ended afterwards, with all that was done to it."""
        async with self._room[PYTHON]:
            host = self._new([PYTHON], None, self._code, python=None)
            try:
                yield host
            finally:
                self.hosts.remove(host)
                await host.close()

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self.hosts))

    @property
    def _own_tools(self) -> list[str]:
        return [name for name in self.config.tools if name != PYTHON]

    def _new(
        self, tools: Sequence[str], env: str | None, held: Confinement, *, python: str | None
    ) -> ToolHost:
        host = ToolHost(
            tools, env, held, python=python, log=self._log, name=f"tools.{next(self._numbers)}"
        )
        self.hosts.append(host)
        return host


class OutOfTime(Exception):
    """The completion has had its seconds of tools and environment."""


class Episode:
    """What one completion meets: `async with Episode(...) as episode`, then `begin`, calls or steps, and `reward`.

    All that is random in it follows from the run's seed, the prompt's position, the completion's index and the number
    of the call. The beginning does not depend on the index: the completions of a group start alike.
    """

    def __init__(self, pool: ToolPool, prompt: Prompt, *, position: int, index: int) -> None:
        self.seconds = 0.0
        self._pool, self._prompt = pool, prompt
        self._key, self._index = f"{pool.config.seed}/{position}", index
        name = pool.config.environment_of(prompt.columns)
        self._env = None if name is None else pool.config.environments[name]
        self._stack = AsyncExitStack()
        self._own: ToolHost | None = None
        self._interpreter: ToolHost | None = None
        self._done: list[
            tuple[str, dict[str, Any], int]
        ] = []  # operations that changed the environment, numbered
        self._number = 0
        self._lost: str | None = None

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stack.aclose()

    async def begin(self) -> str | None:
        """Reset the environment, if there is one; what it says to the policy first, or None."""
        if self._env is None:
            return None
        self._own = await self._stack.enter_async_context(self._pool.own(self._env))
        try:
            said: str | None = await self._timed(self._begun(self._own))
            return said
        except (CallFailed, RewardError) as failure:
            self.lose(f"reset: {failure}")
        return None

    def lose(self, why: str) -> None:
        """Take the environment for lost: its later answers are errors, and it pays nothing that counts."""
        self._lost = self._lost or why

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        """What a tool answers; OutOfTime where no time is left."""
        request = {"name": name, "arguments": dict(arguments)}
        if name == PYTHON and PYTHON in self._pool.config.tools:
            return await self._answer(self._in_interpreter(request))
        return await self._answer(self._asked("call", request))

    async def step(self, text: str) -> Answer | None:
        """What an environment that takes text answers; None where it is over."""
        try:
            answer = await self._timed(self._asked("step", {"text": text}))
        except (CallFailed, RewardError) as failure:
            return Answer(str({"error": str(failure)}), failed=True)
        return None if answer is None else Answer(str(answer))

    async def turn_reward(self) -> float | None:
        """What the environment paid since the last turn, which is a number; None where it paid nothing, or is lost."""
        value = await self._known("turn_reward", CallFailed, RewardError)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    async def reward(self) -> Score:
        """What the environment pays for the whole episode."""
        if self._lost is None and self._own is not None:
            try:
                value = await self._timed(self._asked("reward", {}))
                if value is None or (not isinstance(value, str) and math.isfinite(value)):
                    return Score(None if value is None else float(value))
                self.lose(f"get_reward gave {value!r}")
            except (CallFailed, RewardError, OutOfTime) as failure:
                self.lose(f"get_reward: {failure or 'out of time'}")
        return Score(None, problem=f"environment: {self._lost}"[:300])

    async def attributes(self) -> str | None:
        """What the environment's attributes are now, as JSON; None where it is lost."""
        value = await self._known("attributes", CallFailed, RewardError, OutOfTime)
        return value if isinstance(value, str) else None

    async def _known(self, op: str, *failures: type[Exception]) -> Any:
        with suppress(*failures):
            return await self._timed(self._asked(op, {}))

    async def _answer(self, work: Any) -> Answer:
        try:
            return Answer(str(await self._timed(work)))
        except (CallFailed, RewardError) as failure:
            return Answer(str({"error": str(failure)}), failed=True)  # as TRL tells it

    async def _timed(self, work: Any) -> Any:
        began = time.perf_counter()
        try:
            return await work
        finally:
            self.seconds += time.perf_counter() - began

    async def _asked(self, op: str, request: dict[str, Any]) -> Any:
        if self._lost is not None:
            raise CallFailed(f"the environment is gone: {self._lost}")
        if self._own is None and not self._pool.has_servers:
            async with self._pool.own(None) as host:
                await host.ready()
                return await self._ask(host, op, request)
        if self._own is None:
            self._own = await self._stack.enter_async_context(self._pool.own(None))
            await self._begun(self._own)
        if not self._own.is_running:
            await self._restore(self._own)
        value = await self._ask(self._own, op, request)
        self._done.append((op, request, self._number))
        return value

    async def _in_interpreter(self, request: dict[str, Any]) -> Any:
        if self._interpreter is None:
            self._interpreter = await self._stack.enter_async_context(self._pool.interpreter())
        was_running = self._interpreter.is_running
        await self._interpreter.ready()
        value = await self._ask(self._interpreter, "call", request)
        began_anew = not was_running and self._interpreter.restarts
        return (
            f"(the interpreter began anew: its variables are gone)\n{value}"
            if began_anew
            else value
        )

    async def _ask(
        self, host: ToolHost, op: str, request: Mapping[str, Any], number: int | None = None
    ) -> Any:
        """`number`: of an operation that is taken again."""
        left = self._pool.config.turns.completion_s - self.seconds
        if left <= 0:
            raise OutOfTime
        if number is None:
            number = self._number = self._number + 1
        seed = seed_of(f"{self._key}/{self._index}/{number}")
        deadline_s = min(left, self._pool.config.turns.call_s)
        return await host.ask(op, deadline_s=deadline_s, seed=seed, **request)

    async def _begun(self, host: ToolHost) -> str | None:
        """Reset; in a new process where one that was used before does not answer any more."""
        was_used = host.is_running
        try:
            return await self._reset(host)
        except CallFailed:
            if host.is_running or not was_used:
                raise
        return await self._reset(host)

    async def _reset(self, host: ToolHost) -> str | None:
        await host.ready()
        if self._pool.has_servers:
            await host.ask("start_servers", deadline_s=START_TIMEOUT_S)
        if self._env is None:
            return None
        several = len(self._pool.config.env) > 1  # then `environment` is not passed on, as in TRL
        row = {
            name: value
            for name, value in self._prompt.columns.items()
            if not several or name != "environment"
        }
        row["prompt"] = self._prompt.content
        ask = partial(host.ask, deadline_s=self._pool.config.turns.call_s)
        observation: str | None = await ask("reset", seed=seed_of(self._key), row=plain(row))
        return observation

    async def _restore(self, host: ToolHost) -> None:
        """In a new process: the same beginning, and every call that had an answer."""
        try:
            await self._reset(host)
            for op, request, number in self._done:
                await self._ask(host, op, request, number)
        except CallFailed as failure:
            self.lose(f"it was lost, and did not come back: {failure}")
            raise


def plain(value: Any) -> Any:
    """A row's value as JSON can carry it; what it cannot, a date for example, becomes text."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def seed_of(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "big")
