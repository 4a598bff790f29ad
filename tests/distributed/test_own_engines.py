"""Two ranks on two vLLM engines: weights from ZeRO shards, and weights that change between two tokens."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import COMMAND, ENVIRONMENT
from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verify,
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="needs vLLM"),
]

REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
COMMON = (
    "--model model --dataset task:addition?digits=1 --reward their_rewards.py:spread --engine vllm "
    "--prompts-per-step 4 --group-size 4 --set dtype=float32 --set engine.max_model_len=256 --full "
    "--output run --processes 2 --learning-rate 1e-2 --json"
)


def run(place: Path, words: str) -> list[dict[str, Any]]:
    """Train, and return the rows of its metrics."""
    write_tiny_model(place / "model")
    (place / "their_rewards.py").write_text(REWARD)
    command = [*COMMAND, "grpo", *COMMON.split(), *words.split()]
    environment = {**os.environ, **ENVIRONMENT}  # compilers are found by PATH
    done = subprocess.run(
        command, cwd=place, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    folder = RunFolder(place / "run")
    engines = ["rollout-0", "rollout-1"]
    assert json.loads(folder.engines.read_text())["engines"] == engines
    for engine in engines:
        assert folder.log(engine).stat().st_size > 0
    rows = read_metrics(folder.metrics)
    assert json.loads(done.stdout)["steps"] == len(rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    return rows


def test_engines_hold_what_the_shards_hold(tmp_path: Path) -> None:
    rows = run(tmp_path, "--accelerate zero3 --steps 3 --max-tokens 8")
    assert len(rows) == 3 and all(row["ycore/logprob_gap"] < 1e-3 for row in rows)


def test_two_ranks_train_while_their_engines_write(tmp_path: Path) -> None:
    """The gap counts the tokens of the step's own weights, which both engines must have got in the midst of others."""
    rows = run(tmp_path, "--steps 8 --max-tokens 64 --max-staleness 3")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["ycore/staleness"] for row in rows) > 0, "no round was written ahead"
    print([(row["ycore/staleness"], row.get("ycore/logprob_gap")) for row in rows])
    assert all(row.get("ycore/logprob_gap", 0) < 1e-3 for row in rows)
