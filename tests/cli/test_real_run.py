"""A real run and a real measurement of a tiny model through the command, each ending with one JSON object."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model

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


def _ycore(folder: Path, line: str) -> dict[str, Any]:
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
    assert done.stdout.count("\n") == 1
    value: dict[str, Any] = json.loads(done.stdout)
    return value
