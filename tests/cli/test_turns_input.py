"""Tools and environments that cannot work end a command with one line, before anything starts."""

import sys
from pathlib import Path

import pytest
from ycore_cli.main import run

from tests.chaos.command_lines import replaced
from tests.tiny_model import write_tiny_model
from ycore.models.names import ChatTemplate

FILE = '''
def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: One.
        y: The other.
    """
    return x + y

def bare(x):
    return x

class Game:
    def reset(self, **row):
        pass

    def step(self, text: str):
        return None

class Paying(Game):
    def get_reward(self):
        return 1.0

class Endless:
    pass

def length(completions, **columns):
    return [float(len(text)) for text in completions]

def score(environments, **columns):
    return [one.score for one in environments]
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    write_tiny_model(folder / "model")
    (folder / "acts.py").write_text(FILE)
    return folder


LINE = "grpo --model model --dataset task:addition --max-tokens 32 --output run --dry-run "


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--reward exact_answer --tools acts.py:bare --actions calls",
            "tool 'bare' cannot be shown to a model",
        ),
        (
            "--reward exact_answer --tools acts.py:add --tools acts.py:add",
            "two tools are named 'add'",
        ),
        (
            "--reward exact_answer --tools acts.py:add --actions template",
            "shows no tool calls to the model; say --actions calls",
        ),
        (
            "--reward exact_answer --tools mcp:no-such-program --actions calls",
            "no MCP server started: 'no-such-program'",
        ),
        (
            "--env acts.py:Paying --env-python no/python",
            "env_python 'no/python' is no Python; give the path",
        ),
        (
            "--env gym:chain_sm",
            "reasoning-gym has no task 'chain_sm'; did you mean 'chain_sum'",
        ),
        ("--env acts.py:Endless", "must be a class with reset(self, **row)"),
        (
            "--env acts.py:Game",
            "has no get_reward, and gives no reward; name one with --reward",
        ),
        (
            "--env acts.py:Game --reward environment --reward length",
            "'Game' has no get_reward, and gives no reward",
        ),
        (
            "--env acts.py:Paying --env Game=acts.py:Game",
            "names its own in the column 'environment': one of Paying, G",
        ),
        (
            "--env acts.py:Paying --env acts.py:Paying",
            "have one name; give them names: --env NAME=file.py:Class",
        ),
        (
            "--dataset= --env acts.py:Paying",
            "'acts.py:Paying' says nothing at its reset, and there is no dataset",
        ),
        ("--dataset= --reward exact_answer", "--dataset is empty; give a file"),
        (
            "--reward acts.py:score",
            "needs the column 'environments', and the dataset has answer",
        ),
        (
            "--reward environment",
            "is what an environment pays, and the run has none; say --env",
        ),
        (
            "--env acts.py:Paying --reward reference_probability --answer-column answer",
            "reads one turn",
        ),
        ("--reward exact_answer --agent no-such-program", "no program 'no-such-program'"),
        (
            "--reward exact_answer --agent true --tools python",
            "leave out --tools and --env, or --agent",
        ),
        (
            "--agent true --reward reference_probability --answer-column answer",
            "reads one turn",
        ),
        ("--reward exact_answer --max-tool-calling-iterations 3", "say `--max-turns`"),
        (
            "--reward exact_answer --tools python --actions text",
            "turns.actions must be 'auto', 'template' or 'calls'",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    place: Path,
    words: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert run(replaced(LINE.split(), words.split())) == 2
    error = capsys.readouterr().err.strip()
    assert problem in error and len(error.splitlines()) == 1 and not (place / "run").exists()


def test_what_works_is_in_the_plan(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    rewards = "--reward environment --reward acts.py:score "
    line = (
        LINE
        + rewards
        + "--env acts.py:Paying --tools acts.py:add --actions calls --max-turns 3"
    )
    assert run(line.split()) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "at most 3, with acts.py:add, acts.py:Paying, called in the text" in output
        and "environment (weight 1)" in output
    )


def test_the_plan_names_what_a_recipe_opens(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe from elsewhere says what it reads and reaches before it runs."""
    monkeypatch.chdir(place)
    (place / "opens.yaml").write_text(
        f"""
algorithm: grpo
model: model
dataset: task:addition
output: opened
env: acts.py:Paying
env_python: {sys.executable}
turns: {{sandbox: {{network: true, read: [notes]}}}}
rewards:
  - {{reward: "acts.py:length", sandbox: {{read: [words.txt]}}}}
engine: {{environment: [AWS_SECRET_ACCESS_KEY, "SLURM_*"]}}
"""
    )
    assert run(["grpo", "--recipe", "opens.yaml", "--actions", "calls", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "acts.py:length: reads words.txt",
        "tools, environment or agent: network, reads notes",
        f"env_python: runs and reads {sys.executable}",
        "engines get the variables AWS_SECRET_ACCESS_KEY, SLURM_*",
    ):
        assert words in said, words


def test_where_the_template_shows_no_tools_calls_are_text_and_the_plan_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    assert run((LINE + "--reward exact_answer --tools acts.py:add").split()) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "with acts.py:add, called in the text (the chat template shows no tools)" in output


def test_a_template_is_checked_with_the_arguments_of_the_run(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    write_tiny_model(place / "strict")
    template = place / "strict" / "chat_template.jinja"
    needs = "{% if mode is not defined %}{{ raise_exception('say the mode') }}{% endif %}"
    template.write_text(needs + ChatTemplate(place / "strict").source)
    line = LINE.replace("--model model", "--model strict").split()
    line += ["--reward", "exact_answer", "--tools", "acts.py:add"]
    for actions in ("auto", "calls"):
        words = [*line, "--actions", actions, "--chat-template-kwargs", '{"mode": "short"}']
        assert run(words) == 0
