"""A trainer without rollouts over two ranks with ZeRO-2: its losses are those of one rank, and its model loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from ycore.run.metrics import read_metrics

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
    "sft",
]
SETTINGS = (
    "--dataset task:addition?digits=1 --steps 6 --batch-size 8 --held-out 8 --set dtype=float32 \
--eval-every 3 --keep-best loss --stop-when seconds:9000"
)


def losses(model: Path, output: Path, *more: str) -> list[float]:
    words = [
        *SETTINGS.split(),
        "--model",
        str(model),
        "--output",
        str(output),
        "--learning-rate",
        "1e-3",
        *more,
    ]
    done = subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=800, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["step"] for row in rows if "ycore/eval/loss" in row] == [0, 3, 6]
    assert (output / "best" / "evaluation.json").is_file()
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.verify
def test_two_ranks_with_zero2_learn_what_one_learns(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    one_rank = losses(model, tmp_path / "one")
    two_ranks = losses(model, tmp_path / "two", "--processes", "2", "--accelerate", "zero2")
    assert len(one_rank) == 6 and one_rank[-1] < one_rank[0]
    assert two_ranks == pytest.approx(one_rank, abs=2e-3)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model").num_parameters() > 0
