"""Tools and environments in real processes: what hangs, dies or raises is told, and the same seeds give the same world."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.rollout.talks import dialogue_of, names_of
from ycore.config.schema import RunConfig
from ycore.data.prompts import load_prompts
from ycore.errors import ConfigError
from ycore.rewards.loading import inputs_of
from ycore.rewards.worker import LoadedReward, call_reward
from ycore.rollout.tool_pool import Answer, Episode, OutOfTime, ToolPool, describe_tools
from ycore.rollout.turns import MultiTurnWriter, TurnLimits
from ycore.run.files import RunFolder
from ycore.types import Draw, Prompt, Score

FILE = '''
import os, random, time
from pathlib import Path

def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: One.
        y: The other.
    """
    return x + y

def hang() -> int:
    """Never come back."""
    time.sleep(1000)

def end() -> int:
    """End the process."""
    os._exit(3)

def leave() -> int:
    """Leave."""
    raise SystemExit("bye")

def secrets() -> str:
    """Look around."""
    return str([dict(os.environ), [str(p) for p in Path(__file__).parent.rglob("*")]])

class Ask:
    def reset(self, topic: str, **row):
        assert "environment" not in row
        self.topic = topic
        return f"What is {topic}?"

    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: What to look up.
        """
        return f"{word} is {self.topic}"

class Spell(Ask):
    def reset(self, topic: str, **row):
        self.topic = topic

    def letters(self) -> int:
        """How many letters it has."""
        return len(self.topic)

    def get_reward(self):
        return 0.5

class Walk:
    turn_reward = None

    def __init__(self):
        self.many = 0

    def reset(self, start: int, **row):
        self.at, self.start = start + random.randint(0, 1000), start
        return f" You are at {self.at}."

    def step_on(self, by: int) -> int:
        """Go on.

        Args:
            by: How far.
        """
        self.at += by * random.randint(1, 9)
        self.turn_reward = by
        if by == 13:
            time.sleep(1000)
        if by == 14:
            os._exit(4)
        return self.at

    def get_reward(self):
        if self.at % 2 == 5:
            return "much"
        return self.at - self.start
'''

OTHER = """
import importlib.util, sys
import greeting

class Other:
    def reset(self, **row):
        return greeting.WORD

    def step(self, text: str):
        found = [name for name in ("transformers", "pydantic", "ycore_cli") if importlib.util.find_spec(name)]
        loaded = [name for name in sys.modules if name.startswith("ycore.") and "ycore.rollout" not in name]
        ours = ("ycore.errors", "ycore.foreign", "ycore.sandbox", "ycore.sandbox.channel", "ycore.types")
        loaded = [name for name in loaded if name not in ours]
        return f"{sys.prefix} {', '.join(found) or 'none'}, of ycore's own: {', '.join(loaded) or 'none'}"

    def get_reward(self):
        return 1.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(FILE)
    return folder


def config_of(place: Path, **keys: Any) -> RunConfig:
    keys = {"tools": [], "turns": {"call_s": 1.0}, **keys}
    return RunConfig(
        model="m",
        dataset="d",
        output=str(place / "run"),
        rewards=[{"reward": "environment"}],
        **keys,
    )


Work = Callable[[ToolPool], Awaitable[Any]]


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (place / "run").mkdir(exist_ok=True)
    (place / "run" / "run.json").write_text("{}")

    def in_pool(work: Work, **keys: Any) -> Any:
        async def whole() -> Any:
            pool = ToolPool(config_of(place, **keys), RunFolder(place / "run"))
            try:
                async with asyncio.timeout(400):
                    return await work(pool)
            finally:
                await pool.close()

        return asyncio.run(whole())

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield in_pool
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def open_episode(pool: ToolPool, *, index: int = 0, **columns: Any) -> Episode:
    prompt = Prompt(0, [{"role": "user", "content": "go"}], columns)
    return Episode(pool, prompt, position=4, index=index)


def test_whatever_a_tool_does_is_an_answer(run: Callable[..., Any]) -> None:
    async def work(pool: ToolPool) -> list[Answer]:
        async with open_episode(pool) as episode:
            assert await episode.begin() is None
            names = ("add", "hang", "end", "leave", "nothing")
            answers = [
                await episode.call(name, {"x": 1, "y": 2} if name == "add" else {})
                for name in names
            ]
            answers.append(await episode.call("add", {"x": 1}))
            answers.append(await episode.call("add", {"x": 20, "y": 3}))
        assert [host.restarts for host in pool.workers] == [2]
        return answers

    names = [f"tools.py:{name}" for name in ("add", "hang", "end", "leave")]
    added, hung, ended, left, missing, wrong, last = run(work, tools=names)
    assert added == Answer("3") and last == Answer("23")
    assert hung == Answer("{'error': 'timeout after 1 s'}", failed=True)
    assert ended.failed and "exit status 3" in ended.text
    assert left == Answer("{'error': 'bye'}", failed=True)
    assert missing == Answer("{'error': 'Tool nothing not found.'}", failed=True)
    assert wrong.failed and "missing 1 required positional argument" in wrong.text


def test_the_same_row_and_completion_meet_the_same_world(run: Callable[..., Any]) -> None:
    async def play(pool: ToolPool, index: int, *moves: int) -> list[Any]:
        async with open_episode(pool, index=index, start=50) as episode:
            said = await episode.begin()
            return [
                said,
                *[(await episode.call("step_on", {"by": by})).text for by in moves],
                await episode.reward(),
            ]

    async def work(pool: ToolPool) -> list[list[Any]]:
        return list(
            await asyncio.gather(play(pool, 0, 1, 2), play(pool, 0, 1, 2), play(pool, 1, 1, 2))
        )

    first, again, other = run(work, env="tools.py:Walk")
    assert first == again and first[0] == other[0] and first[1:] != other[1:]
    assert first[-1] == Score(float(int(first[2]) - 50))


@pytest.mark.parametrize("by", [13, 14])
def test_an_environment_that_hangs_or_dies_costs_its_completion_alone(
    run: Callable[..., Any], by: int
) -> None:
    async def play(pool: ToolPool, *moves: int) -> list[Any]:
        async with open_episode(pool, start=50) as episode:
            await episode.begin()
            return [
                *[await episode.call("step_on", {"by": move}) for move in moves],
                await episode.turn_reward(),
                await episode.reward(),
            ]

    async def work(pool: ToolPool) -> list[list[Any]]:
        return [await play(pool, 1, 2), await play(pool, 1, by, 2), await play(pool, 1, 2)]

    whole, broken, after = run(work, env="tools.py:Walk")
    assert broken[0] == whole[0] and broken[1].failed
    assert broken[2].failed and "the environment is gone" in broken[2].text
    assert broken[3] is None and broken[4].value is None and broken[4].problem
    assert after == whole


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_is_lost_between_two_completions_costs_neither(
    run: Callable[..., Any], number: int
) -> None:
    async def play(pool: ToolPool) -> tuple[str | None, Score]:
        async with open_episode(pool, start=50) as episode:
            return await episode.begin(), await episode.reward()

    async def work(pool: ToolPool) -> list[Any]:
        before = await play(pool)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one of another kind that has ended meanwhile
                if "ycore.rollout.tool_host" in process.cmdline():
                    process.send_signal(number)
        return [before, await play(pool), [host.restarts for host in pool.workers]]

    before, after, restarts = run(work, env="tools.py:Walk")
    assert before == after and after[0] is not None and after[1].problem is None
    assert restarts == [1]


def test_a_reward_function_sees_the_environment_as_it_was_at_its_end(
    run: Callable[..., Any],
) -> None:
    """TRL's `environments`: there the instances, here their public attributes, each completion's own."""

    async def played(pool: ToolPool) -> list[str | None]:
        states = []
        for by in (1, 2):
            async with open_episode(pool, start=50) as episode:
                await episode.begin()
                await episode.call("step_on", {"by": by})
                states.append(await episode.attributes())
        async with open_episode(pool, start=50) as lost:
            await lost.begin()
            lost.lose("gone")
            return [*states, await lost.attributes()]

    def reward(environments: Any, **kwargs: Any) -> list[float | None]:
        return [getattr(environment, "at", None) for environment in environments]

    worlds = run(played, env="tools.py:Walk")
    request = {"source": 0, "step": 1, "count": 3, "inputs": {"environments": worlds}}
    values = call_reward(LoadedReward(reward, inputs_of(reward)), request)["values"]
    assert (
        values == [*(json.loads(world)["at"] for world in worlds[:2]), None]
        and values[0] != values[1]
    )


def test_a_completion_has_a_limit_for_all_its_calls(run: Callable[..., Any]) -> None:
    async def work(pool: ToolPool) -> None:
        async with open_episode(pool) as episode:
            began = time.monotonic()
            assert (await episode.call("hang", {})).failed
            with pytest.raises(OutOfTime):
                for _ in range(20):
                    await episode.call("hang", {})
            assert time.monotonic() - began < 30

    run(work, tools=["tools.py:hang"], turns={"call_s": 0.5, "completion_s": 1.5})


def test_an_environment_that_cannot_begin_masks_its_completion_alone(
    run: Callable[..., Any],
) -> None:
    async def work(pool: ToolPool) -> tuple[Any, Answer, Score]:
        async with open_episode(pool) as episode:  # the row has no `start`
            return (
                await episode.begin(),
                await episode.call("step_on", {"by": 1}),
                await episode.reward(),
            )

    said, answer, reward = run(work, env="tools.py:Walk")
    assert said is None and answer.failed and "the environment is gone" in answer.text
    assert reward.value is None and "missing 1 required positional argument" in str(
        reward.problem
    )


def test_the_interpreter_keeps_variables_for_one_completion_and_sees_no_file(
    run: Callable[..., Any], place: Path
) -> None:
    async def work(pool: ToolPool) -> list[str]:
        said = []
        reads = f"import os; os.listdir({str(place)!r})"
        async with open_episode(pool) as episode:
            for code in ("x = 41", "x + 1", reads, "while True: pass", "y = 1; y"):
                said.append((await episode.call("python", {"code": code})).text)
        async with open_episode(pool) as episode:
            said.append((await episode.call("python", {"code": "x"})).text)
        assert pool.workers == []
        return said

    said = run(work, tools=["python"])
    assert (
        said[:2] == ["", "42"]
        and "error" in said[2]
        and "tools.py" not in said[2]
        and "timeout" in said[3]
    )
    assert said[4] == "1" and "not defined" in said[-1]


@pytest.mark.parametrize("level", ["auto", "landlock"])
def test_another_python_runs_them_with_its_own_packages_alone(
    run: Callable[..., Any], tmp_path: Path, level: str
) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / ".other"],
        check=True,
        timeout=400,
    )
    (packages,) = (tmp_path / ".other").glob("lib/*/site-packages")
    (packages / "greeting.py").write_text("WORD = 'hello'")
    (tmp_path / "other.py").write_text(OTHER)

    async def work(pool: ToolPool) -> list[Any]:
        async with open_episode(pool) as episode:
            return [await episode.begin(), await episode.step("look"), await episode.reward()]

    python = str(tmp_path / ".other" / "bin" / "python")
    said, seen, paid = run(
        work, env=f"{tmp_path}/other.py:Other", env_python=python, sandbox={"level": level}
    )
    assert said == "hello" and paid == Score(1.0)
    assert seen == Answer(f"{tmp_path}/.other none, of ycore's own: none")


@pytest.mark.parametrize(
    ("python", "problem"),
    [
        (
            "no/python",
            "env_python 'no/python' is no Python; give the path of a Python",
        ),
        ("true", "env_python 'true' is no Python; give the path of a Python"),
    ],
)
def test_what_is_no_other_python_is_refused_in_one_line(
    place: Path, python: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        describe_tools(config_of(place, env="tools.py:Walk", env_python=python))


@pytest.mark.parametrize("is_script", [True, False])
def test_another_python_is_executed_where_it_is_confined_alone(
    place: Path, tmp_path: Path, is_script: bool
) -> None:
    """A recipe from elsewhere names any file, and a dry run describes tools."""
    program = tmp_path / "bin" / "python3"
    program.parent.mkdir()
    written = tmp_path / "written"
    written.mkdir()
    written.chmod(0o777)
    if is_script:
        program.write_text(f"#!/bin/sh\ntouch {written}/file\nexit 3\n")
    else:  # a Python whose library writes as soon as it is imported
        shutil.copy(Path(sys.executable).resolve(), program)
        library = tmp_path / "lib" / f"python3.{sys.version_info.minor}"
        library.mkdir(parents=True)
        (library / "os.py").touch()
        (library / "encodings.py").write_text(f"import posix; posix.open('{written}/file', 65)")
    program.chmod(0o755)
    control = subprocess.run([program, "-I", "-c", ""], capture_output=True, timeout=60)
    assert control.returncode and [*written.iterdir()]
    (written / "file").unlink()
    with pytest.raises(ConfigError, match="is no Python" if is_script else "worker died"):
        describe_tools(config_of(place, env="tools.py:Walk", env_python=str(program)))
    assert not [*written.iterdir()]


def test_a_turn_is_paid_once(run: Callable[..., Any]) -> None:
    async def work(pool: ToolPool) -> list[Any]:
        async with open_episode(pool, start=5) as episode:
            await episode.begin()
            paid = [await episode.turn_reward()]
            for turn in ((1, 2), (3,), ()):
                for by in turn:
                    await episode.call("step_on", {"by": by})
                paid.append(await episode.turn_reward())
            return paid

    assert run(work, env="tools.py:Walk") == [None, 3.0, 3.0, None]


def test_a_tool_finds_no_secret_and_nothing_of_the_run(run: Callable[..., Any]) -> None:
    async def work(pool: ToolPool) -> str:
        async with open_episode(pool) as episode:
            return (await episode.call("secrets", {})).text

    said = run(work, tools=["tools.py:secrets"])
    assert "tools.py" in said and "hf_secret" not in said and "run.json" not in said


def test_a_run_s_tools_are_described_once_or_refused_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    (tool_set,) = describe_tools(
        config_of(place, tools=["tools.py:add", "python"], env="tools.py:Walk")
    ).values()
    assert names_of(tool_set) == ["add", "python", "step_on"]
    assert tool_set.pays and not tool_set.takes_text
    assert describe_tools(config_of(place)) == {}
    with pytest.raises(ConfigError, match="two tools are named 'add'"):
        describe_tools(config_of(place, tools=["tools.py:add", "tools.py:add"]))


def test_each_row_meets_the_environment_that_it_names_as_in_trl(
    place: Path, run: Callable[..., Any]
) -> None:
    """TRL's own trainer lets the policy read the same of these rows and classes, to the token."""
    from trl import GRPOTrainer

    rows = [
        {"environment": name, "topic": topic}
        for name, topic in (("ask", "a mole"), ("Spell", "owl"), ("ask", "x"))
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = ["ask=tools.py:Ask", "tools.py:Spell"]
    config = config_of(place, env=env, turns={"call_s": 30}).model_copy(
        update={"dataset": "rows.jsonl"}
    )
    described = describe_tools(config)
    assert {name: names_of(tool_set) for name, tool_set in described.items()} == {
        "ask": ["look_up"],
        "Spell": ["letters", "look_up"],
    }
    assert [tool_set.pays for tool_set in described.values()] == [False, True]
    talks = {
        name: dialogue_of("qwen3", tool_set)
        for name, tool_set in described.items()
        if name is not None
    }
    limits = TurnLimits(2, 64, turn_tokens=64, max_prompt_tokens=9999)

    async def ours(pool: ToolPool) -> list[Any]:
        writer = MultiTurnWriter(
            lambda prompt: talks[prompt.columns["environment"]][1], pool, limits, pays=True
        )
        starts = [
            await writer.start(Draw(at, prompt, ()))
            for at, prompt in enumerate(load_prompts(config).prompts)
        ]
        assert len(pool.workers) == 1, "a process whose environment nobody waits for makes room"
        last = Episode(pool, starts[1].prompt, position=1, index=0)
        async with last:
            await last.begin()
            assert (
                await last.call("letters", {})
            ).text == "3" and await last.reward() == Score(0.5)
        prompts = [start.draw.prompt for start in starts]
        return [
            list(talks[prompt.columns["environment"]][1].prompt_ids(prompt.content))
            for prompt in prompts
        ]

    prompt_ids = run(ours, env=env, turns={"call_s": 30, "at_once": 1})
    namespace: dict[str, Any] = {"__file__": str(place / "tools.py")}
    exec((place / "tools.py").read_text(), namespace)
    classes = {"ask": namespace["Ask"], "Spell": namespace["Spell"]}
    tools = {
        "ask": [classes["ask"]().look_up],
        "Spell": [(spell := classes["Spell"]()).letters, spell.look_up],
    }
    heard: list[Any] = []
    theirs = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"), model=SimpleNamespace(training=True), tools=[],
        environment_factories=classes, _multi_environment=True, _environment_pool={"ask": [], "Spell": []},
        _env_tools=tools, _is_vlm=False, processing_class=talks["ask"][0], chat_template=None, chat_template_kwargs={},
        _generate=lambda prompts: heard.append(GRPOTrainer._tokenize_prompts(theirs, prompts)[0]),
    )  # fmt: skip
    with pytest.raises(TypeError):  # it has what it was to read, and nothing was generated
        GRPOTrainer._generate_and_score_completions(theirs, rows)
    assert prompt_ids == heard[0]
