import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ycore.config.schema import RewardConfig
from ycore.errors import RewardError
from ycore.rewards import worker_client
from ycore.rewards.loading import load_reward, reward_names
from ycore.rewards.worker_client import check_reward

PLAIN = """
from helper_beside import ONE

constant = 3

def plain(completions, answer, bonus=0.0):
    return [ONE + bonus for _ in completions]

def singular(completion, **kwargs):
    return [1.0]

def like_trl(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a person's reward files."""
    (tmp_path / "helper_beside.py").write_text("ONE = 1.0\n")
    (tmp_path / "my_rewards.py").write_text(PLAIN)
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "noisy.py").write_text("print('hello')\ndef f(completions): return [0.0]\n")
    (tmp_path / "hangs.py").write_text(
        "import os, subprocess, time\nsubprocess.Popen(['tail', '-f', '/dev/null', os.getcwd()])\ntime.sleep(1000)\n"
    )
    package = tmp_path / "package_here"
    package.mkdir()
    (package / "scores.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def spec(reward: str, **args: Any) -> RewardConfig:
    return RewardConfig(reward=reward, args=args)


def test_a_builtin_keeps_its_settings_when_a_column_has_their_name() -> None:
    reward = load_reward(spec("length", target=2))
    assert reward(prompts=["?"], completions=["a b"], words=["?"]) == [1.0]


@pytest.mark.parametrize("source", ["my_rewards.py", "./my_rewards.py", "package_here.scores"])
def test_a_persons_function_is_found_with_its_arguments_bound(
    folder: Path, source: str
) -> None:
    reward = load_reward(spec(f"{source}:plain", bonus=0.5))
    assert reward(completions=["a", "b"], answer=["1", "2"]) == [1.5, 1.5]


def test_a_module_that_makes_its_names_on_demand_works(folder: Path) -> None:
    (folder / "lazy_module.py").write_text(
        "def __getattr__(name):\n    return lambda completions: [name]\n"
    )
    reward = load_reward(spec("lazy_module:anything"))
    assert str(reward(completions=["a"])) == "['anything']"


@pytest.mark.parametrize(
    ("reward", "args", "message"),
    [
        ("exact_anser", {}, "no built-in reward 'exact_anser'.* did you mean 'exact_answer'"),
        ("qqq", {}, "built-in are exact_answer, contains_answer"),
        ("my_rewards.plain", {}, "package.module:function"),
        ("length", {"taget": 3}, "reward 'length': no key taget; did you mean 'target'"),
        ("exact_answer", {"answer": ["1"]}, "reward 'exact_answer': no key answer"),
        (
            "length",
            {"target": "long"},
            "reward 'length': target must be a whole number; it is 'long'",
        ),
        ("length", {"target": True}, "target must be a whole number; it is True"),
        ("length", {"target": 0}, "'length': target must be greater than 0; it is 0"),
        ("format", {"pattern": "("}, "pattern must be a regular expression"),
        ("overlong", {"max_tokens": 10}, "reward 'overlong': cache_tokens is missing"),
        ("overlong", {"max_tokens": 10, "cache_tokens": 20}, "cache_tokens"),
        ("my_reward.py:plain", {}, "no file my_reward.py; did you mean 'my_rewards.py'"),
        (
            "my_rewards.py:plane",
            {},
            "my_rewards.py has no 'plane' to call; did you mean 'plain'",
        ),
        ("my_rewards.py:zzzzz", {}, "it has plain, singular, like_trl"),
        ("my_rewards.py:constant", {}, "my_rewards.py has no 'constant' to call; it has plain"),
        ("my_rewards.py:", {}, "both sides of its colon"),
        ("my_rewards.py:plain", {"bonnus": 1}, "no argument 'bonnus'; did you mean 'bonus'"),
        (
            "my_rewards.py:plain",
            {"completions": []},
            "'completions' of reward .* is given by the run",
        ),
        (
            "package_her.scores:plain",
            {},
            "no module 'package_her'; did you mean 'package_here.scores'",
        ),
        (
            "raises.py:plain",
            {},
            "importing raises.py raised ZeroDivisionError: division by zero",
        ),
        ("raises:plain", {}, "importing raises raised ZeroDivisionError"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(
    folder: Path, reward: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        load_reward(spec(reward, **args))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reward", "columns"),
    [
        ("exact_answer", ["answer", "question"]),
        ("format", []),
        ("my_rewards.py:plain", ["answer"]),
        ("my_rewards.py:like_trl", []),
        ("noisy.py:f", []),
    ],
)
def test_check_accepts_what_can_score_the_dataset(
    folder: Path, reward: str, columns: list[str]
) -> None:
    check_reward(spec(reward), columns)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "exact_answer",
            "column 'answer', and the dataset has question, target; .*--answer-column",
        ),
        (
            "my_rewards.py:plain",
            "column 'answer', and the dataset has question, target; .*--answer-column",
        ),
        ("my_rewards.py:singular", "column 'completion', .*did you mean 'completions'"),
        ("gym", "column 'gym_task'"),
        ("raises.py:plain", "raised ZeroDivisionError"),
        ("leaves.py:plain", "ended its process .exit status 3."),
        ("no_such.py:plain", "no file no_such.py"),
    ],
)
def test_check_refuses_what_cannot_score_the_dataset(
    folder: Path, reward: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        check_reward(spec(reward), ["target", "question"])
    assert "\n" not in str(caught.value)


def test_check_does_not_wait_for_an_import_that_hangs_and_leaves_nothing_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_client, "_CHECK_DEADLINE_S", 2.0)
    start = time.monotonic()
    with pytest.raises(RewardError, match="did not end within 2 s"):
        check_reward(spec("hangs.py:plain"), [])
    assert time.monotonic() - start < 60
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (process.info["cmdline"] or [])
    ]


def test_check_imports_neither_torch_nor_the_rewards_own_libraries() -> None:
    heavy = (
        "torch",
        "transformers",
        "trl",
        "datasets",
        "vllm",
        "math_verify",
        "reasoning_gym",
        "sympy",
    )
    code = (
        "import sys\n"
        "from ycore.config.schema import RewardConfig\n"
        "from ycore.rewards.worker_client import check_reward\n"
        "for name in ('math', 'exact_answer', 'format'): check_reward(RewardConfig(reward=name), ['answer'])\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.strip() == "[]"


def test_names_are_short_and_only_once() -> None:
    specs = [
        spec("format"),
        spec("a.py:score"),
        spec("b.py:score"),
        spec("format", pattern="."),
    ]
    assert reward_names(specs) == ["format", "score", "score_2", "format_2"]
