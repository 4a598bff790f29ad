"""The visible options are few and frozen here; help imports nothing that a command needs only when it runs."""

import subprocess
import sys
import time

import pytest
import typer
from ycore_cli.main import app, run

from ycore import __version__

VISIBLE = {
    "grpo": [
        "--model", "--dataset", "--reward", "--prompt-column", "--answer-column", "--system-prompt",
        "--trust-remote-code", "--prompts-per-step", "--group-size", "--max-tokens", "--steps", "--lora",
        "--preset", "--advantage", "--divergence", "--engine",
        "--dynamic-sampling", "--placement", "--processes", "--accelerate", "--merge", "--seed", "--set", "--recipe",
        "--output",
        "--preflight", "--dry-run", "--resume", "--resume-from", "--accept-changes", "--keep-journal", "--replay",
        "--json",
    ],
    "resume": ["run", "--resume-from", "--accept-changes", "--steps", "--set", "--dry-run", "--json"],
    "eval": [
        "--model", "--dataset", "--reward", "--split", "--prompt-column", "--answer-column", "--system-prompt",
        "--trust-remote-code", "--num-samples", "--limit", "--max-tokens", "--engine", "--seed", "--set", "--recipe",
        "--output", "--dry-run", "--json",
    ],
    "pipeline": ["--model", "--set", "--output", "--resume", "--dry-run", "--json"],
    "recipes": ["--json"],
    "env": ["--json"],
    "plan": [
        "--model", "--devices", "--judge", "--prompts-per-step", "--group-size", "--max-tokens", "--prompt-tokens",
        "--completion-tokens", "--lora", "--accelerate", "--dynamic-sampling", "--set", "--recipe", "--top", "--json",
    ],
    "preflight": [
        "--model", "--dataset", "--reward", "--prompt-column", "--answer-column", "--system-prompt",
        "--trust-remote-code", "--group-size", "--max-tokens", "--lora", "--preset", "--engine", "--seed", "--set",
        "--recipe", "--output", "--dry-run", "--json",
    ],
    "doctor": ["--engines", "--json"],
    "simulate": [
        "name", "--model", "--slots", "--trace", "--judge-work", "--mean-tokens", "--swap-s", "--step-time", "--rounds",
        "--picture", "--prompts-per-step", "--group-size", "--max-tokens", "--dynamic-sampling", "--seed", "--set",
        "--json",
    ],
}  # fmt: skip


def test_the_visible_options_are_these() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    seen = {name: [option.opts[0] for option in command.params] for name, command in group.commands.items()}
    assert seen == VISIBLE


@pytest.mark.parametrize("command", [[], ["grpo"], ["resume"], ["eval"], ["pipeline"], ["recipes"], ["env"]])
def test_help_teaches(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    out, err = capfd.readouterr()
    assert run([*command, "-h"]) == 0
    assert capfd.readouterr().out == out
    assert err == ""
    assert out.count("  ycore ") >= 2, "two full examples"
    if command in (["grpo"], ["eval"]):
        assert "docs/options.md" in out


def test_version_and_bare_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"ycore {__version__}\n"
    assert run([]) == 0
    assert "Usage: ycore" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "grpo --help", "--version"])
def test_help_imports_none_of_the_stack(arguments: str) -> None:
    code = (
        "import sys; from ycore_cli.main import run; run(sys.argv[1:]); "
        "heavy = ('torch', 'trl', 'vllm', 'transformers', 'datasets', 'numpy', 'yaml', 'ycore.config'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_is_there_in_half_a_second() -> None:
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()", "--help"]
    assert min(_seconds(command) for _ in range(3)) < 0.5


def _seconds(command: list[str]) -> float:
    begun = time.monotonic()
    subprocess.run(command, capture_output=True, timeout=10, check=True)
    return time.monotonic() - begun
