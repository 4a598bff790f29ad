"""Two ranks on the two slots of a machine, with real engines and a judge: whose completion each slot wrote or judged.

One slot writes for both ranks, and the other judges for both. What is learned is what one rank on these slots learns.
The judge is a random model, which cannot write a verdict with its code, so only the other reward counts.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulator.recording import read_trace

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.skipif(not is_vllm_installed(), reason="needs vLLM"),
]

JUDGE = """
rubric: Is it a word?
retries: 0
verdict:
  kind: labels
  labels: {"a": 1, "b": 0}
  min_mass: 0.001
"""
REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
COMMON = (
    "--model model --dataset task:addition?digits=1 --reward judge:word.yaml --reward their_rewards.py:spread "
    "--max-tokens 8 --engine vllm --prompts-per-step 4 --group-size 4 --steps 2 --set dtype=float32 "
    "--set engine.max_model_len=256 --full --learning-rate 1e-2 --set sampling.dynamic=false "
    "--placement split:1:1 --json"
)


def run(place: Path, ranks: int) -> RunFolder:
    folder = RunFolder(place / f"ranks-{ranks}")
    words = ["grpo", *COMMON.split(), "--processes", str(ranks), "--output", str(folder.root)]
    done = subprocess.run(
        [sys.executable, "-c", "from ycore_cli.main import main; main()", *words],
        cwd=place,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not folder.sockets.exists()
    return folder


@pytest.mark.verify
def test_each_slot_serves_both_ranks_and_they_learn_what_one_learns(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", chat=True)
    (tmp_path / "word.yaml").write_text(JUDGE)
    (tmp_path / "their_rewards.py").write_text(REWARD)
    two = run(tmp_path, 2)
    turns = [span for span in read_trace(two.trace) if span.name in ("rollout", "judge")]
    who = {(span.name, span.slot, span.details["asked_by"]) for span in turns}
    assert who == {("rollout", 0, 0), ("rollout", 0, 1), ("judge", 1, 0), ("judge", 1, 1)}
    assert len(turns) == 2 * 2 * 16, (
        "a turn for each completion and each verdict, none lost and none twice"
    )
    seen = read_metrics(two.metrics)
    assert all(
        row["ycore/sync_proved"] == 1.0 and row["ycore/logprob_gap"] < 1e-3 for row in seen
    )
    expected = read_metrics(run(tmp_path, 1).metrics)
    assert [row["step"] for row in seen] == [1, 2]
    for expected_row, row in zip(expected, seen, strict=True):
        for key in (
            "loss",
            "grad_norm",
            "reward",
            "rewards/spread/mean",
            "completions/mean_length",
        ):
            assert row[key] == pytest.approx(expected_row[key], rel=1e-3, abs=1e-4), (
                row["step"],
                key,
            )
