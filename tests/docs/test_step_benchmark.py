"""The limits beside which `docs/benchmarks/step.py` puts a step, and the script itself on a tiny model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from ycore.models.model_facts import facts_of

BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def step(load_script: Callable[[str], Any]) -> Any:
    return load_script("step")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    return facts_of(json.loads((folder / "config.json").read_text()), name="tiny")


def test_a_prompt_counts_once_and_only_completions_pass_the_head(step: Any, facts: Any) -> None:
    groups = [step.Group(10, [3, 4]), step.Group(5, [1])]
    products = facts.linear_params * (10 + 3 + 4 + 5 + 1) + facts.head_params * (3 + 4 + 1)
    assert step.train_limit(facts, groups, step.Speeds(2.0, 1.0)) == 4 * products / 2


@pytest.mark.parametrize(
    ("num_engines", "alive"), [(1, [3, 2, 1]), (2, [2, 1, 1]), (3, [1, 1, 1])]
)
def test_a_decode_step_reads_the_weights_or_multiplies_for_longer(
    step: Any, facts: Any, num_engines: int, alive: list[int]
) -> None:
    groups = [step.Group(0, [3, 2]), step.Group(0, [1])]
    weights = facts.linear_params + facts.head_params
    limit = lambda flops, read: step.round_limit(  # noqa: E731
        facts, groups, step.Speeds(flops, read), num_engines=num_engines, weight_bytes=2
    )
    reading = 3 * weights * 2 * num_engines
    assert limit(1e30, 1.0) == pytest.approx(reading)
    multiplying = sum(alive) * 2 * weights * num_engines
    assert limit(1.0, 1e30) == pytest.approx(multiplying)


def test_completions_find_their_prompts(step: Any) -> None:
    groups = step.groups_of([(1, 4), (0, 2), (1, 5)], {0: 10, 1: 11})
    assert groups == [step.Group(10, [2]), step.Group(11, [4, 5])]


@pytest.mark.slow
def test_the_script_runs_short(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    sizes = "--tokens 4 --steps 2 --prompts 2 --group 2 --dtype float32 --engine transformers"
    folders = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    command = [sys.executable, str(BENCHMARKS / "step.py"), *sizes.split(), *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "step.json").read_text())
    assert results["parts"].keys() == {"train", "round", "sync"}
    assert all(part["limit"] > 0 for part in results["parts"].values())
    assert "train" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 2 and "new" in again.stderr
