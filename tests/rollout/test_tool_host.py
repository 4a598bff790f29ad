"""The process that holds tools and environments, without a process: what is refused, told, and kept."""

import random
from pathlib import Path
from typing import Any

import pytest

from ycore.errors import ConfigError
from ycore.rollout import tool_host
from ycore.rollout.tool_host import MAX_TEXT, ToolHost, schema_of
from ycore.sandbox.channel import load_named

TOOLS = '''
import random

def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: One.
        y: The other.
    """
    return x + y

async def later(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    return text * 2

def untyped(x):
    """Add one.

    Args:
        x: A number.
    """
    return x + 1

def undescribed(x: int) -> int:
    return x + 1

class Game:
    """Guess."""

    def reset(self, low: int = 0, **row):
        self.number = random.randint(low, 10**6)
        return f"from {low}"

    def draw(self) -> int:
        """Draw a number."""
        return random.randint(0, 10**6)

    def look(self) -> int:
        """Look at the number."""
        return self.number

    def get_reward(self) -> float:
        return self.number

    def _hidden(self):
        pass

class Steps:
    def reset(self, **row):
        return None

    def step(self, text: str):
        return None if text == "end" else text.upper()

class Pays:
    turn_reward = None

    def reset(self, **row):
        self.turn_reward = 100.0

    def go(self, by: int) -> str:
        """Go.

        Args:
            by: How far.
        """
        self.turn_reward = by / 4
        if by == 3:
            raise ValueError("too far")
        return "went"

    def rest(self) -> str:
        """Rest."""
        return "rested"

class NoReset:
    def draw(self) -> int:
        """Draw."""
        return 1

    def get_reward(self) -> str:
        return "1"

class Texts(Steps):
    def get_reward(self):
        return "1"

class Breaks:
    def __init__(self):
        raise ValueError("no\\nserver")

    def reset(self, **row):
        pass
'''


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)


def call(host: ToolHost, name: str, **arguments: Any) -> object:
    return host.answer({"op": "call", "name": name, "arguments": arguments, "seed": 3})


def test_tools_are_called_by_name_and_answer_as_text() -> None:
    host = ToolHost(["tools.py:add", "tools.py:later"], None)
    assert call(host, "add", x=1, y=2) == "3" and call(host, "later", text="ab") == "abab"
    assert call(host, "later", text="a" * MAX_TEXT) == "a" * MAX_TEXT
    with pytest.raises(ValueError, match=r"Tool sub not found\."):
        call(host, "sub", x=1)
    assert not host.describe(schemas=False)["pays"]


def test_an_environments_public_methods_are_tools_and_the_seed_is_the_worlds() -> None:
    host = ToolHost([], "tools.py:Game")
    assert host.answer({"op": "reset", "row": {"low": 3, "answer": "4"}, "seed": 7}) == "from 3"
    random.seed(7)
    number = random.randint(3, 10**6)
    assert call(host, "look") == str(number) and host.answer({"op": "reward"}) == float(number)
    assert call(host, "draw") == call(host, "draw")  # the same seed
    assert sorted(host._tools) == ["draw", "look"] and host.describe(schemas=False)["pays"]


def test_an_environment_whose_only_method_is_step_takes_text() -> None:
    host = ToolHost([], "tools.py:Steps")
    assert host.describe(schemas=True) == {
        "tools": [],
        "takes_text": True,
        "pays": False,
        "pays_turns": False,
    }
    assert (
        host.answer({"op": "step", "text": "go"}) == "GO"
        and host.answer({"op": "step", "text": "end"}) is None
    )
    assert not ToolHost([], "tools.py:Game").describe(schemas=False)["takes_text"]


def test_what_calls_paid_is_added_up_until_it_is_asked_for() -> None:
    host = ToolHost([], "tools.py:Pays")
    assert host.describe(schemas=False)["pays_turns"] and sorted(host._tools) == ["go", "rest"]
    for _ in range(2):
        host.answer({"op": "reset", "row": {}})
        assert host.answer({"op": "turn_reward"}) == 100.0, (
            "once: what reset pays is the first turn's"
        )
        call(host, "rest")
        assert host.answer({"op": "turn_reward"}) is None
        call(host, "go", by=1)
        with pytest.raises(ValueError, match="too far"):
            call(host, "go", by=3)
        call(host, "rest")
        assert (
            host.answer({"op": "turn_reward"}) == 1.0
            and host.answer({"op": "turn_reward"}) is None
        )
        call(host, "go", by=2)  # another completion's, which ended without asking


def test_a_reward_that_is_text_is_refused() -> None:
    host = ToolHost([], "tools.py:Texts")
    with pytest.raises(TypeError, match="get_reward returns a number or None, not the str '1'"):
        host.answer({"op": "reward"})


@pytest.mark.parametrize(
    ("declared", "env", "problem"),
    [
        (["tools.py:add", "tools.py:add"], None, "two tools are named 'add'"),
        (["tools.py:subtract"], None, "has no 'subtract' to call; it has add, later"),
        (["none.py:add"], None, "no file none.py"),
        (["add"], None, "needs both sides of its colon"),
        ([], "tools.py:NoReset", "must be a class with reset"),
        ([], "tools.py:add", "must be a class with reset"),
        ([], "tools.py:Breaks", "raised ValueError: no server"),
    ],
)
def test_what_is_no_tool_or_environment_is_refused_in_one_line(
    declared: list[str], env: str | None, problem: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ToolHost(declared, env)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["untyped", "undescribed"])
def test_a_tool_without_types_or_docstring_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"tool '{name}' cannot be shown to a model: .*; give it a docstring"
    ):
        ToolHost([f"tools.py:{name}"], None).describe(schemas=True)


def test_schemas_are_those_of_transformers() -> None:
    from transformers.utils import get_json_schema

    (schema,) = ToolHost(["tools.py:add"], None).describe(schemas=True)["tools"]
    assert schema["function"]["name"] == "add" and schema == schema_of(
        load_named("tools.py:add", kind="tool", error=ConfigError)
    )
    assert schema == get_json_schema(load_named("tools.py:add", kind="tool", error=ConfigError))


def test_variables_of_the_interpreter_last() -> None:
    host = ToolHost(["python"], None)
    assert call(host, "python", code="x = 20\nprint('hello')\nx + 1") == "hello\n21"
    assert call(host, "python", code="def f():\n    return x * 2") == ""
    assert call(host, "python", code="f()") == "40" and call(host, "python", code="") == ""
    with pytest.raises(NameError):
        call(host, "python", code="y")
    assert schema_of(tool_host.python)["function"]["name"] == "python"
