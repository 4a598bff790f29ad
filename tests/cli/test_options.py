"""Bad input through the real command: exit status 2, one `error:` line with the way out, nothing on standard output."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.chaos.command_lines import BAD, command_words, write_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("place") / "here")


@pytest.mark.parametrize(("more", "words"), BAD, ids=[more for more, _ in BAD])
def test_one_line_says_the_rule_the_value_and_the_way_out(
    more: str, words: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = time.process_time()
    status = run(command_words(more, place))
    _assert_one_error_line(status, capfd.readouterr(), words.format(place=place))
    assert time.process_time() - begun < 10
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "grpo",
            "no model and no dataset and no rewards given; say e.g. --model smollm2-135m --dataset",
        ),
        (
            "grpo --model {place}/model --reward exact_answer",
            "no dataset given; say e.g. --dataset",
        ),
        (
            "eval --model {place}/model --dataset {place}/train.jsonl",
            "no rewards given; say e.g. --reward",
        ),
        (
            "eval --model m --dataset d --reward r --num-samples 0",
            "num_samples must be greater than 0",
        ),
        (
            "eval --model m --dataset d --reward r --temprature 1",
            "did you mean '--temperature'?",
        ),
        ("eval --benchmark= --model m", "--benchmark is empty; say --benchmark VALUE"),
        ("grpo --set=", "--set is empty; say --set VALUE"),
        (
            "grpo --recipe quickstart --show-rows -1 --dry-run",
            "--show-rows must be at least 1; it is '-1'",
        ),
        ("recipes quickstart --band nope.json --dry-run", "nope.json"),
        ("grop", "no such command 'grop'; did you mean 'grpo'?"),
        ("recipes --jsn", "no option --jsn; "),
        ("recipes extra", "extra"),
        ("--verison", "no option --verison; "),
        (
            "pipeline nope",
            "no recipe 'nope'; there are gsm8k-small, iterative-dpo, rlhf-pipeline",
        ),
        ("grpo --recipe nope.yaml", "no such recipe file: nope.yaml; `ycore recipes` lists"),
        (
            "grpo --model {place}/model --dataset d --reward judge:nope.yaml",
            "no such judge file: nope.yaml; ycore's own are judge:cheerful, judge:reasoning",
        ),
    ],
)
def test_other_commands(
    line: str, words: str, place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run(line.format(place=place).split())
    _assert_one_error_line(status, capfd.readouterr(), words)


def test_an_error_does_nothing_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(tmp_path / "\x1b[2J")]) == 2
    said = capfd.readouterr().err
    assert r"\x1b[2J has no run.json" in said and "\x1b" not in said


@pytest.mark.parametrize(
    "more", ["--lerning-rate 1e-4", "--model /no/such/model", "--json --group-size 1"]
)
def test_the_installed_command_ends_the_same_way(more: str, place: Path) -> None:
    command = [sys.executable, "-c", "from ycore_cli.main import main; main()"]
    arguments = command_words(more, place)
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    if "--json" in more:
        said = {"error": done.stderr.strip().removeprefix("error: "), "status": 2}
        assert json.loads(done.stdout) == said
    else:
        assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def _assert_one_error_line(status: int, captured: tuple[str, str], words: str) -> None:
    out, err = captured
    assert status == 2, err
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert words in err
    assert "Traceback" not in err
