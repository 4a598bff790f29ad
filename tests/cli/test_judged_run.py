"""A real run whose rewards are a judge, a reward model and a rule: engines of three roles on one slot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed"),
]
JUDGE = """
rubric: Is it a word?
verdict:
  kind: labels
  labels: {"a": 1, "b": 0}
  min_mass: 0.001
"""
LINE = (
    "grpo --model model --dataset task:addition?digits=1 --reward judge:word.yaml --reward rm:scalar "
    "--reward exact_answer --steps 2 --prompts-per-step 2 --group-size 4 --max-tokens 8 --full --set dtype=float32 "
    "--set engine.count=1 --output out --json"
)


def test_three_kinds_of_rewards_in_one_run(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    write_classifier(tmp_path / "model", tmp_path / "scalar")
    (tmp_path / "word.yaml").write_text(JUDGE)
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()", *LINE.split()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    out = tmp_path / "out"
    scorers = json.loads((out / "engines.json").read_text())["scorers"]
    assert [(scorer["role"], scorer["sources"], scorer["engines"]) for scorer in scorers] == [
        ("judge", [0], ["judge-0"]),
        ("reward_model", [1], ["reward-model-0"]),
    ]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        # A random model does not write its question's code: each question is asked twice, and has no verdict.
        assert (
            row["ycore/judge/calls"] >= 16
            and row["ycore/judge/parse_failures"] == row["ycore/judge/calls"]
        )
        assert row["ycore/judge/latency_s"] > 0 and row["ycore/judge/tokens"] > 0
        assert 2 * row["ycore/reward_model/calls"] == row["ycore/judge/calls"]
        assert not (row.get("rewards/word/mean") or 0) > 0, "masked, and not rewarded"
        assert row["rewards/scalar/mean"] != 0 and "rewards/exact_answer/mean" in row
    assert (out / "logs" / "judge-0.log").is_file() and not (out / "sockets").exists()


def write_classifier(model: Path, folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(
            folder
        )
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


@pytest.mark.verify
def test_a_run_whose_teacher_is_the_policy_learns_nothing(tmp_path: Path) -> None:
    """Another teacher, which is only measured, shows that the probabilities are compared."""
    write_tiny_model(tmp_path / "model")
    write_tiny_model(tmp_path / "other", seed=1)
    line = (
        "distill --model model --dataset task:addition?digits=1 --steps 2 --prompts-per-step 2 "
        "--group-size 2 --max-tokens 8 --full --set dtype=float32 --set engine.count=1 --output out --json --set"
    )
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()", *line.split()]
    command.append("rewards=['teacher:model', {reward: 'teacher:other', weight: 0}]")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    scorers = json.loads((out / "engines.json").read_text())["scorers"]
    assert [(scorer["role"], scorer["sources"], scorer["engines"]) for scorer in scorers] == [
        ("teacher", [0], ["teacher-0"]),
        ("teacher", [1], ["teacher-1"]),
    ]
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["ycore/teacher/calls"] == 8 and row["ycore/masked"] == 0
        assert abs(row["rewards/model/mean"]) < 1e-4 and row["grad_norm"] < 1e-3
        assert abs(row["rewards/other/mean"]) > 0.01
