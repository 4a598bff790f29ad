"""`ycore resume --processes M` of a run of N ranks: killed with 2, it goes on with 1, and for longer with 2 again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.results import read_rounds
from tests.tiny_model import write_tiny_model
from ycore.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.verify]

COMMAND = [
    sys.executable,
    "-c",
    "import sys; from ycore_cli.main import main; sys.exit(main())",
]
REWARD = """
import time

def spread(completion_ids, **columns):
    time.sleep(0.2)  # steps long enough to be killed in
    return [sum(ids) % 7 / 7 for ids in completion_ids]
"""
WORDS = (
    "grpo --model model --dataset rows.jsonl --reward their_rewards.py:spread --max-tokens 8 --engine transformers "
    "--prompts-per-step 4 --group-size 2 --steps 6 --set dtype=float32 --set checkpoint_every=2 "
    "--set sampling.dynamic=false --keep-journal --output run --processes 2"
)
WITHIN_S = 400


def start(place: Path, words: str) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(
        [*COMMAND, *words.split()], cwd=place, env=environment, text=True, **pipes
    )


def finish(place: Path, words: str) -> str:
    process = start(place, words)
    try:
        said = process.communicate(timeout=WITHIN_S)[0]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def test_two_ranks_then_one_then_two_take_every_prompt_once_and_in_order(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "their_rewards.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(50))
    )
    metrics, journal = tmp_path / "run/metrics.jsonl", tmp_path / "run/journal"

    first = start(tmp_path, WORDS)
    deadline = time.monotonic() + WITHIN_S
    while len(read_metrics(metrics)) < 3:
        assert first.poll() is None and time.monotonic() < deadline, first.communicate(
            timeout=120
        )
        time.sleep(0.05)
    family = psutil.Process(first.pid).children(recursive=True)
    [process for process in family if "ycore.trainer" in process.cmdline()][-1].send_signal(
        signal.SIGKILL
    )
    said = first.communicate(timeout=WITHIN_S)[0]
    assert first.returncode == 1, said

    said = finish(tmp_path, "resume run --processes 1")
    assert (
        "1 rank instead of 2: the prompts come in the same order, each once, and from here on"
        in said
    )
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["processes"] == 1
    said = finish(tmp_path, "resume --processes 2 run --steps 8")
    assert "2 ranks instead of 1" in said

    positions = [
        sorted(group["draw"]["position"] for group in round_["groups"])
        for round_ in read_rounds(journal)
    ]
    assert positions == [list(range(4 * step, 4 * step + 4)) for step in range(8)]
    rows = read_metrics(metrics)
    assert [row["step"] for row in rows] == list(range(1, 9)) and all(
        row["grad_norm"] > 0 for row in rows
    )
    assert any("ycore/replayed" in row for row in rows), (
        "no round of two ranks was taken again by one"
    )
    assert {path.name[-6] for path in journal.glob("round-000007-*")} == {"0", "1"}
