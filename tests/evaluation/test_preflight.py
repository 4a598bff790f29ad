"""The preflight role in a process of its own, over transformers' generation."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.tiny_model import write_tiny_model
from ycore.config.schema import (
    ConstraintSettings,
    EngineSettings,
    RewardConfig,
    RewardSettings,
    RunConfig,
)
from ycore.evaluation.preflight import (
    PreflightMeasurements,
    PromptLengths,
    add_groups,
    preflight_verdict,
    samples_of,
)
from ycore.round.sampling import Rules
from ycore.run.files import RunFolder, write_json_atomic
from ycore.scoring.group_rewards import Constraint, Constraints
from ycore.types import Completion, Draw, Group, Prompt, Score

REWARD = """
def spread(completion_ids):
    return [sum(ids) % 7 / 7 for ids in completion_ids]

def nothing(completion_ids):
    return [0.0] * len(completion_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def run_folder(
    tmp_path: Path, model: Path, *, reward: str, longest: int = 4, **settings: Any
) -> RunFolder:
    """Write what the launcher leaves for the role."""
    rows = [{"prompt": "+".join("1" * (longest if n == 7 else 3))} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "their_rewards.py").write_text(REWARD)
    folder = RunFolder(tmp_path / "run")
    for path in (folder.root, folder.logs):
        path.mkdir()
    config = RunConfig.model_validate(
        {
            "model": str(model),
            "dataset": str(tmp_path / "rows.jsonl"),
            "rewards": [RewardConfig(reward=f"{tmp_path / 'their_rewards.py'}:{reward}")],
            "output": str(folder.root),
            "group_size": 4,
            "max_tokens": 2,
            "dtype": "float32",
            "engine": EngineSettings(kind="transformers"),
            "reward_workers": RewardSettings(workers=1),
            **settings,
        }
    )
    write_json_atomic(folder.config, {"config": config.model_dump(mode="json")})
    engines = {"kind": "transformers", "engines": [], "model": str(model), "max_model_len": 64}
    write_json_atomic(folder.root / "engines.json", engines)
    return folder


def preflight(folder: RunFolder) -> tuple[PreflightMeasurements, list[dict[str, Any]]]:
    done = subprocess.run(
        [sys.executable, "-m", "ycore.evaluation.preflight", str(folder.root)],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((folder.root / "preflight.json").read_text())
    return TypeAdapter(PreflightMeasurements).validate_python(report["preflight"]), report[
        "samples"
    ]


def test_truncation_equal_rewards_and_a_long_prompt_are_measured(
    tmp_path: Path, model: Path
) -> None:
    measured, samples = preflight(run_folder(tmp_path, model, reward="nothing", longest=60))
    assert (measured.num_prompts, measured.group_size) == (16, 4)
    assert measured.truncated > 0.9 and measured.equal == 1.0
    assert measured.rewards == (0.0,) * 64 and len(samples) == 4
    assert measured.prompts is not None
    assert (measured.prompts.rows, measured.prompts.too_long, measured.prompts.longest_row) == (
        20,
        1,
        7,
    )
    findings = [finding.what for finding in preflight_verdict(measured).findings]
    assert "1 of 20 prompts are longer than the 62 tokens" in findings[0]
    assert any("cut off at 2 tokens" in finding for finding in findings)
    assert any("every reward is 0" in finding for finding in findings)


def group(*completions: tuple[float | None, str]) -> Group:
    draw = Draw(0, Prompt(0, "?"), (1,))
    written = tuple(Completion((1, 2), None, "x", reason, 0) for _, reason in completions)
    return Group(draw, written, tuple((Score(value), Score(2.0)) for value, _ in completions))


def test_what_groups_say() -> None:
    groups = [group((1.0, "stop"), (0.0, "length")), group((0.5, "stop"), (0.5, "stop"))]
    empty = PreflightMeasurements(2, 8, 64, PromptLengths(1, 1, 0, 0, 56))
    rules = Rules(group_size=2, seed=0, reward_weights=(1.0, 0.5))
    measured = add_groups(empty, groups, rules, ("a", "b"))
    assert (measured.truncated, measured.equal, measured.masked) == (0.25, 0.5, 0.0)
    assert measured.rewards == (2.0, 1.0, 1.5, 1.5)
    assert measured.means == {"a": 0.5, "b": 2.0}
    assert [row["reward"] for row in samples_of(groups, weights=(1.0, 0.5))] == [
        1.0,
        1.5,
        1.5,
        2.0,
    ]


def test_samples_reach_from_the_lowest_reward_to_the_highest() -> None:
    """The best of 128 was never among them."""
    rewards = [(number / 127, "stop") for number in range(128)]
    samples = samples_of([group(*rewards)], weights=(1.0, 0.0))
    assert [samples[0]["reward"], samples[-1]["reward"]] == [0.0, 1.0] and len(samples) == 4


def test_the_groups_that_teach_are_those_of_the_run() -> None:
    """Rewards that hardly deviate do not teach, and equal ones do where one completion breaks a constraint."""
    groups = [group((1.0, "stop"), (0.98, "stop"))]
    empty = PreflightMeasurements(2, 8, 64, PromptLengths(1, 1, 0, 0, 56))
    rules = Rules(group_size=2, seed=0, reward_weights=(1.0, 0.0))
    assert add_groups(empty, groups, rules, ("a", "b")).equal == 0.0
    coarse = replace(rules, min_stds_R=(0.05, 0.0))
    assert add_groups(empty, groups, coarse, ("a", "b")).equal == 1.0
    only_measured = replace(rules, reward_weights=(0.0, 1.0))
    assert add_groups(empty, groups, only_measured, ("a", "b")).equal == 1.0
    constraints = Constraints([Constraint(0, "a", 0.99, 0.05)], ConstraintSettings())
    gated = replace(only_measured, constraints=constraints)
    assert add_groups(empty, groups, gated, ("a", "b")).equal == 0.0
