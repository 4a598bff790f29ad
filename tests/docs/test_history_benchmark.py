"""The table of `docs/benchmarks/history.py`, a commit checked out beside the environment, and a short run of the script."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CLONE = Path(__file__).resolve().parents[2]
BENCHMARKS = CLONE / "docs" / "benchmarks"


@pytest.fixture(scope="module")
def history(load_script: Callable[[str], Any]) -> Any:
    return load_script("history")


@pytest.fixture
def needs_git() -> None:
    if not (CLONE / ".git").exists():
        pytest.skip("commits are checked out of a clone, and this is none")


def test_a_line_holds_the_medians_of_a_commits_runs(history: Any) -> None:
    runs = [history.Figures(10.0 + i, 30.0, 5.0, 0.5, 2.0, 2.5) for i in (0, 7, 1)]
    header, line = history.as_table({"abc 2026-01-02": runs}).splitlines()
    assert header.split() == ["commit", "first_step", "whole", "step", "sync", "round", "train"]
    assert line.split() == [
        "abc",
        "2026-01-02",
        "11.00",
        "30.00",
        "5.00",
        "0.50",
        "2.00",
        "2.50",
    ]


def test_the_first_step_is_seen_when_its_line_is_whole(history: Any, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step"')
    with history.FirstStep(metrics) as first:
        time.sleep(0.2)
    assert first.seconds is None
    metrics.write_text('{"step": 1}\n')
    deadline = time.monotonic() + 60
    with history.FirstStep(metrics) as first:
        while first.seconds is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert first.seconds is not None and first.seconds >= 0


@pytest.mark.usefixtures("needs_git")
def test_a_commit_imports_its_own_files_and_leaves_no_worktree(
    history: Any, tmp_path: Path
) -> None:
    command = "import ycore, ycore_cli, typer; print(ycore.__file__, ycore_cli.__file__)"
    with history.checked_out("HEAD", tmp_path / "commit") as python:
        done = subprocess.run(
            [str(python), "-P", "-c", command],
            env={**os.environ, **history.ENVIRONMENT},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        files = [Path(word).resolve() for word in done.stdout.split()]
        tree = tmp_path / "commit" / "tree"
        assert files == [tree / "ycore" / "__init__.py", tree / "cli" / "__init__.py"]
    assert str(tmp_path) not in history._git("worktree", "list")


@pytest.mark.parametrize(
    ("words", "rule"),
    [(["--steps", "1"], "--steps"), (["--commits", "no-such-commit"], "no-such-commit")],
)
@pytest.mark.usefixtures("needs_git")
def test_what_cannot_be_measured_is_one_line(
    history: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    rule: str,
) -> None:
    status = history.main([*words, "--output", str(tmp_path / "out")])
    assert status == (2 if rule == "--steps" else 1)
    assert rule in capsys.readouterr().err


@pytest.mark.verify
@pytest.mark.usefixtures("needs_git")
def test_the_script_runs_short(tmp_path: Path) -> None:
    words = ["--commits", "HEAD", "--steps", "2", "--output", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "history.py"), *words],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ((_, (run,)),) = json.loads((tmp_path / "out" / "history.json").read_text())[
        "commits"
    ].items()
    assert 0 < run["step"] < run["first_step"] < run["whole"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["history.json"]
