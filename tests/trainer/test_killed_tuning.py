"""`ycore sft`, killed outright and resumed by its folder alone: the losses of a run that was never killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.run.metrics import read_metrics

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
    "sft",
]
STEPS = 20


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [*COMMAND, *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "COLUMNS": "80"},
        )


def options(model: Path, output: Path) -> list[str]:
    words = f"--model {model} --dataset task:addition?digits=1 --output {output} --steps {STEPS} --held-out 0"
    return f"{words} --set dtype=float32 --set lora.dropout=0.2 --set checkpoint_every=4 --learning-rate 1e-3".split()


@pytest.mark.slow
@pytest.mark.verify
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(options(model, whole), tmp_path / "whole.log").wait(240) == 0, (
        tmp_path / "whole.log"
    ).read_text()

    run = start(options(model, killed), tmp_path / "killed.log")
    deadline = time.monotonic() + 600
    while len(read_metrics(killed / "metrics.jsonl")) < 6:
        assert run.poll() is None and time.monotonic() < deadline, (
            tmp_path / "killed.log"
        ).read_text()
        time.sleep(0.005)
    (tuner,) = [
        c
        for c in psutil.Process(run.pid).children(recursive=True)
        if "ycore.trainer" in c.cmdline()
    ]
    tuner.send_signal(signal.SIGKILL)
    assert run.wait(60) == 1
    resumed = start(["--output", str(killed), "--resume"], tmp_path / "killed.log")
    assert resumed.wait(240) == 0, (tmp_path / "killed.log").read_text()

    expected, seen = (read_metrics(run / "metrics.jsonl") for run in (whole, killed))
    assert [row["step"] for row in seen] == list(range(1, STEPS + 1))
    same = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy")
    assert [[row[name] for name in same] for row in seen] == [
        [row[name] for name in same] for row in expected
    ]
    assert len({row["loss"] for row in expected}) > STEPS / 2
    weights = [run / "model" / "adapter_model.safetensors" for run in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
