"""Functions as rewards: by their file, pickled with what they use, or refused by name."""

import functools
import json
import math
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards.builtin import length
from ycore.rewards.loading import load_reward
from ycore.sandbox.pickled_code import code_references

LOCK = threading.Lock()

SCRIPT = """
import json as js
import math
from re import findall as find

BONUS = {"right": [1.0, 0.5]}
import threading
LOCK = threading.Lock()

def digits(text):
    return find("[0-9]", text)

def score(completions, answer, **columns):
    return [BONUS["right"][0] * len(digits(text)) + math.floor(0.5) for text in completions]

def spell(word: str) -> str:
    return "-".join(word)

class Base:
    def get_reward(self):
        return BONUS["right"][1]

class Game(Base):
    def reset(self, **row):
        return spell("abc") + math.__name__

def locked(completions, **columns):
    with LOCK:
        return [js.loads("1") for _ in completions]
"""


def outside(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_function_of_a_module_is_its_file_and_name(tmp_path: Path) -> None:
    named = code_references(
        [outside, "exact_answer", {"reward": outside, "weight": 0.5}, length],
        tmp_path / "rewards.py",
    )
    reference = f"{Path(__file__).resolve()}:outside"
    assert named[:3] == [reference, "exact_answer", {"reward": reference, "weight": 0.5}]
    assert named[3].endswith("builtin.py:length") and not (tmp_path / "rewards.py").exists()


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The globals of a script, as `python script.py` has them."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    module = types.ModuleType("__main__")
    exec(compile(SCRIPT, str(file), "exec"), module.__dict__)
    return module.__dict__


def test_a_function_of_a_script_goes_with_what_it_uses(
    script: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "own" / "rewards.py"
    (named,) = code_references([script["score"]], file)
    file = Path(named.removesuffix(":score"))
    assert file.parent == tmp_path / "own" and file.name.startswith("rewards-")
    function = load_reward(RewardConfig(reward=f"{file}:score"))
    assert function(completions=["7 and 12", "none"], answer=["", ""]) == [3.0, 0.0]


def test_a_class_of_a_script_goes_with_what_it_uses(
    script: dict[str, Any], tmp_path: Path
) -> None:
    (named,) = code_references([script["Game"]], tmp_path / "env.py", kind="environment")
    assert ran_elsewhere(named, "[value().reset(), value().get_reward()]") == ["a-b-cmath", 0.5]
    assert code_references([Scores], tmp_path / "env.py", kind="environment") == [
        f"{Path(__file__).resolve()}:Scores"
    ]
    for environment, said in (
        (Scores(), "the environment Scores is a Scores and no plain class"),
        (dict, "the environment dict"),
    ):
        with pytest.raises(RewardError, match=f"{said}.*give file.py:name"):
            code_references([environment], tmp_path / "env.py", kind="environment")


def closure() -> Callable[..., Any]:
    lock = LOCK

    def score(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [1.0 for _ in completions]

    return score


class Scores:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    def method(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides what it decorates."""

    def wrapper(completions: list[str]) -> list[float]:
        return [2 * score for score in function(completions)]

    return wrapper


def made(bonus: Any = 0.5, *, names: Any = (), **more: Any) -> Any:
    """A function with a text that no dedenting may touch, and all that one can hold."""
    text = """a
  b"""

    def half(score: float) -> Any:
        return score * more.get("share", 0.5)

    floor, log = math.floor, math

    @around
    def score(
        completions: list[str], *, least: float = bonus, unit: Any = (names,)
    ) -> list[Any]:
        """Its first line
        and its second."""
        kept = """a
  b"""
        assert kept == text and floor(log.e) == 2 and inner(completions) is not None
        return [half(len(completion)) + least + len(unit[0]) for completion in completions]

    inner = functools.partial(lambda function, completions: function(completions), outside)
    return score


pair = (lambda completions: [1.0], lambda completions: [2.0])
by_length = lambda completions, share=LOCK is not None: [  # noqa: E731
    float(share) * len(completion) for completion in completions
]


def calls_itself() -> Callable[..., Any]:
    def score(completions: list[str]) -> list[float]:
        return [1.0, *score(completions[1:])] if completions else []

    return score


def call_each_other() -> Callable[..., Any]:
    def one(completions: list[str]) -> Any:
        return other(completions)

    def other(completions: list[str]) -> Any:
        return one(completions)

    return one


def made_of(math: Callable[..., Any]) -> Callable[..., Any]:
    return lambda completions: [math(1.5) for _ in completions]


def ran_elsewhere(name: str, expression: str) -> Any:
    """The value of an expression over what a reference names, in a process that knows nothing of this one."""
    file, _, attribute = name.rpartition(":")
    code = (
        "import json, runpy, sys; "
        f"value = runpy.run_path(sys.argv[1])[{attribute!r}]; print(json.dumps({expression}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, file],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


def loaded(name: str) -> Callable[..., Any]:
    return load_reward(RewardConfig(reward=name))


@pytest.mark.parametrize(
    ("reward", "name", "scores"),
    [
        (made(), "wrapper", [3.0, 4.0]),
        (made(-math.inf), "wrapper", [-math.inf, -math.inf]),
        (made(1, names=["x", {"y": (None, b"z")}], share=2), "wrapper", [14.0, 18.0]),
        (calls_itself(), "score", [1.0, 1.0]),
        (by_length, "reward", [2.0, 3.0]),
        (
            functools.partial(
                lambda scale, completions: [
                    scale * len(completion) for completion in completions
                ],
                3,
            ),
            "reward",
            [6, 9],
        ),
        (functools.partial(outside, answer=7), "outside", [2.0, 3.0]),
        (pair[1], "reward", [2.0]),
        (eval("lambda completions: [1.0]"), "reward", [1.0]),
        (Scores().method, "method", [1.0, 1.0]),
        (Scores(), "reward", [1.0, 1.0]),
        (functools.partial(Scores()), "reward", [1.0, 1.0]),
    ],
    ids=[
        "decorated",
        "infinite",
        "held",
        "recursive",
        "lambda",
        "partial",
        "partial of a module's",
        "one of a line",
        "without source",
        "method",
        "object",
        "partial of an object",
    ],
)
def test_a_function_that_no_name_finds_goes_with_what_it_holds(
    reward: Any, name: str, scores: list[float], tmp_path: Path
) -> None:
    (named,) = code_references([reward], tmp_path / "rewards.py")
    assert named.endswith(f".py:{name}") and Path(named.rpartition(":")[0]).parent == tmp_path
    assert (
        loaded(named)(completions=["ab", "abc"])
        == scores
        == list(reward(completions=["ab", "abc"]))
    )


def test_functions_of_one_maker_are_two_rewards(tmp_path: Path) -> None:
    rewards = [made(1.0), {"reward": made(2.0), "weight": 0.5}, outside]
    first, second, third = code_references(rewards, tmp_path / "rewards.py")
    assert (first.rpartition(":")[2], second["reward"].rpartition(":")[2]) == (
        "wrapper",
        "wrapper_2",
    )
    assert loaded(first)(completions=[""]) == [2.0] and loaded(second["reward"])(
        completions=[""]
    ) == [4.0]
    assert third == f"{Path(__file__).resolve()}:outside"


def test_functions_of_a_notebook_that_no_name_finds(
    script: dict[str, Any], tmp_path: Path
) -> None:
    """In `__main__` nothing can be imported: what such functions use is written beside them."""
    cells = """
import functools
RATE = 2.0
def plain(text):
    return len(text)
def shout(function):
    @functools.wraps(function)
    def called(*args, **columns):
        return [RATE * one for one in function(*args, **columns)]
    return called
@shout
def loud(completions, **columns):
    return [plain(text) for text in completions]
@functools.cache
def known(text):
    return plain(text)
size = lambda text: plain(text) + known(text)
def make(weight):
    def score(completions, **columns):
        return [weight * size(text) for text in completions]
    return score
mine = make(0.5)
def both(completions, **columns):
    return [one + other for one, other in zip(mine(completions), loud(completions))]
def hold(function):
    def score(completions, **columns):
        return [function(text) for text in completions]
    return score
held = hold(plain)
def plain(text):
    return 5
"""
    file = tmp_path / "cells.py"
    file.write_text(cells)
    exec(compile(cells, str(file), "exec"), script)
    functions = {name: script[name] for name in ("mine", "loud", "both", "held")}
    named = code_references(list(functions.values()), tmp_path / "rewards.py")
    assert [file_and_name.rpartition(":")[2] for file_and_name in named] == [
        "score",
        "loud",
        "both",
        "score_2",
    ]
    for reference, (name, scores) in zip(
        named, {"mine": 5.0, "loud": 10.0, "both": 15.0, "held": 2.0}.items(), strict=True
    ):
        assert (
            loaded(reference)(completions=["ab"])
            == functions[name](completions=["ab"])
            == [scores]
        )


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (closure(), "score"),
        (functools.partial(outside, answer=LOCK), "outside"),
        (made(names=LOCK), "wrapper"),
    ],
)
def test_what_no_worker_can_have_is_refused_by_name(
    reward: Any, name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        RewardError, match=rf"the reward {name} cannot be sent.*lock"
    ) as refused:
        code_references([reward], tmp_path / "rewards.py")
    assert str(refused.value).endswith("and give file.py:name")
    assert not list(tmp_path.iterdir())


def test_other_source_has_another_file_and_other_values_take_the_place_of_the_last(
    tmp_path: Path,
) -> None:
    def made_by(number: float) -> Callable[..., list[float]]:
        return lambda completions: [number for _ in completions]

    names = [code_references([made_by(n)], tmp_path / "rewards.py")[0] for n in (1.0, 2.0)]
    assert names[0] == names[1]
    assert ran_elsewhere(names[1], "value(['abc'])") == [2.0]
    other = code_references([lambda completions: [0.0]], tmp_path / "rewards.py")[0]
    assert other != names[0]
    assert ran_elsewhere(names[1], "value(['abc'])") == [2.0]


def test_a_tool_is_no_partial(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match="the tool partial is a partial and no plain function"
    ):
        code_references([functools.partial(outside)], tmp_path / "tools.py", kind="tool")


def test_a_lock_around_a_scripts_function_is_refused_by_name(
    script: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        RewardError, match=r"the reward locked cannot be sent to a worker.*lock"
    ):
        code_references([script["locked"]], tmp_path / "rewards.py")
