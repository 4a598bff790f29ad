"""A user's own agent, as the trainer meets it: a confined process for each completion, which asks.

What the process says is read as text that anybody may have written. It can call, end, and name a reward, no more.
"""

import asyncio
import itertools
import json
import math
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.rollout.agent_host import MAX_BODY
from ycore.rollout.tool_pool import OutOfTime, plain, seed_of, turns_confinement
from ycore.sandbox import Level
from ycore.sandbox.confine import base_variables
from ycore.sandbox.confined_worker import CallFailed, ConfinedWorker, foreign_line, reply_in
from ycore.sandbox.level import choose_level
from ycore.types import Prompt, Score

_MAX_EVENT_BYTES = 3 * MAX_BODY + 4096
"""JSON takes six bytes for a character of two, and twelve for a character of four."""


class AgentCall(NamedTuple):
    """A call of the agent's client."""

    number: int
    body: Mapping[str, Any]


class AgentExit(NamedTuple):
    """The agent's exit code, and the text of its reward file."""

    code: int
    paid: str | None = None

    @property
    def score(self) -> Score:
        try:
            value = float(self.paid or "")
            if math.isfinite(value):
                return Score(value)
        except ValueError:
            pass
        text = (
            "nothing" if self.paid is None else foreign_line(repr(self.paid), max_characters=60)
        )
        return Score(
            None,
            problem=f"environment: the agent wrote {text} to YCORE_REWARD_FILE, and no number",
        )


def words_of(agent: str) -> list[str]:
    """Split a command into its words; ConfigError where it cannot be started."""
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(
            f"agent {agent!r} is no command: {error}; write it as in a shell"
        ) from None
    if not words:
        raise ConfigError(
            "agent is an empty command; write it as in a shell, for example 'python my_agent.py'"
        )
    if shutil.which(words[0], path=base_variables("", Path("/"))["PATH"]) is None:
        raise ConfigError(
            f"agent {agent!r}: no program {words[0]!r}; give its path, or one on PATH in the sandbox"
        )
    missing = [word for word in words if word.endswith(".py") and not Path(word).is_file()]
    if missing:
        raise ConfigError(
            f"agent {agent!r}: no file {missing[0]}; give its path from the working folder"
        )
    return words


def agent_files(agent: str | None) -> list[Path]:
    """Return the files that a command names, its program aside."""
    words = [] if agent is None else words_of(agent)[1:]
    return [Path(word) for word in words if Path(word).is_file()]


def check_agent(config: RunConfig) -> None:
    """ConfigError where the run's agent cannot work."""
    if config.agent is None:
        return
    words_of(config.agent)
    if config.tools or config.env:
        raise ConfigError(
            "an agent brings its own tools and world; leave out --tools and --env, or --agent"
        )
    choice = choose_level(config.sandbox.level)
    if choice.level is Level.LANDLOCK and not config.turns.sandbox.network:
        raise ConfigError(
            "an agent is reached on loopback, which the sandbox's level landlock closes; "
            f"{choice.remedy or 'take --sandbox namespaces'}, or --set turns.sandbox.network=true"
        )


class AgentHost(ConfinedWorker[None]):
    """The process that runs an agent."""

    module = "ycore.rollout.agent_host"
    kind = "agent"


class RunningAgent:
    """An agent, from its start to its end. `seconds` are its own, without those of the policy."""

    def __init__(self, host: AgentHost, completion_s: float) -> None:
        self.seconds = 0.0
        self._host = host
        self._completion_s = completion_s
        self._has_begun = False

    async def next(
        self, reply: Mapping[str, Any] | None = None, *, within_s: float = math.inf
    ) -> AgentCall | AgentExit:
        """Return what the agent does next, after the `reply` to its last call.

        Raises:
            OutOfTime: it took too long.
            CallFailed: it could not be started, or its process is gone.
        """
        timeout_s = max(0.01, min(within_s, self._completion_s - self.seconds))
        began = time.perf_counter()
        try:
            if not self._has_begun:
                self._has_begun = True
                await self._host.start()
            return await self._host.exchange(
                {"reply": reply}, _read_event, max_bytes=_MAX_EVENT_BYTES, timeout_s=timeout_s
            )
        except CallFailed as failure:
            if str(failure).startswith("timeout"):
                raise OutOfTime from None
            raise
        finally:
            self.seconds += time.perf_counter() - began


class AgentPool:
    """Example: `async with AgentPool(config, ...).run(prompt, position=4, index=1) as agent: await agent.next()`.

    At most `turns.at_once` agents run at a time.
    """

    def __init__(
        self, config: RunConfig, *, log: Path, run_id: str, run_folder: Path | None = None
    ) -> None:
        assert config.agent is not None
        self._config = config
        self._log = log
        self._words: Sequence[str] = words_of(config.agent)
        names = [f"{word}:agent" for word in self._words if Path(word).is_file()]
        self._confinement = turns_confinement(
            config, names, run_folder=run_folder, run_id=run_id
        )
        self._slots = asyncio.Semaphore(config.turns.at_once)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def run(
        self, prompt: Prompt, *, position: int, index: int
    ) -> AsyncIterator[RunningAgent]:
        """Run an agent for this completion; it is ended, with all that it started, when this ends."""
        row = plain({**prompt.columns, "prompt": prompt.content})
        seed = str(seed_of(f"{self._config.seed}/{position}/{index}"))
        variables = {"YCORE_ROW": json.dumps(row), "YCORE_SEED": seed, "PYTHONHASHSEED": seed}
        async with self._slots:
            host = AgentHost(
                {"command": self._words, "variables": variables},
                _read_ready,
                self._confinement,
                log=self._log,
                name=f"agent.{next(self._numbers)}",
            )
            try:
                yield RunningAgent(host, self._config.turns.completion_s)
            finally:
                await host.close()


def _read_ready(line: bytes, nonce: str) -> None:
    reply = reply_in(line, nonce)
    if reply.get("ready") is not True:
        raise CallFailed(
            foreign_line(str(reply.get("error", "no answer of an agent's process")))
        )


def _read_event(line: bytes, nonce: str) -> AgentCall | AgentExit:
    match reply_in(line, nonce).get("value"):
        case {"call": int(number), "body": dict(body)}:
            return AgentCall(number, body)
        case {"exit": int(code), "paid": str() | None as paid}:
            return AgentExit(code, paid)
    raise CallFailed("no answer of an agent's process: neither a call nor its end")
