"""`ycore chat` from its command line, with a talker of the test's own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run

from tests.models.test_hub import write_adapter
from tests.tiny_model import write_coded_model, write_tiny_model
from ycore.api import trained

EXAMPLE = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "1"}]
CONFIG = {"algorithm": "grpo", "system_prompt": "Add.", "few_shot": EXAMPLE}


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
    for name, config in (("a", CONFIG), ("b", {"algorithm": "sft"})):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text(json.dumps({"config": config}))
    typed = iter(["hi"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed, None) or raise_end())
    monkeypatch.setattr(trained, "Chat", Echo)
    monkeypatch.setattr(trained, "language_model", lambda name, **_: tmp_path)
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
    assert (
        "the folder runs has none; name one, e.g. ycore chat runs/first"
        in capsys.readouterr().err
    )
    (root / "runs").mkdir()
    for seconds, name in enumerate("ba"):
        (root / name).rename(root / "runs" / name)
        os.utime(root / "runs" / name / "run.json", (seconds, seconds))
    assert run(["chat"]) == 0
    said = capsys.readouterr()
    assert said.err == "the newest run: runs/a\n" and "Add.|1|1|hi" in said.out


def write_run(name: str, algorithm: str, *files: str) -> None:
    """Write a run with these files into `runs`, newer than those that are there."""
    folder = Path("runs") / name
    for file in ("run.json", *files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text('{"status": "finished"}\n')
    config = {"algorithm": algorithm, "steps": 4}
    (folder / "run.json").write_text(json.dumps({"config": config}))
    seconds = len(list(Path("runs").iterdir()))
    os.utime(folder / "run.json", (seconds, seconds))


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("chat", "finished"),
        ("chat --best", "stopped"),
        ("serve --dry-run", "finished"),
        ("export --dry-run", "finished"),
        ("report", "finished"),
        ("report --once", "evaluation"),
        ("resume", "stopped"),
        ("resume --steps 8", "reward"),
    ],
)
def test_the_newest_run_is_one_that_the_command_can_use(
    root: Path, words: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of the newer ones have no model that writes, two have no step, and one has nothing to go on with."""
    write_run("stopped", "grpo", "best/x", "logs/trainer.log")
    write_run("finished", "grpo", "model/x", "metrics.jsonl", "summary.json")
    write_run("reward", "reward", "model/x", "summary.json")
    write_run("preflight", "grpo", "logs/preflight.log", "summary.json")
    write_run("evaluation", "eval", "eval.json", "summary.json")
    run(words.split())
    assert capsys.readouterr().err.startswith(f"the newest run: runs/{name}\n")


@pytest.mark.parametrize(
    ("command", "need"),
    [
        ("chat", "with a saved model"),
        ("serve", "with a saved model"),
        ("export", "with a saved model"),
        ("report", "with a step"),
        ("resume", "that is not finished (with --steps, any)"),
    ],
)
def test_where_no_run_can_be_used_the_need_is_said(
    root: Path, command: str, need: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("evaluation", "eval", "summary.json")
    assert run([command]) == 2
    said = capsys.readouterr().err
    assert f"ycore {command} takes the newest run {need}" in said
    assert f"e.g. ycore {command} runs/first" in said


def test_the_command_that_serves_the_best_answers_can_be_copied(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(root / "tiny")
    monkeypatch.setattr(trained, "serve_command", lambda *_, **__: (["a", "server"], None))
    words = ["serve", str(root / "tiny"), "--dry-run"]
    assert run([*words, "--best-of", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "env YCORE_BEST_OF=3 YCORE_BEST_BY=similarity a server --middleware" in said
    assert run([*words, "--best-by", "rewards.py:letters"]) == 2
    assert "of --best-of, which is 1; say --best-of 8" in capsys.readouterr().err


def test_a_temperature_that_is_no_number_is_refused(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["chat", "--temperature", "inf"]) == 2
    assert "must be a finite number; it is inf; leave it" in capsys.readouterr().err
    assert run(["chat", "--temperature", "nan"]) == 2
    assert "must be at least 0; it is 'nan'" in capsys.readouterr().err


def test_a_form_that_is_none_is_refused_in_our_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run(["export", "runs/a", "--format", "ggfu"]) == 2
    error = "error: --format is merged or gguf; it is 'ggfu'; did you mean 'gguf'?\n"
    assert capfd.readouterr() == ("", error)


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


@pytest.mark.parametrize(
    "words",
    [
        "chat {} --prompt hi --max-tokens 4",
        "serve {} --dry-run",
        "export {0} --output whole-{0}",
    ],
)
def test_code_of_a_model_runs_where_it_is_trusted(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The refusal named an option that the command did not have, and adapters could not be merged."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.setenv("YCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = write_coded_model(tmp_path / "coded")
    plain = write_tiny_model(tmp_path / "plain")
    write_adapter(tmp_path / "adapter", of=plain, named=str(model))
    for name in ("coded", "adapter"):
        command = words.format(name).split()
        assert run(command) == 2
        assert "pass --trust-remote-code" in capsys.readouterr().err
        assert run([*command, "--trust-remote-code"]) == 0
    if command[0] == "serve":
        assert "--trust-remote-code" in capsys.readouterr().out
    if command[0] == "export":
        assert (tmp_path / "whole-adapter" / "coded.py").is_file()
