"""The code reward through the real command: the plan names its sandbox, and what cannot work ends with one line."""

import json
from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.tiny_model import write_tiny_model
from ycore.sandbox import Level, level

GRPO = "grpo --model model --output out --reward code --dry-run "
GOOD, BAD = (
    {"prompt": "Write f.", "tests": ["assert f(1) == 2"]},
    {"prompt": "Write g.", "tests": ["assert g("]},
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_model(tmp_path / "model")
    for name, rows in {
        "good": [GOOD],
        "bad": [GOOD, BAD],
        "none": [{"prompt": "Write f.", "answer": "x"}],
    }.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_levels(monkeypatch: pytest.MonkeyPatch, *holding: Level) -> None:
    monkeypatch.setattr(
        level,
        "level_refusal",
        lambda sandbox_level: None if sandbox_level in holding else "no bwrap is installed",
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "--dataset none.jsonl",
            "needs a column with tests (tests or test_list or test or input_output or "
            "public_test_cases), and the dataset has answer",
        ),
        ("--dataset bad.jsonl", "row 1, counted from 0: a test is no Python"),
        (
            "--dataset good.jsonl --set rewards.0.args={'timeout_s':-1}",
            "timeout_s must be greater than 0",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    place: Path,
    line: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with_levels(monkeypatch, Level.NAMESPACES)
    assert run((GRPO + line).split()) == 2
    error = capsys.readouterr().err.strip()
    assert problem in error and len(error.splitlines()) == 1


def test_programs_without_a_sandbox_are_refused_unless_none_is_said(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_levels(monkeypatch)
    assert run((GRPO + "--dataset good.jsonl").split()) == 2
    assert "reward 'code' needs a sandbox, and there is none here" in capsys.readouterr().err
    assert run((GRPO + "--dataset good.jsonl --set sandbox.level=none --json").split()) == 0
    assert json.loads(capsys.readouterr().out)["sandbox"] == ["none, as was asked for"]
    with_levels(monkeypatch, Level.LANDLOCK)
    assert run((GRPO + "--dataset good.jsonl --json").split()) == 0
    assert "landlock, the weaker level" in json.loads(capsys.readouterr().out)["sandbox"][0]
