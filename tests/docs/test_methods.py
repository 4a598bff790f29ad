"""The methods of docs/methods: each formula by a table that was computed by hand, each file through its door."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ycore.config.resolve import resolve
from ycore.trl.own_functions import check_own_functions
from ycore.types import Prompt

METHODS = Path(__file__).resolve().parents[2] / "docs" / "methods"
NAN = float("nan")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"method_{name}", METHODS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def group(*sources: list[float]) -> Any:
    """A group with the rewards of each source, of which the first is trained on."""
    values = [torch.tensor(source, dtype=torch.float64) for source in sources]
    named = {f"reward_{place}": value for place, value in enumerate(values)}
    return SimpleNamespace(rewards=values[0], rewards_by_source=named)


@pytest.mark.parametrize(
    ("function", "rewards", "weights"),
    [
        # Of eight, two at either end: four times 2 make up eight.
        ("best_worst", [0, 1, 2, 3, 4, 5, 6, 7], [2, 2, 0, 0, 0, 0, 2, 2]),
        ("best_of_n", [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 4, 4]),
        # Of three with a reward one at either end; the one without has no part.
        ("best_worst", [0.5, NAN, 0.0, 1.0], [0, 0, 1.5, 1.5]),
    ],
)
def test_pf_ppo(function: str, rewards: list[float], weights: list[float]) -> None:
    (found,) = getattr(load("pf_ppo"), function)([group(rewards)])
    assert found.tolist() == weights


@pytest.mark.parametrize(
    ("right", "process", "kept"),
    [
        # Two of each: the right ones with the highest values, the wrong ones with the lowest.
        ([1, 1, 1, 1, 0, 0, 0, 0], [.9, .1, .5, .2, .8, .3, .1, .6], [1, 0, 1, 0, 0, 1, 1, 0]),
        # One right answer: three wrong ones fill up.
        ([1, 0, 0, 0, 0, 0, 0, 0], [.1, .7, .2, .3, .9, .4, .8, .6], [1, 0, 1, 1, 0, 1, 0, 0]),
        ([1, 1, 1, 1], [.4, .3, .2, .1], [1, 1, 0, 0]),
        ([0, 0, 0, 0], [.4, .3, .2, .1], [0, 0, 1, 1]),
    ],
)  # fmt: skip
def test_prof(right: list[float], process: list[float], kept: list[float]) -> None:
    (found,) = load("prof").consistent([group(right, process)])
    assert found.tolist() == kept


def test_fapo() -> None:
    # Rewards 1, 0 (right, flawed), -1, -1: the mean is -0.25, the deviation sqrt(2.75 / 3).
    found = load("fapo").flaw_aware(group([1, 1, 0, 0], [1, 0, 1, 0]))
    deviation = math.sqrt(2.75 / 3) + 1e-4
    expected = [1.25 / deviation, 0.25 / deviation, -0.75 / deviation, -0.75 / deviation]
    assert found.tolist() == pytest.approx(expected)
    # Where most are right and sound, the same flawed answer loses.
    assert load("fapo").flaw_aware(group([1, 1, 1, 1], [1, 0, 1, 1]))[1] < 0


def test_g_ra() -> None:
    # The rewards of the way count where the outcome does: 1.5, 1, 0, 0; the mean is 0.625.
    found = load("g_ra").gated(group([1, 1, 0, 0], [0.5, 0.0, 0.9, 0.0]))
    deviation = math.sqrt(sum((x - 0.625) ** 2 for x in (1.5, 1, 0, 0)) / 3) + 1e-4
    assert found.tolist() == pytest.approx([(x - 0.625) / deviation for x in (1.5, 1, 0, 0)])


def test_pacs() -> None:
    # Sums 0.4 and -0.2: the scores are 0.6 and -0.6; the second pair's answer without a reward counts nowhere.
    logprobs = torch.tensor([[0.3, 0.1, 9.0], [-0.2, 0.0, 9.0], [0.5, 0, 0], [0.1, 0, 0]])
    mask = torch.tensor([[1, 1, 0]] * 4)
    rewards = torch.tensor([1.0, 0.0, 1.0, NAN])
    loss, metrics = load("pacs").supervised(logprobs, torch.zeros(4, 3), rewards, mask, 2)
    terms = [math.log1p(math.exp(-0.6)), math.log1p(math.exp(-0.6)), math.log1p(math.exp(-0.4))]
    assert loss.item() == pytest.approx(sum(terms) / 3, rel=1e-6)
    assert metrics == {"pacs/accuracy": 1.0}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("keep", "pf_ppo.py:best_worst"),
        ("keep", "pf_ppo.py:best_of_n"),
        ("keep", "prof.py:consistent"),
        ("advantage", "fapo.py:flaw_aware"),
        ("advantage", "g_ra.py:gated"),
        ("loss", "pacs.py:supervised"),
    ],
)
def test_every_method_passes_its_door(kind: str, name: str) -> None:
    options = {"model": "m", "dataset": "d", "output": "o", "group_size": 4}
    options |= {"rewards": ["exact_answer", "length"], "trl": {"beta": 1e-6}}
    config = resolve(options={**options, kind: f"{METHODS / name}"})
    check_own_functions(config, Prompt(0, "2 + 2?", {"answer": "4"}))


def test_the_page_lists_every_method() -> None:
    page = (METHODS.parent / "own-functions.md").read_text()
    assert [
        path.name for path in METHODS.glob("*.py") if f"methods/{path.name}" not in page
    ] == []
