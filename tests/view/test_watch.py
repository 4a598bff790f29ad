"""Watching a run that ended, one that goes on, and one whose launcher is gone."""

import fcntl
import io
import json
import threading
import time
from pathlib import Path

import pytest
from ycore_cli.main import run as ycore

from ycore.view.progress import watch


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    root.mkdir()
    config = {"algorithm": "grpo", "model": "tiny", "dataset": "task:addition", "steps": 4}
    (root / "run.json").write_text(json.dumps({"config": config}))
    for step in (1, 2):
        add_step(root, step)
    return root


def add_step(root: Path, step: int) -> None:
    with (root / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "reward": step / 10}) + "\n")


def test_a_run_that_has_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text(
        json.dumps({"status": "failed", "steps": 2, "wall_s": 61.0, "error": "no memory"})
    )
    assert ycore(["watch", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run}: grpo of tiny on task:addition",
        "step 1/4  reward 0.100",
        "step 2/4  reward 0.200",
        "failed after 2 steps, 1 min 01 s: no memory",
    ]


def test_a_run_whose_launcher_was_killed_says_how_to_go_on(run: Path) -> None:
    stream = io.StringIO()
    watch(run, stream=stream)
    assert stream.getvalue().splitlines()[-1].endswith(f"`ycore resume {run}` goes on")


def test_a_run_that_goes_on_is_followed_to_its_end(run: Path) -> None:
    """Another holds the folder's lock, takes a step, ends: the watcher sees the step and then the end."""
    stream = io.StringIO()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watcher = threading.Thread(target=watch, args=(run,), kwargs={"stream": stream})
        watcher.start()
        deadline = time.monotonic() + 20
        while "step 2/4" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watcher.is_alive()
        add_step(run, 3)
        (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 3}))
    watcher.join(timeout=20)
    assert not watcher.is_alive()
    assert stream.getvalue().splitlines()[-2:] == ["step 3/4  reward 0.300", "finished after 3 steps"]


def test_once_returns_while_the_run_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ycore(["watch", str(run), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["step 2/4  reward 0.200", "the run goes on"]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ycore(["watch", str(tmp_path)]) == 2
    assert "has no run.json" in capsys.readouterr().err
