"""Functions as rewards: by their file, by their source and what it uses, or refused by name."""

import functools
import json
import math
import re
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
from ycore.rewards.source_files import as_named

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
    named = as_named([outside, "exact_answer", {"reward": outside, "weight": 0.5}, length], tmp_path / "rewards.py")
    own = f"{Path(__file__).resolve()}:outside"
    assert named[:3] == [own, "exact_answer", {"reward": own, "weight": 0.5}]
    assert named[3].endswith("builtin.py:length") and not (tmp_path / "rewards.py").exists()


@pytest.fixture
def script(tmp_path: Path) -> dict[str, Any]:
    """The globals of a script, as `python script.py` has them."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    module = types.ModuleType("__main__")
    exec(compile(SCRIPT, str(file), "exec"), module.__dict__)
    return module.__dict__


def test_a_function_of_a_script_goes_with_what_it_uses(script: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "own" / "rewards.py"
    (named,) = as_named([script["score"]], file)
    file = Path(named.removesuffix(":score"))
    assert file.parent == tmp_path / "own" and file.name.startswith("rewards-")
    function = load_reward(RewardConfig(reward=f"{file}:score"))
    assert function(completions=["7 and 12", "none"], answer=["", ""]) == [3.0, 0.0]
    assert "threading" not in file.read_text()


def test_a_class_of_a_script_goes_with_what_it_uses(script: dict[str, Any], tmp_path: Path) -> None:
    (named,) = as_named([script["Game"]], tmp_path / "env.py", kind="environment")
    found: dict[str, Any] = {}
    text = Path(named.removesuffix(":Game")).read_text()
    exec(text, found)
    assert found["Game"]().reset() == "a-b-cmath" and found["Game"]().get_reward() == 0.5
    assert "__name__ =" not in text, "every class looks its module up, and each file has its own"
    assert as_named([Scores], tmp_path / "env.py", kind="environment") == [f"{Path(__file__).resolve()}:Scores"]
    for given, said in (
        (Scores(), "the environment Scores is a Scores and no plain class"),
        (dict, "the environment dict"),
    ):
        with pytest.raises(RewardError, match=f"{said}.*give file.py:name"):
            as_named([given], tmp_path / "env.py", kind="environment")


def closure() -> Callable[..., Any]:
    lock = LOCK

    def score(completions: list[str], **columns: Any) -> list[float]:
        with lock:
            return [1.0 for _ in completions]

    return score


def local() -> Callable[..., Any]:
    def score(completions: list[str], **columns: Any) -> list[float]:
        return [1.0 for _ in completions]

    return score


class Scores:
    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]

    def method(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (closure(), "closure.<locals>.score is a closure that holds lock (a lock)"),
        (local(), "score is not at the top of its module"),
        (lambda completions: [1.0], "<lambda> is not at the top"),
        (Scores(), "Scores is a Scores and no plain function"),
        (Scores().method, "is a method and no plain function"),
        (functools.partial(outside), "is a partial and no plain function"),
        (math.floor, "is a builtin_function_or_method and no plain function"),
    ],
)
def test_what_no_worker_can_have_is_refused_by_name(reward: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=f"{re.escape(said)}.*give file.py:name"):
        as_named([reward], tmp_path / "rewards.py")


def test_a_lock_around_a_scripts_function_is_refused_by_name(script: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="the reward locked uses LOCK, a lock, which a worker cannot have"):
        as_named([script["locked"]], tmp_path / "rewards.py")


def test_importing_ycore_is_light() -> None:
    code = "import ycore, sys, json; ycore.grpo; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "transformers", "trl", "vllm", "datasets", "numpy", "typer"}
