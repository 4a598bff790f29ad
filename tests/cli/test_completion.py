"""Real shells complete ycore's words, each Tab without Python and in under 100 ms of processor time."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from ycore_cli.main import run

PRESS = {
    "bash": "source {file}; COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); _ycore 2>/dev/null; "
    "printf '%s\\n' \"${{COMPREPLY[@]}}\"",
    "zsh": "compdef() {{ : }}; _files() {{ : }}; compset() {{ : }}; compadd() {{ shift; print -l -- $@ }}; source {file}; "
    "words=({words}); CURRENT=$#words; _ycore",
    "fish": "source {file}; complete -C {line}",
}
"""Programs of a shell that print what a Tab at the end of a line offers."""
SHELLS = [
    pytest.param(
        shell, marks=pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell} here")
    )
    for shell in PRESS
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ycore").touch(0o755)  # fish completes commands that there are
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("first", "läufe zwei", "$(touch harm)"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def press_tab(shell: str, file: Path, line: str) -> set[str]:
    """Return what a Tab offers at the end of the line, which begins with what stands there of the last word."""
    *before, current = line.split(" ")
    words = " ".join([*map(shlex.quote, before), shlex.quote(current)])
    if shell == "bash":
        words = words.replace("=", " = ")  # bash's own way to split
    program = PRESS[shell].format(
        file=shlex.quote(str(file)), words=words, line=shlex.quote(line)
    )
    process = subprocess.Popen([shell, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    offered = process.stdout.read().splitlines()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert usage.ru_utime + usage.ru_stime < 0.1, "with the shell's own start"
    names = {name.partition("\t")[0] for name in offered}
    return {name for name in names if name.startswith(current)} if shell == "zsh" else names


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_every_kind_of_word(
    shell: str, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert run(["--show-completion"]) == 0
    file = home / "script"
    file.write_text(capfd.readouterr().out)
    assert press_tab(shell, file, "ycore gr") == {"grpo"}
    assert {"grpo", "eval", "docs"} <= press_tab(shell, file, "ycore ")
    assert press_tab(shell, file, "ycore --vers") == {"--version"}
    assert press_tab(shell, file, "ycore grpo --learning") == {"--learning-rate"}
    assert press_tab(shell, file, "ycore grpo --gradient-acc") == {
        "--gradient-accumulation-steps"
    }
    assert press_tab(shell, file, "ycore grpo --engine v") == {"vllm"}
    assert press_tab(shell, file, "ycore grpo --loss-type dr") == {"dr_grpo"}
    assert press_tab(shell, file, "ycore grpo --recipe quick") == {"quickstart"}
    assert press_tab(shell, file, "ycore grpo --reward exa") == {"exact_answer"}
    assert press_tab(shell, file, "ycore eval --benchmark gsm") == {"gsm8k"}
    assert press_tab(shell, file, "ycore docs sand") == {"sandbox"}
    assert press_tab(shell, file, "ycore export --format g") == {"gguf"}
    runs = {"runs/first", "runs/läufe zwei", "runs/$(touch harm)"}
    for command in ("resume", "report", "chat"):
        assert press_tab(shell, file, f"ycore {command} runs/") == runs
    assert press_tab(shell, file, "ycore eval --model runs/fi") == {"runs/first"}
    assert not (home / "harm").exists()
    if shell == "fish":
        (home / "rows.jsonl").touch()
        assert press_tab(shell, file, "ycore grpo --engine=v") == {"--engine=vllm"}
        assert press_tab(shell, file, "ycore grpo --dataset ro") == {"rows.jsonl"}
        assert press_tab(shell, file, "ycore grpo --dataset=ro") == {"--dataset=rows.jsonl"}
    if shell == "bash":
        assert press_tab(shell, file, "ycore grpo --engine=v") == {"vllm"}
        assert press_tab(shell, file, "ycore grpo --engine=") == {
            "auto",
            "vllm",
            "transformers",
        }


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_what_was_installed(
    shell: str, home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    for _ in range(2):
        assert run(["--install-completion"]) == 0
        assert "begin a new shell" in capfd.readouterr().out
    if shell == "fish":
        words = ["fish", "-c", "complete -C 'ycore gr'"]
    else:
        assert (home / f".{shell}rc").read_text().count("source ") == 1
        asks = "complete -p ycore" if shell == "bash" else "print $_comps[ycore]"
        words = [shell, "-ic", asks]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ("grpo" if shell == "fish" else "_ycore") in done.stdout, done.stderr


def test_another_shell_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run(["--install-completion"]) == 2
    error = capfd.readouterr().err
    assert "bash, zsh and fish" in error and "'tcsh'" in error and "SHELL=bash" in error
