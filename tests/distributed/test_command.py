"""`ycore grpo --processes 2` as a person runs it: how it goes on, how it stops, how it fails, and what it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny_model import write_tiny_model
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics
from ycore.run.reports import RUN_MARKER

pytestmark = pytest.mark.slow

REWARD = "def spread(completion_ids, **columns):\n    return [sum(ids) % 7 / 7 for ids in completion_ids]\n"
COMMON = (
    "--model model --dataset rows.jsonl --reward their_rewards.py:spread --max-tokens 8 --engine transformers "
    "--prompts-per-step 4 --group-size 4 --set dtype=float32 --output run --processes 2"
)
WITHIN_S = 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model")


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    """Start `ycore grpo` in a folder of its own; whatever happens, nothing of it is left after the test."""
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "their_rewards.py").write_text(REWARD)
    started: list[subprocess.Popen[str]] = []

    def start_ycore(more: str, rows: list[str] | None = None) -> "subprocess.Popen[str]":
        prompts = rows or [f"{n} + 1 =" for n in range(16)]
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        )
        words = COMMON.split()
        for option in set(more.split()) & {"--prompts-per-step", "--processes"}:
            place = words.index(option)  # an option is given once
            del words[place : place + 2]
        command = [
            sys.executable,
            "-c",
            "from ycore_cli.main import main; main()",
            "grpo",
            *words,
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            [*command, *more.split()],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_ycore
    for process in started:
        process.kill()
        process.communicate(timeout=120)
    deadline = time.monotonic() + 120
    while marked(tmp_path):
        assert time.monotonic() < deadline, f"left behind: {marked(tmp_path)}"
        time.sleep(0.2)
    assert not RunFolder(tmp_path / "run").sockets.exists()


def marked(place: Path) -> list[str]:
    run_id = RunFolder(place / "run").run_id
    command_lines = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_MARKER) == run_id:
                command_lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return command_lines


def wait_for_step(place: Path, step: int, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + WITHIN_S
    while len(read_metrics(place / "run" / "metrics.jsonl")) < step:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate(
            timeout=120
        )
        time.sleep(0.1)


def ranks(place: Path) -> dict[int, int]:
    """Process ids by rank, as the ranks report them."""
    reports = [
        json.loads(path.read_text())
        for path in RunFolder(place / "run").sockets.glob("rank-*.json")
    ]
    return {report["number"]: report["pid"] for report in reports}


def state(place: Path, step: int, rank: int) -> dict[str, Any]:
    controller_state: dict[str, Any] = json.loads(
        (place / f"run/checkpoints/checkpoint-{step}/controller-{rank}.json").read_text()
    )["controller"]
    return controller_state


@pytest.mark.verify
def test_one_interrupt_saves_on_both_ranks_and_resume_goes_on(
    tmp_path: Path, start: Start
) -> None:
    first = start("--steps 40")
    wait_for_step(tmp_path, 3, first)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=WITHIN_S)
    assert first.returncode == 130, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    step = summary["steps"]
    assert summary["status"] == "interrupted" and 3 <= step < 40
    cursors = [state(tmp_path, step, rank)["draws"]["cursor"] for rank in (0, 1)]
    assert sum(cursors) >= 4 * step
    second = start("--steps 40 --resume")
    _, said = second.communicate(timeout=WITHIN_S)
    assert second.returncode == 0, said
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(
        range(1, 41)
    )
    assert sum(state(tmp_path, 40, rank)["draws"]["cursor"] for rank in (0, 1)) >= 160
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file()
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} >= {
        "trainer-0.log",
        "trainer-1.log",
    }


@pytest.mark.verify
def test_a_bad_row_on_one_rank_is_one_line_and_exit_status_2(
    tmp_path: Path, start: Start
) -> None:
    rows = ["1 + 1 ="] * 15 + ["7" * 600]
    process = start("--steps 40", rows)
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 2, said
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith("error: row 15: the prompt has 6")
    assert "Traceback" not in said


@pytest.mark.verify
def test_a_rank_that_is_killed_ends_the_run_at_once_and_is_named(
    tmp_path: Path, start: Start
) -> None:
    process = start("--steps 4000")
    wait_for_step(tmp_path, 2, process)
    killed_at = time.monotonic()
    os.kill(ranks(tmp_path)[1], signal.SIGKILL)
    _, said = process.communicate(timeout=WITHIN_S)
    assert time.monotonic() - killed_at < 60, "of a run of 4000 steps"
    assert process.returncode == 1
    error = next(line for line in said.splitlines() if line.startswith("error: "))
    assert "trainer rank 1 ended with a signal, killed or out of memory" in error
    assert "trainer-1.log" in error


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            "--accelerate zero4",
            "error: --accelerate takes ddp, zero1, zero2, zero3, fsdp2, hsdp or an accelerate config file",
        ),
        ("--accelerate fsdp2", "error: --accelerate fsdp2: FSDP needs GPUs"),
        (
            "--accelerate zero3",
            "error: transformers generates with the trainer's own weights",
        ),
        ("--prompts-per-step 3", "error: prompts_per_step must be a multiple of the 2 ranks"),
        ("--processes 64", "error: --processes 64 is more than the "),
        ("--processes two", "error: processes must be 'auto' or"),
    ],
)
def test_what_cannot_work_is_refused(start: Start, more: str, line: str) -> None:
    process = start(f"--steps 1 {more}")
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 2
    assert said.splitlines()[-1].startswith(line), said
