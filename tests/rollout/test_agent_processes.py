"""Agents in real processes: reached on a loopback of their own, with a key; whatever they do, they end and are gone."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ycore.config.schema import RunConfig
from ycore.errors import ConfigError
from ycore.rollout.agents import AgentExit, AgentPool, RunningAgent, check_agent
from ycore.rollout.tool_pool import OutOfTime
from ycore.run.files import RunFolder
from ycore.sandbox import Level
from ycore.sandbox.confined_worker import CallFailed
from ycore.sandbox.level import LevelChoice, choose_level
from ycore.types import Prompt, Score

AGENT = """
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path

def ask(body, path="/chat/completions", key=None):
    head = {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, head)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]

def reaches(port):
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
        return True
    except OSError:
        return False

how, row = sys.argv[1], json.loads(os.environ["YCORE_ROW"])
if how == "all":
    told = [ask({}, key="sk-no"), ask(b"{"), ask({}, path="/completions")]
    told += [dict(os.environ), reaches(row["port"]), sorted(str(path) for path in Path.cwd().rglob("*"))]
    ask({"told": told})
    print("said", ask({"stream": True, "stream_options": {"include_usage": True}})[1])
    Path(os.environ["YCORE_REWARD_FILE"]).write_text(" 0.25 ")
elif how == "hang":
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    time.sleep(1000)
elif how == "fail":
    Path(os.environ["YCORE_REWARD_FILE"]).write_text("nan")
    sys.exit(3)
elif how == "kill":
    os.kill(os.getppid(), 9)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent.py").write_text(AGENT)
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text("{}")
    return folder


def config_of(agent: str, **keys: Any) -> RunConfig:
    common: dict[str, Any] = {
        "model": "m",
        "dataset": "d",
        "output": "run",
        "rewards": [{"reward": "environment"}],
    }
    return RunConfig(**common, agent=agent, **keys)


@pytest.fixture
def play(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def with_agent(agent: str, work: Any, completion_s: float = 60.0, **columns: Any) -> Any:
        async def whole() -> Any:
            config = config_of(agent, turns={"completion_s": completion_s})
            pool = AgentPool(config, RunFolder(place / "run"))
            async with (
                asyncio.timeout(400),
                pool.run(Prompt(0, "go", columns), position=4, index=1) as run,
            ):
                return await work(run)

        return asyncio.run(whole())

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield with_agent
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_agent_sees_its_row_and_its_address_and_nothing_else(
    play: Callable[..., Any], place: Path
) -> None:
    async def work(run: RunningAgent) -> Any:
        first = await run.next()
        assert not isinstance(first, AgentExit)
        second = await run.next((200, {}))
        assert not isinstance(second, AgentExit)
        message = {"role": "assistant", "content": "hi", "tool_calls": [{"id": "a"}]}
        body = {
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"total_tokens": 3},
        }
        return first["told"], await run.next((200, body))

    with socket.create_server(("127.0.0.1", 0)) as outside:
        reports, end = play("python agent.py all", work, port=outside.getsockname()[1])
    wrong_key, no_json, other_path, variables, reaches, files = reports
    assert wrong_key == [401, "the key is not that of this completion; take OPENAI_API_KEY"]
    assert no_json == [400, "the body is no JSON object"] and other_path[0] == 404
    row = json.loads(variables["YCORE_ROW"])
    assert (
        row["prompt"] == "go"
        and "HF_TOKEN" not in variables
        and variables["YCORE_SEED"].isdigit()
    )
    if choose_level().level is Level.NAMESPACES:
        assert not reaches and files == [str(place / "agent.py"), str(place / "run")]
    assert end == AgentExit(0, " 0.25 ") and end.score == Score(0.25)
    log = (place / "run" / "logs" / "agents.log").read_text()
    chunks = [
        json.loads(line[6:])
        for line in log.replace("said data", "data").splitlines()
        if line[:7] == "data: {"
    ]
    assert (
        chunks[0]["choices"][0]["delta"]["tool_calls"] == [{"id": "a", "index": 0}]
        and "data: [DONE]" in log
    )
    assert chunks[0]["object"] == "chat.completion.chunk" and chunks[1]["usage"] == {
        "total_tokens": 3
    }


def test_agents_that_hang_fail_or_end_their_process(play: Callable[..., Any]) -> None:
    async def next_of(run: RunningAgent) -> Any:
        return await run.next()

    with pytest.raises(OutOfTime):
        play("python agent.py hang", next_of, completion_s=3.0)
    with pytest.raises(CallFailed):
        play("python agent.py kill", next_of, completion_s=20.0)
    end = play("python agent.py fail", next_of)
    assert end.code == 3 and end.score.value is None and "wrote 'nan'" in end.score.problem
    assert play("true", next_of).score == Score(
        None, problem="environment: the agent wrote nothing to YCORE_REWARD_FILE, and no number"
    )


def test_a_row_that_no_variable_holds_fails_the_agent(play: Callable[..., Any]) -> None:
    async def next_of(run: RunningAgent) -> Any:
        return await run.next()

    with pytest.raises(CallFailed, match="too long"):
        play("python agent.py all", next_of, text="a" * 200_000)


@pytest.mark.parametrize(
    ("agent", "keys", "problem"),
    [
        ("", {}, "an empty command"),
        ("python 'a", {}, "no command: No closing quotation"),
        ("no-such-program a", {}, "no program 'no-such-program'"),
        ("python other.py", {}, "no file other.py"),
        ("true", {"tools": ["python"]}, "leave out --tools and --env"),
    ],
)
def test_commands_that_cannot_be_started_are_refused(
    agent: str, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_agent(config_of(agent, **keys))


def test_landlock_has_no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ycore.rollout.agents.choose_level", lambda wanted: LevelChoice(Level.LANDLOCK, {})
    )
    with pytest.raises(
        ConfigError, match="loopback, which the sandbox's level landlock closes"
    ):
        check_agent(config_of("true"))
    check_agent(config_of("true", turns={"sandbox": {"network": True}}))
