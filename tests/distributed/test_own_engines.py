"""Two ranks on two vLLM engines, whose weights come from ZeRO shards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed
from ycore.run.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.verify,
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="needs vLLM"),
]

REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
COMMON = (
    "--model model --dataset task:addition?digits=1 --reward their_rewards.py:spread --max-tokens 8 --engine vllm "
    "--prompts-per-step 4 --group-size 4 --steps 3 --set dtype=float32 --set engine.max_model_len=256 --full "
    "--output run --processes 2 --accelerate zero3 --learning-rate 1e-2 --json"
)


def test_engines_hold_what_the_shards_hold(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "their_rewards.py").write_text(REWARD)
    command = [
        sys.executable,
        "-c",
        "from ycore_cli.main import main; main()",
        "grpo",
        *COMMON.split(),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["ycore/logprob_gap"] < 1e-3 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert json.loads((tmp_path / "run" / "engines.json").read_text())["engines"] == [
        "rollout-0",
        "rollout-1",
    ]
    for engine in ("rollout-0", "rollout-1"):
        assert (tmp_path / "run" / "logs" / f"{engine}.log").stat().st_size > 0
