"""A real bash completes ycore's words, by Typer's script and with the values that ycore knows."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.harness import COMMAND

PRESS = (
    "source {script}; COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _ycore_completion ycore; "
    "printf '%s\\n' \"${{COMPREPLY[@]}}\""
)
"""Prints what a Tab at the end of a line offers."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "ycore"
    command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name in ("first", "$(touch harm)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def in_bash(program: str) -> str:
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_tab_completes_every_kind_of_word(home: Path) -> None:
    script = home / "script"
    script.write_text(in_bash("ycore --show-completion; exit"))  # bash stays its parent

    def press_tab(line: str) -> set[str]:
        words = " ".join(map(shlex.quote, line.split(" ")))
        return set(in_bash(PRESS.format(script=script, words=words)).splitlines()) - {""}

    assert press_tab("ycore gr") == {"grpo"}
    assert in_bash(f"{PRESS.format(script=script, words='ycore gr')} 2>&1") == "grpo\n"
    assert press_tab("ycore --vers") == {"--version"}
    assert press_tab("ycore grpo --learning") == {"--learning-rate"}
    assert press_tab("ycore grpo --recipe quick") == {"quickstart"}
    assert press_tab("ycore grpo --reward exa") == {"exact_answer"}
    assert press_tab("ycore eval --benchmark gsm") == {"gsm8k"}
    assert press_tab("ycore grpo --dataset ro") == set(), "files, which bash lists itself"
    for line in ("ycore resume runs/", "ycore chat runs/", "ycore eval --model runs/"):
        assert press_tab(line) == {"runs/first", "runs/$(touch harm)"}
    assert not (home / "harm").exists()


def test_bash_reads_what_was_installed(home: Path) -> None:
    program = "ycore --install-completion; exec bash -ic 'complete -p ycore'"
    assert "_ycore" in in_bash(program)
