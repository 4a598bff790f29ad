"""OpenEnv's own classes, in another Python than this one: its dependencies and vLLM's contradict each other."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.rollout import ToolRefused
from ycore.rollout.environments import openenv_local
from ycore.rollout.tool_pool import Answer, Episode, ToolPool, describe_tools
from ycore.types import Prompt, Score

ENVIRONMENTS = '''
import random
from fastmcp import FastMCP
from openenv.core.env_server import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from openenv.core.harness import ResourceSession, ResourceSessionFactory, ToolResult, VerifyResult
from openenv.core.env_server.mcp_types import Tool

class Move(Action):
    """One move."""
    by: int
    why: str = ""

class Place(Observation):
    at: int

class Grid(Environment[Move, Place, State]):
    def reset(self):
        self.at = 0
        return Place(at=0)

    def step(self, action, timeout_s=None, **kwargs):
        self.at += action.by
        return Place(at=self.at, reward=self.at / 10, done=self.at >= 3)

    @property
    def state(self):
        return State()

class Say(Action):
    message: str

class Heard(Observation):
    echo: str = ""

class Echo(Environment[Say, Heard, State]):
    def reset(self, seed=None, episode_id=None, **row):
        self.many = 0
        return Heard(echo=f" {row['start']} {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.many += 1
        return Heard(echo=action.message.upper(), reward=self.many, done=self.many == 2)

    @property
    def state(self):
        return State()

class Notes(MCPEnvironment):
    def __init__(self):
        mcp, self.notes = FastMCP("notes"), []

        @mcp.tool
        def note(text: str) -> str:
            """Keep a note."""
            self.notes.append(text)
            return ", ".join(self.notes)

        @mcp.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("no such page")

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.notes.clear()
        return Observation(metadata={"ready": True})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()

class Search(ResourceSession):
    def __init__(self, task):
        self.task = task

    def initial_messages(self):
        return [{"role": "user", "content": f" Find {self.task['start']}."}]

    def list_tools(self):
        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        return [Tool(name="find", description="Find a text.", input_schema=schema)]

    def call_tool(self, name, arguments):
        if not arguments["text"]:
            return ToolResult(error="nothing to find")
        return ToolResult(data={"found": arguments["text"]})

    def verify(self, transcript, final_state=None):
        return VerifyResult(env_reward=float(len(transcript)))

    def close(self):
        pass

class Sessions(ResourceSessionFactory):
    def create(self, task, seed=None, episode_id=None):
        return Search(task)

class Neither:
    pass
'''


@cache
def openenv_python() -> str:
    """A Python with openenv: this one, or that of the variable OPENENV_PYTHON."""
    python = os.environ.get("OPENENV_PYTHON", sys.executable)
    if subprocess.run(
        [python, "-c", "import openenv"], capture_output=True, timeout=400, check=False
    ).returncode:
        pytest.skip("no Python with the package openenv; name one in OPENENV_PYTHON")
    return python


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "envs.py").write_text(ENVIRONMENTS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(env: str, python: str | None) -> RunConfig:
    rewards = [{"reward": "environment"}]
    return RunConfig(
        model="m", dataset="d", output="run", rewards=rewards, env=env, env_python=python
    )


def played(place: Path, name: str, play: Callable[[Episode], Awaitable[Any]]) -> Any:
    async def work() -> Any:
        config = config_of(f"openenv:envs.py:{name}", openenv_python())
        pool = ToolPool(config, log=place / "log", run_id="t", run_folder=place / "run")
        try:
            async with (
                asyncio.timeout(400),
                Episode(pool, Prompt(0, "go", {"start": 7}), position=0, index=0) as episode,
            ):
                return await play(episode)
        finally:
            await pool.close()

    return asyncio.run(work())


def test_a_typed_action_is_the_tool_step(place: Path) -> None:
    found = describe_tools(config_of("openenv:envs.py:Grid", openenv_python()))["Grid"]
    assert found.names == ("step",) and found.pays
    function = found.tools[0]["function"]
    assert function["description"] == "One move." and list(
        function["parameters"]["properties"]
    ) == ["by", "why"]

    async def play(episode: Episode) -> list[Any]:
        begun = await episode.begin()
        calls = [await episode.call("step", {"by": by}) for by in (1, "much")]
        paid = await episode.turn_reward()
        calls += [await episode.call("step", {"by": by}) for by in (2, 1)]
        return [begun, *calls, await episode.reward(), paid, await episode.turn_reward()]

    begun, first, wrong, last, beyond, reward, *paid = played(place, "Grid", play)
    assert found.pays_turns and paid == [0.1, 0.3]
    assert begun == "0" and first == Answer("1") and wrong.failed and last == Answer("3")
    assert beyond == Answer(
        "{'error': 'the episode is over'}", failed=True
    ) and reward == Score(0.3)


def test_an_action_of_one_text_is_the_whole_turn(place: Path) -> None:
    async def play(episode: Episode) -> list[Any]:
        return [
            await episode.begin(),
            await episode.step("a"),
            await episode.step("b"),
            await episode.reward(),
        ]

    begun, said, ended, reward = played(place, "Echo", play)
    assert begun.startswith(" 7 ") and int(begun[3:]) > 0
    assert said == Answer("A") and ended is None and reward == Score(2.0)


def test_tools_of_an_mcp_environment_are_tools(place: Path) -> None:
    async def play(episode: Episode) -> list[Any]:
        await episode.begin()
        return [await episode.call("note", {"text": "a"}), await episode.call("note", {"text": "b"}),
                await episode.call("fail", {}), await episode.reward()]  # fmt: skip

    first, second, failed, reward = played(place, "Notes", play)
    assert first == Answer("a") and second == Answer("a, b") and reward == Score(None)
    assert failed.failed and "no such page" in failed.text


def test_a_session_begins_with_its_messages_and_is_verified(place: Path) -> None:
    found = describe_tools(config_of("openenv:envs.py:Sessions", openenv_python()))["Sessions"]
    assert found.names == ("find",)

    async def play(episode: Episode) -> list[Any]:
        begun = await episode.begin()
        return [begun, await episode.call("find", {"text": "x"}), await episode.call("find", {"text": ""}),
                await episode.reward()]  # fmt: skip

    begun, found_text, failed, reward = played(place, "Sessions", play)
    assert begun == " Find 7." and found_text == Answer('{"found": "x"}')
    assert failed == Answer("{'error': 'nothing to find'}", failed=True) and reward == Score(
        2.0
    )


def test_what_is_no_environment_of_openenv_is_refused_in_one_line(place: Path) -> None:
    with pytest.raises(
        ConfigError, match="is neither an Environment nor a ResourceSessionFactory of OpenEnv"
    ):
        describe_tools(config_of("openenv:envs.py:Neither", openenv_python()))


@pytest.mark.parametrize(
    "name", ["openenv:https://host/echo", "openenv:echo-env", "openenv:docker://echo"]
)
def test_servers_and_containers_are_refused(name: str) -> None:
    with pytest.raises(ToolRefused, match="without server, hub or container; name a class"):
        openenv_local(name, lambda target: None)


def test_a_python_without_openenv_is_told_how_to_come_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ToolRefused, match="cannot be beside vLLM; install it in a virtual environment"
    ):
        openenv_local("openenv:envs.py:Grid", lambda target: None)
