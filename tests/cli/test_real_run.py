"""A real run and a real measurement of a tiny model through the command, each ending with one JSON object."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_model import write_tiny_family, write_tiny_model
from ycore.engine.kinds import is_vllm_installed

COMMON = "--dataset task:addition?digits=1 --reward exact_answer --max-tokens 8 --engine transformers --json"


@pytest.mark.slow
def test_train_then_measure(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    sizes = "--steps 2 --prompts-per-step 2 --group-size 4 --set dtype=float32 --full"
    summary = _ycore(tmp_path, f"grpo --model model --output out {sizes} {COMMON}")
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    measured = _ycore(
        tmp_path,
        f"eval --model out/model --limit 3 --num-samples 2 --set dtype=float32 {COMMON}",
    )
    assert (measured["status"], measured["num_prompts"]) == ("finished", 3)
    assert 0.0 <= measured["pass@1"] <= measured["pass@2"] <= 1.0


@pytest.mark.verify
@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.parametrize(
    "trains",
    [
        "--full",
        "--merge --set lora.target_modules=[q_proj,gate,gate_proj,up_proj,down_proj]",
        "--merge",
    ],
)
def test_a_mixture_of_experts_is_trained_merged_and_exported(
    tmp_path: Path, trains: str
) -> None:
    write_tiny_family(tmp_path / "model", "qwen3_moe")
    (tmp_path / "rewards.py").write_text(
        "def spread(completions, **columns):\n"
        "    return [len(turns[-1]['content']) % 3 / 3 for turns in completions]\n"
    )
    summary = _ycore(
        tmp_path,
        "grpo --model model --output out --steps 2 --prompts-per-step 2 --group-size 4 --engine vllm --max-tokens 8 "
        "--dataset task:addition?digits=1 --reward rewards.py:spread --set dtype=float32 --learning-rate 1e-2 "
        f"--set engine.count=1 --json {trains}",
    )
    assert (summary["status"], summary["steps"]) == ("finished", 2)
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row) for row in rows if "ycore/sync_proved" in row]
    assert [row["ycore/sync_proved"] for row in steps] == [1.0, 1.0]
    assert all(row["ycore/logprob_gap"] < 0.01 for row in steps)
    _run(tmp_path, "export out --format merged --output whole")
    before, after = (
        {
            name: weight
            for path in (tmp_path / folder).glob("*.safetensors")
            for name, weight in load_file(path).items()
        }
        for folder in ("model", "whole")
    )
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".experts." in name for name in moved) == (trains != "--merge")


def _run(folder: Path, line: str) -> str:
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()", *line.split()]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _ycore(folder: Path, line: str) -> dict[str, Any]:
    output = _run(folder, line)
    assert output.count("\n") == 1
    value: dict[str, Any] = json.loads(output)
    return value
