"""`ycore chat` from its command line, with a talker of the test's own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from ycore.api import trained

EXAMPLE = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
CONFIG = {"system_prompt": "Add.", "few_shot": EXAMPLE}


class Echo(trained.Chat):
    """Answers with the contents of all turns."""

    def __init__(self, folder: Path, settings: trained.ChatSettings) -> None:
        self._settings = settings
        self._is_chat = True
        self._turns = list(settings.before)

    def _write(self, prompt: Any, *, seed: int, show: Any) -> str:
        answer = "|".join(turn["content"] for turn in prompt)
        if show is not None:
            show(answer)
        return answer


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the runs `a`, which has a system prompt and examples, and `b`; somebody types `hi` there."""
    for name, config in (("a", CONFIG), ("b", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"config": config}))
    typed = iter(["hi"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed, None) or raise_end())
    monkeypatch.setattr(trained, "Chat", Echo)
    monkeypatch.setattr(trained, "language_model", lambda name, best: tmp_path)
    return tmp_path


def raise_end() -> str:
    raise EOFError


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("a", "Add.|1|1|hi"),
        ("a --system-prompt Mul.", "Mul.|1|1|hi"),
        ("b --system-prompt Mul.", "Mul.|hi"),
        ("b", "hi"),
    ],
)
def test_a_conversation_begins_as_the_run_was_trained(
    root: Path, capsys: pytest.CaptureFixture[str], words: str, answer: str
) -> None:
    assert run(["chat", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{words[0]}; Ctrl-D ends", answer]


def test_the_newest_run_is_taken_where_none_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat"]) == 2
    assert "the folder runs has none; say e.g. runs/first" in capsys.readouterr().err
    (root / "runs").mkdir()
    for seconds, name in enumerate("ba"):
        (root / name).rename(root / "runs" / name)
        os.utime(root / "runs" / name / "run.json", (seconds, seconds))
    assert run(["chat"]) == 0
    said = capsys.readouterr()
    assert said.err == "the newest run: runs/a\n" and "Add.|1|1|hi" in said.out
    stored = json.dumps(
        {"config": {"algorithm": "eval"}}
    )  # which has no report, and does not go on
    (root / "runs" / "a" / "run.json").write_text(stored)
    assert run(["report"]) == run(["resume"]) == 2
    assert capsys.readouterr().err.count("the newest run: runs/a\n") == 2


def test_a_form_that_is_none_is_refused_in_our_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["export", "runs/a", "--format", "ggfu"]) == 2
    error = "error: --format is merged or gguf; it is 'ggfu'; did you mean 'gguf'?\n"
    assert capfd.readouterr() == ("", error)


def test_of_two_models_each_has_its_own_runs_prompt(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", "a", "--against", "b", "--system-prompt", "", "--prompt", "2"]) == 0
    row = capsys.readouterr().out.splitlines()[-2]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["1|1|2", "2"]


@pytest.mark.parametrize(
    ("name", "called"),
    [(".", "b"), ("../b", "b"), ("../latest", "latest"), ("v1.5", "v1.5"), ("me/sums", "sums")],
)
def test_a_model_is_called_by_the_last_part_of_its_name(
    root: Path,
    name: str,
    called: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written: list[tuple[str, str]] = []
    monkeypatch.chdir(root / "b")
    (root / "latest").symlink_to(root / "a")
    monkeypatch.setattr(
        trained,
        "export_model",
        lambda folder, target, form, name: written.append((target.name, name)),
    )
    assert run(["export", name, "--format", "gguf"]) == 0
    assert written == [(f"{called}.gguf", called)]
