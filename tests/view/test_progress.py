"""The terminal shows a run while it goes on, and one that is watched: going on, ended, or its launcher gone."""

import fcntl
import io
import json
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run as ycore

from ycore.errors import RunFolderError
from ycore.run.metrics import MetricsWriter
from ycore.run.work import Work
from ycore.view.activity import Activity, Scene
from ycore.view.progress import (
    LiveProgress,
    PlainProgress,
    follow_run,
    open_progress,
    step_lines,
)

ROW = {
    "step": 3,
    "reward": 0.4167,
    "completions/mean_length": 12.4,
    "frac_reward_zero_std": 0.25,
    "ycore/time/sync": 0.5,
    "ycore/time/round": 2.0,
    "ycore/time/train": 7.5,
    "ycore/time/step": 10.0,
    "ycore/tokens_per_s": 431.7,
    "ycore/logprob_gap": 0.0004,
}


def test_a_pipe_gets_one_plain_line_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    progress = open_progress(10)
    progress.say("engine ready after 19 s")
    progress.step(ROW)
    progress.step({"train_loss": 0.0})
    progress.step({"step": 10, "reward": None})
    progress.close()
    assert stream.getvalue().splitlines() == [
        "engine ready after 19 s",
        "step 3/10  reward 0.417  time/step 10.0  tokens_per_s 432  1 min 10 s left",
        "step 10/10",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    progress = open_progress(10)
    assert isinstance(progress, LiveProgress)
    progress.say("starting [2] engines")
    progress.step(ROW)
    progress.close()
    output = stream.getvalue()
    assert "starting [2] engines" in output
    assert "step 3/10" in output
    assert "0.417" in output and "zero-variance 25%" in output
    assert "1 min 10 s left" in output


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_others_wrote_is_data_in_a_pipe_and_in_a_terminal(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stream = kind()
    monkeypatch.setattr("sys.stdout", stream)
    progress = open_progress(10)
    progress.say("the trainer failed: ValueError: '[/INST] \x1b]0;title\x07 :smile:'")
    progress.step(
        ROW
        | {"ycore/reward_problems": {"raised ValueError: no number in '[/INST] 7'\x1b[2J": 2}}
    )
    progress.close()
    assert r"ValueError: '[/INST] \x1b]0;title\x07 :smile:'" in stream.getvalue()
    assert r"2 x raised ValueError: no number in '[/INST] 7'\x1b[2J" in stream.getvalue()


LOSSES: list[dict[str, Any]] = [
    {"step": step, "loss": 1.0 / step, "accuracy": 0.5, "margin": 0.1, "learning_rate": 1e-4}
    for step in range(1, 7)
]


def test_the_plain_line_tells_the_loss_where_there_is_no_reward() -> None:
    assert step_lines("step 2", LOSSES[1]) == [
        "step 2  loss 0.5000  accuracy 50%  margin 0.100  learning_rate 1.0e-04"
    ]
    row = {"step": 1, "loss": 0.5, "mean_token_accuracy": 0.25}
    assert step_lines("step 1", row) == ["step 1  loss 0.5000  mean_token_accuracy 25%"]
    row = {"step": 1, "loss": 0.5, "reward": 0.25}
    assert step_lines("step 1", row) == ["step 1  reward 0.250"]


FULL_ROW = ROW | {
    "kl": 0.0123,
    "ycore/sampling/yield": 0.5,
    "ycore/eval/reward": 0.5,
    "ycore/eval/reward/low": 0.25,
    "ycore/eval/reward/high": 0.75,
    "ycore/eval/pass@1": 0.5,
}


def test_a_plain_line_fits_80_columns_and_greps() -> None:
    """The most useful figures come first, each whole and by its name in metrics.jsonl."""
    lines = step_lines("step 300/1000", FULL_ROW, "12 h 05 min left")
    assert lines[0].startswith("step 300/1000  reward 0.417  kl 0.0123  time/step 10.0")
    assert lines[0].endswith("  12 h 05 min left")
    assert lines[1] == "step 300/1000  eval/reward 0.500 (0.250 to 0.750)  eval/pass@1 0.500"
    assert all(len(line) <= 80 for line in lines)
    for line in lines:
        for part in line.removesuffix("  12 h 05 min left").split("  ")[1:]:
            assert any(name.endswith(part.split()[0]) for name in FULL_ROW), part


def test_a_problem_of_a_reward_has_a_line_of_its_own() -> None:
    lines = step_lines("step 3", ROW | {"ycore/reward_problems": {"raised KeyError: 'a'": 2}})
    assert lines[1:] == ["step 3  masked 2 x raised KeyError: 'a'"]


def test_where_nothing_is_printed_a_line_says_what_goes_on() -> None:
    """The line names the start of engines, the step, or the evaluation; there is none once the run is over."""
    stream = io.StringIO()
    scene = Scene(
        Activity(), 1030.0, False, None, None, starting="starting for 9 s: engine-0 compiling"
    )
    progress = PlainProgress(4, "step", stream, lambda: scene)
    try:
        assert progress.now() == "starting for 9 s: engine-0 compiling"
        scene = Scene(Activity(), 1030.0, False, 1000.0, 990.0)
        assert progress.now().endswith("30 s into the step")
        progress.step(ROW | {"step": 2})
        assert progress.now().startswith("after step 2/4, ")
        work = Work("evaluating", total=8, unit="prompts", done=2, began=1020.0)
        scene = scene._replace(work=work)
        assert progress.now() == "evaluating for 10 s, 2 of 8 prompts, 0.2/s, 30 s left"
        scene = scene._replace(is_over=True)
        assert progress.now() == ""
    finally:
        progress.close()


def test_a_terminal_shows_what_starts_and_then_the_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    starting = Scene(
        Activity(), 1030.0, False, None, None, starting="starting for 9 s: engine-0 \x1b[2J"
    )
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    open_progress(4, look=lambda: starting).close()
    assert r"starting for 9 s: engine-0 \x1b[2J" in stream.getvalue()
    assert "step 0/4" not in stream.getvalue()
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    progress = open_progress(4, look=lambda: starting)
    progress.step(ROW)
    progress.close()
    assert "step 3/4" in stream.getvalue()


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
    with closing(MetricsWriter(root / "metrics.jsonl")) as writer:
        writer.write({"step": step, "reward": step / 10})


def test_a_run_that_has_ended(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "summary.json").write_text(
        json.dumps({"status": "failed", "steps": 2, "wall_s": 61.0, "error": "no memory"})
    )
    assert ycore(["report", str(run), "--live"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{run}: grpo of tiny on task:addition",
        "step 1/4  reward 0.100",
        "step 2/4  reward 0.200",
        "failed after 2 steps, 1 min 01 s: no memory",
    ]


def test_a_run_that_ended_after_one_step_says_so_in_words(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 1}))
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    follow_run(run)
    assert stream.getvalue().splitlines()[-1] == "interrupted after 1 step"


def test_a_run_whose_launcher_was_killed_says_how_to_go_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    follow_run(run)
    assert stream.getvalue().splitlines()[-1].endswith(f"`ycore resume {run}` goes on")


@pytest.mark.parametrize("summary", [None, {"status": "finished", "wall_s": 14.0}])
def test_an_evaluation_is_started_again_and_has_no_steps(
    summary: dict[str, Any] | None, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = json.loads((run / "run.json").read_text())
    described["config"]["algorithm"] = "eval"
    (run / "run.json").write_text(json.dumps(described))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    follow_run(run)
    ending = stream.getvalue().splitlines()[-1]
    assert "resume" not in ending and "step" not in ending


def test_a_run_that_goes_on_is_followed_to_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another holds the folder's lock, takes a step, ends: the watcher sees the step and then the end."""
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watcher = threading.Thread(target=follow_run, args=(run,))
        watcher.start()
        deadline = time.monotonic() + 120
        while "step 2/4" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watcher.is_alive()
        add_step(run, 3)
        (run / "summary.json").write_text(json.dumps({"status": "finished", "steps": 3}))
    watcher.join(timeout=60)
    assert not watcher.is_alive()
    assert stream.getvalue().splitlines()[-2:] == [
        "step 3/4  reward 0.300",
        "finished after 3 steps",
    ]


def test_once_returns_while_the_run_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ycore(["report", str(run), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "step 2/4  reward 0.200",
        "the run goes on",
    ]


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ycore(["report", str(tmp_path), "--live"]) == 2
    assert "has no run.json" in capsys.readouterr().err


def test_a_damaged_row_is_named_while_watching(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().replace(b'{"step": 1', b"\0" * 10))
    stream = io.StringIO()
    monkeypatch.setattr("sys.stdout", stream)
    follow_run(run)
    assert (
        f"line 1 of {metrics} is damaged" in stream.getvalue()
        and "step 2/4" in stream.getvalue()
    )


@pytest.mark.parametrize(
    "description",
    [
        "null",
        '{"config": NaN}',
        '{"config": {"steps": [[]]}}',
        '{"config": {"model": {}}}',
        '{"config": {"env": 5}}',
    ],
)
def test_a_run_that_ycore_did_not_write_is_refused_in_a_line(
    description: str, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(description)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        follow_run(tmp_path, once=True)
