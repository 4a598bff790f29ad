"""A person's own agent, as the trainer meets it: a confined process for each completion, which asks.

What the process says is read as something that anybody may have written. It can ask, end, and tell a reward, no more.
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
from ycore.rollout.agent_host import MOST_BODY
from ycore.rollout.tool_pool import OutOfTime, held_like_rewards, plain, seed_of
from ycore.sandbox import Level
from ycore.sandbox.confine import base_variables
from ycore.sandbox.confined_worker import CallFailed, ConfinedWorker, foreign_line, reply_in
from ycore.sandbox.level import choose_level
from ycore.types import Prompt, Score

_MOST_EVENT = (
    3 * MOST_BODY + 4096
)  # bytes: JSON takes six for a letter of two, and twelve for one of four


class Asked(NamedTuple):
    """A call of the agent's."""

    number: int
    body: Mapping[str, Any]


class Ended(NamedTuple):
    """The agent's end, and what it wrote to the file of its reward."""

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
        shown = "nothing" if self.paid is None else foreign_line(repr(self.paid), max_characters=60)
        return Score(
            None,
            problem=f"environment: the agent wrote {shown} to YCORE_REWARD_FILE, and no number",
        )


def words_of(agent: str) -> list[str]:
    """The words of a command; ConfigError where it is none that can be started."""
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


def check_agent(config: RunConfig) -> None:
    """ConfigError where the run's agent cannot work."""
    if config.agent is None:
        return
    words_of(config.agent)
    if config.tools or config.env:
        raise ConfigError(
            "an agent brings its own tools and world; leave out --tools and --env, or --agent"
        )
    chosen = choose_level(config.sandbox.level)
    if chosen.level is Level.LANDLOCK and not config.turns.sandbox.network:
        raise ConfigError(
            "an agent is reached on loopback, which the sandbox's level landlock closes; "
            f"{chosen.remedy or 'take --sandbox namespaces'}, or --set turns.sandbox.network=true"
        )


class AgentHost(ConfinedWorker[None]):
    """The process that runs one agent."""

    module, kind = "ycore.rollout.agent_host", "agent"


class AgentRun:
    """One agent, from its start to its end. `seconds` are its own, without those of the policy."""

    def __init__(self, host: AgentHost, completion_s: float) -> None:
        self.seconds = 0.0
        self._host, self._completion_s = host, completion_s
        self._has_begun = False

    async def next(
        self, reply: Mapping[str, Any] | None = None, *, within_s: float = math.inf
    ) -> Asked | Ended:
        """What the agent does next, after the `reply` to its last call.

        Raises:
            OutOfTime: it took too long.
            CallFailed: it could not be started, or its process is gone.
        """
        left = min(within_s, self._completion_s - self.seconds)
        began = time.perf_counter()
        try:
            if not self._has_begun:
                self._has_begun = True
                await self._host.start()
            return await self._host.exchange(
                {"reply": reply}, _event, max_bytes=_MOST_EVENT, timeout_s=max(0.01, left)
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
        self._config, self._log, self._words = config, log, words_of(config.agent)
        names = [f"{word}:agent" for word in self._words if Path(word).is_file()]
        self._held = held_like_rewards(config, names, run_folder=run_folder, run_id=run_id)
        self._room = asyncio.Semaphore(config.turns.at_once)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def run(self, prompt: Prompt, *, position: int, index: int) -> AsyncIterator[AgentRun]:
        """An agent for this completion, ended with all that it started when this ends."""
        row = plain({**prompt.columns, "prompt": prompt.content})
        seed = str(seed_of(f"{self._config.seed}/{position}/{index}"))
        variables = {"YCORE_ROW": json.dumps(row), "YCORE_SEED": seed, "PYTHONHASHSEED": seed}
        first = {"command": self._words, "variables": variables}
        async with self._room:
            host = AgentHost(
                first, _ready, self._held, log=self._log, name=f"agent.{next(self._numbers)}"
            )
            try:
                yield AgentRun(host, self._config.turns.completion_s)
            finally:
                await host.close()


def _ready(line: bytes, nonce: str) -> None:
    reply = reply_in(line, nonce)
    if reply.get("ready") is not True:
        raise CallFailed(foreign_line(str(reply.get("error", "no answer of an agent's process"))))


def _event(line: bytes, nonce: str) -> Asked | Ended:
    match reply_in(line, nonce).get("value"):
        case {"call": int(number), "body": dict(body)}:
            return Asked(number, body)
        case {"exit": int(code), "paid": str() | None as paid}:
            return Ended(code, paid)
    raise CallFailed("no answer of an agent's process: neither a call nor its end")


def agent_files(agent: str | None) -> Sequence[Path]:
    """The files that a command names."""
    return (
        []
        if agent is None
        else [Path(word) for word in words_of(agent)[1:] if Path(word).is_file()]
    )
