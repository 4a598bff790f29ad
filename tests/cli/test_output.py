"""One JSON object on standard output; text that a model wrote is printed as data; how a command ends."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ycore_cli.main import run
from ycore_cli.output import (
    evaluation_rows,
    print_closing,
    print_json,
    print_table,
    stdout_for_json,
)

from ycore.api.tables import figure_rows
from ycore.config.schema import RewardConfig, RunConfig
from ycore.run.files import RunFolder, write_json_atomic

_MAIN = (
    "import ycore_cli.main as m, ycore.config.recipe_files as r, ycore.errors as e; "
    "r.list_recipes = lambda: {body}; m.main()"
)


def test_what_others_write_goes_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_for_json(True):
        print("said by this process")
        subprocess.run([sys.executable, "-c", "print('said by a child')"], check=True)
    print_json({"reward": float("nan"), "steps": [1, float("inf")], "name": "é"})
    out, err = capfd.readouterr()
    assert json.loads(out) == {"reward": None, "steps": [1, None], "name": "é"}
    assert out.count("\n") == 1
    assert "said by this process" in err and "said by a child" in err


def test_without_json_nothing_moves(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_for_json(False):
        print("here")
    assert capfd.readouterr().out == "here\n"


def test_what_evaluations_found_is_told_by_its_figures(tmp_path: Path) -> None:
    before = {
        "step": 0,
        "n": 9,
        "loss": 2.0,
        "accuracy": 0.25,
        "accuracy/low": 0.1,
        "accuracy/high": 0.4,
    }
    after = before | {
        "step": 8,
        "loss": 1.0,
        "accuracy": 0.75,
        "accuracy/low": 0.5,
        "accuracy/high": 0.875,
    }
    summary = {
        "held_out": {"before": before, "after": after},
        "best": after,
        "ended_early": "no gain",
    }
    rows = evaluation_rows(RunFolder(tmp_path), summary, ("loss", "accuracy", "margin"))
    assert rows == [
        ("ended early", "no gain"),
        ("held out", "loss 2.000 -> 1.000"),
        ("", "accuracy 0.250 -> 0.750, 95 % interval 0.500 to 0.875"),
        ("best model", f"{tmp_path / 'best'}, of step 8"),
    ]
    assert evaluation_rows(RunFolder(tmp_path), summary)[1] == ("held out", rows[2][1])
    assert evaluation_rows(RunFolder(tmp_path), {}) == []


def test_equal_figures_are_shown_once(tmp_path: Path) -> None:
    before = {"reward": 0.25, "pass@1": 0.25, "pass@1/low": 0.1, "pass@1/high": 0.4}
    after = {name: value + 0.5 for name, value in before.items()}
    after |= {"reward/low": 0.6, "reward/high": 0.9}
    rows = evaluation_rows(
        RunFolder(tmp_path), {"held_out": {"before": before, "after": after}}
    )
    assert rows == [("held out", "reward 0.250 -> 0.750, 95 % interval 0.600 to 0.900")]


@pytest.mark.parametrize(
    ("more", "is_measured"),
    [
        ({}, True),
        ({"trust_remote_code": True}, True),
        ({"tools": ["tools.py:add"]}, False),
        ({"eval_rewards": [RewardConfig(reward="exact_answer", weight=0.5)]}, False),
        ({"eval_rewards": [RewardConfig(reward="math", strip_thinking=True)]}, False),
        ({"trl": {"temperature": 0.7}}, False),
        ({"trl": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
    ],
)
def test_the_end_says_what_to_try_next_in_words_to_paste(
    more: dict[str, Any],
    is_measured: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "läufe" / "eins zwei"
    settings = {
        "model": "m",
        "dataset": "train.jsonl",
        "eval_dataset": "held out.jsonl",
        "eval_limit": 7,
        "rewards": [RewardConfig(reward="exact_answer")],
        "eval_rewards": [RewardConfig(reward="contains_answer")],
        "system_prompt": "Add.",
        "prompt_column": "asked",
        "answer_column": "gold",
        "output": str(folder),
    }
    config = RunConfig.model_validate(settings | more)
    print_closing(config)
    commands = [
        shlex.split(line.removeprefix("try next"))
        for line in capsys.readouterr().out.splitlines()
        if "ycore " in line
    ]
    trusted = ["--trust-remote-code"] if "trust_remote_code" in more else []
    assert commands[0] == ["ycore", "chat", *trusted, str(folder)]
    measures = commands[1][:2] == ["ycore", "eval"]
    assert measures is is_measured and len(commands) == 3
    if measures:
        words = " ".join(commands[1])
        for part in (
            "--dataset held out.jsonl",
            "--reward contains_answer",
            "--system-prompt Add.",
            "--prompt-column asked",
            "--answer-column gold",
            "--limit 7",
            "--model m",
            *trusted,
        ):
            assert part in words
        assert str(folder / "model") in commands[1] and "train.jsonl" not in words


def test_recipes_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--json"]) == 0
    assert "quickstart" in [
        entry["name"] for entry in json.loads(capfd.readouterr().out)["recipes"]
    ]


def test_numbers_as_people_read_them() -> None:
    summary = {"pass@1": 0.41666, "rows": 60, "kl": 1e-5, "model": "x", "samples": []}
    rows = [["pass@1", "0.4167"], ["rows", "60"], ["kl", "1e-05"], ["model", "x"]]
    assert figure_rows(summary) == rows


def closing(
    folder: Path,
    completion: str,
    prompt: object = "1 + 1 =",
    rewards: Sequence[RewardConfig] = (),
) -> None:
    """The closing page of a run whose samples hold this completion."""
    sample = {"prompt": prompt, "completion": completion}
    write_json_atomic(RunFolder(folder).samples, {"before": [sample], "after": [sample]})
    rewards = [*rewards] or [RewardConfig(reward="exact_answer")]
    config = RunConfig(model="m", dataset="task:addition", rewards=rewards, output=str(folder))
    print_closing(config)


@pytest.mark.parametrize(
    ("completion", "printed"),
    [
        ("[/INST] \x1b[31m", r"[/INST] \x1b[31m"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
        ("[link=file:///etc]x", "[link=file:///etc]x"),
        ("a\rb\x07c", r"a\rb\x07c"),
        ("ends in \\", "ends in \\"),
    ],
)
def test_a_completion_is_data(
    completion: str,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    closing(tmp_path, completion)
    out = capsys.readouterr().out
    assert out.count(printed) == 2, "before and after"
    assert not {"\x1b", "\r", "\x07"} & set(out)


def test_a_chats_last_turn_is_its_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    closing(
        tmp_path,
        "2",
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "[b]1 + 1 ="}],
    )
    out = capsys.readouterr().out
    assert "[b]1 + 1 =" in out and "Add." not in out
    assert f"ycore chat {tmp_path}" in out


def test_a_table_is_data_too(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([("dataset", "columns \x1b[2J[bold]\n2 rows"), ("\x07", "")])
    assert capsys.readouterr().out == "dataset  columns \\x1b[2J[bold]\\n2 rows\n\\x07\n"


@pytest.mark.parametrize(
    ("raised", "status", "last_line"),
    [
        ("e.RunError('the engine died;\\n see logs')", 1, "error: the engine died; see logs"),
        ("e.Interrupted('stopped after step 3')", 130, "interrupted: stopped after step 3"),
        ("KeyboardInterrupt()", 130, "interrupted"),
        ("ZeroDivisionError('a bug')", 1, "ZeroDivisionError: a bug"),
    ],
)
def test_how_a_command_ends(raised: str, status: int, last_line: str) -> None:
    code = _MAIN.format(body=f"(_ for _ in ()).throw({raised})")
    done = subprocess.run(
        [sys.executable, "-c", code, "recipes"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (status, last_line)
    assert ("Traceback" in done.stderr) == ("bug" in raised)
    assert done.stdout == ""


@pytest.mark.parametrize(("status", "ignored"), [(130, "True"), (1, "True"), (0, "False")])
def test_a_ctrl_c_does_not_hide_that_another_was_heard_or_that_the_run_failed(
    status: int, ignored: str
) -> None:
    """It came while Python was shutting down, where it kills the process: the shell sees a signal, not the status."""
    code = f"""
import atexit, signal
from ycore_cli import main
main.run = lambda words, pulse: {status}
atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))
main.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (status, ignored)
