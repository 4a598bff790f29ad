"""An engine that is killed in the midst of a round, in a whole run: nothing is lost, nothing comes twice.

With the scripted engine, which is a test tool that answers as a pure function of its weights, prompt and seed, a run
whose engine was killed must equal one whose engine was not. A real vLLM server is killed once, too.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.engine.kinds import is_vllm_installed
from ycore.run.metrics import read_metrics

SCRIPTED = [sys.executable, "-m", "tests.chaos.command", json.dumps({"--think-s": "0.05"})]
YCORE = [sys.executable, "-c", "import sys; from ycore_cli.main import main; sys.exit(main())"]
STEPS = 6
SAME = ("loss", "grad_norm", "reward", "completions/mean_length")
REWARD = """
import time

def variety(completions, **columns):
    time.sleep(0.05)
    return [len(set(completion[0]["content"])) / 8 for completion in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def start(command: list[str], model: Path, output: Path, *sets: str) -> subprocess.Popen[str]:
    (output.parent / "rewards.py").write_text(REWARD)
    options: dict[str, Any] = {
        "--model": model,
        "--dataset": "task:addition?digits=1",
        "--reward": f"{output.parent / 'rewards.py'}:variety",
        "--output": output,
        "--steps": STEPS,
        "--prompts-per-step": 4,
        "--group-size": 4,
        "--max-tokens": 8,
        "--engine": "vllm",
        "--learning-rate": 1e-2,
    }
    option_words = [str(word) for option, value in options.items() for word in (option, value)]
    settings = ["dtype=float32", "sampling.dynamic=false", "engine.max_model_len=64", *sets]
    words = [
        *command,
        "grpo",
        *option_words,
        *(word for value in settings for word in ("--set", value)),
    ]
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )


def rows(output: Path) -> list[dict[str, Any]]:
    return read_metrics(output / "metrics.jsonl")


def wait_for_row(output: Path, number: int, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while len(rows(output)) < number:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process_of(run: subprocess.Popen[str], name: str) -> psutil.Process:
    """The process of this run that has a word like this in its command line: a module, or an engine's socket."""
    below = psutil.Process(run.pid).children(recursive=True)
    (process,) = [
        child for child in below if any(word.endswith(name) for word in child.cmdline())
    ]
    return process


@pytest.mark.slow
@pytest.mark.verify
def test_a_run_whose_trainer_and_engine_were_killed_equals_one_in_peace(
    model: Path, tmp_path: Path
) -> None:
    whole, harmed = tmp_path / "whole", tmp_path / "harmed"
    sets = ("engine.count=2", "checkpoint_every=2", "restarts=1")
    run = start(SCRIPTED, model, whole, *sets)
    stdout, _ = run.communicate(timeout=600)
    assert run.returncode == 0, stdout

    run = start(SCRIPTED, model, harmed, *sets)
    wait_for_row(harmed, 2, run)
    process_of(run, "ycore.trainer").send_signal(signal.SIGKILL)
    wait_for_row(harmed, 4, run)
    process_of(run, "rollout-0.sock").send_signal(signal.SIGKILL)
    stdout, _ = run.communicate(timeout=600)
    assert run.returncode == 0, stdout
    assert (
        "trainer ended with killed by SIGKILL" in stdout
        and "resuming from the newest checkpoint (1 of 1)" in stdout
    )
    assert (
        "rollout-0 ended with killed by SIGKILL" in stdout
        and "starting it again (1 of 3)" in stdout
    )

    expected, seen = rows(whole), rows(harmed)
    assert [{key: row[key] for key in SAME} for row in seen] == [
        {key: row[key] for key in SAME} for row in expected
    ]
    assert len({row["loss"] for row in expected}) == len(expected) == STEPS
    assert [
        sum(row.get("ycore/engine_restarts", 0) for row in run_rows)
        for run_rows in (expected, seen)
    ] == [0, 1]
    assert {row["ycore/sync_proved"] for row in seen if "ycore/sync_proved" in row} == {1.0}


@pytest.mark.engine
@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed")
@pytest.mark.verify
def test_a_real_engine_that_loses_its_core_in_a_round_is_back_with_the_policys_weights(
    model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run = start(YCORE, model, output, "engine.count=1")
    wait_for_row(output, 2, run)
    core = process_of(run, "rollout-0.sock").children(recursive=True)
    for process in core:
        process.send_signal(signal.SIGKILL)
    stdout, _ = run.communicate(timeout=600)
    assert run.returncode == 0, stdout
    assert "rollout-0 lost its process" in stdout and "rollout-0 is back after" in stdout
    seen = rows(output)
    assert [row["step"] for row in seen] == list(range(1, STEPS + 1))
    assert sum(row["ycore/engine_restarts"] for row in seen) == 1, stdout
    # At this learning rate an engine with the first weights would be off by far more (test_real_engine).
    assert all(row["ycore/logprob_gap"] < 0.01 for row in seen), [
        row["ycore/logprob_gap"] for row in seen
    ]
