"""The visible options are few and frozen here; help imports nothing that a command needs only when it runs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
import yaml
from ycore_cli.main import app, run
from ycore_cli.options import TRL_FIELDS
from ycore_cli.panels import PANELS

from ycore import __version__
from ycore.config.algorithms import ALGORITHMS
from ycore.config.trl_arguments import aliases
from ycore.config.trl_fields import fields_of

COMMANDS = [
    "grpo", "ppo", "distill", "online-dpo", "sft", "reward", "dpo", "kto", "flow", "resume", "eval", "plan",
    "preflight", "pipeline", "recipes", "doctor", "report", "chat", "serve",
    "export", "docs",
]  # fmt: skip
VISIBLE = {
    "grpo": [
        "--model", "--dataset", "--reward", "--prompt-column", "--answer-column", "--system-prompt",
        "--trust-remote-code", "--prompts-per-step", "--group-size", "--max-tokens", "--steps", "--lora",
        "--preset", "--advantage", "--keep", "--loss", "--constraint", "--deterministic", "--divergence", "--engine",
        "--sandbox",
        "--dynamic-sampling", "--curriculum", "--max-staleness", "--oversample", "--placement", "--processes",
        "--accelerate", "--hosts", "--min-hosts", "--restarts", "--merge", "--seed", "--set", "--recipe",
        "--output", "--eval-dataset", "--eval-split", "--eval-every", "--eval-reward", "--keep-best", "--stop-when",
        "--quantize", "--trust-region", "--tools", "--env", "--env-python", "--agent", "--actions", "--max-turns",
        "--dry-run", "--resume", "--resume-from", "--accept-changes", "--keep-journal", "--replay",
        "--json", "--show-rows", "--learning-rate", "--beta", "--temperature", "--top-p", "--top-k", "--num-iterations",
        "--epsilon", "--loss-type", "--scale-rewards", "--lr-scheduler-type", "--warmup-steps", "--weight-decay",
        "--report-to", "--log-every",
    ],
    "resume": ["run", "--resume-from", "--accept-changes", "--steps", "--processes", "--hosts", "--min-hosts", "--set",
        "--dry-run", "--json"],
    "eval": [
        "--model", "--dataset", "--reward", "--split", "--prompt-column", "--answer-column", "--system-prompt",
        "--trust-remote-code", "--num-samples", "--limit", "--max-tokens", "--engine", "--sandbox", "--seed", "--set",
        "--recipe", "--tools", "--env", "--env-python", "--agent", "--actions", "--max-turns", "--output", "--dry-run",
        "--benchmark", "--pairs", "--constraint", "--json", "--temperature", "--top-p",
    ],
}  # fmt: skip
"""Options of the commands that people meet first; those of the others are held to the docs (tests/docs)."""


def group() -> typer.core.TyperGroup:
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    return command


def test_the_commands_are_these() -> None:
    hidden = {name for name, command in group().commands.items() if command.hidden}
    assert hidden == {name for name, row in ALGORITHMS.items() if row.experimental} != set()
    assert [name for name in group().commands if name not in hidden] == COMMANDS
    for name in hidden:
        assert f" {name}" in str(group().help), "the help names it in a line"


@pytest.mark.parametrize("name", VISIBLE)
def test_the_visible_options_are_these(name: str) -> None:
    seen = [option.opts[0] for option in group().commands[name].params]
    assert sorted(seen) == sorted(VISIBLE[name])


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_teaches(
    command: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command, "--help"]) == 0
    out, err = capfd.readouterr()
    assert max(map(len, out.splitlines())) <= 80
    assert run([*command, "-h"]) == 0
    assert capfd.readouterr().out == out
    assert err == ""
    assert out.count("  ycore ") >= 2, "two full examples"
    if command in (["grpo"], ["eval"]):
        assert "docs/options.md" in " ".join(out.split())


def test_no_line_of_the_command_list_is_cut_off(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capfd.readouterr().out.partition("Commands:")[2]
    assert all(name in listed for name in COMMANDS) and "..." not in listed


def test_pages_are_listed_and_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["docs"]) == 0
    listed = capfd.readouterr().out
    assert re.search(r"^  sandbox +Sandbox$", listed, re.M)
    assert re.search(r"^  skill +ycore in one page$", listed, re.M)
    assert run(["docs", "skill"]) == 0
    _, front, page = capfd.readouterr().out.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"name", "description"} and page.startswith(
        "\n# ycore in one page\n"
    )
    assert run(["docs", "zzz"]) == 2
    assert "no page has 'zzz'; `ycore docs` lists" in capfd.readouterr().err


TRAINS = [name for name in COMMANDS if name in ALGORITHMS or name in ("flow", "eval")]


@pytest.mark.parametrize("name", TRAINS)
def test_options_are_in_panels(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    usual = capfd.readouterr().out
    assert f"`ycore {name} --help-all`" in usual and "Options:" not in usual
    assert len(usual.splitlines()) <= 70
    assert run([name, "--help-all"]) == 0
    every = capfd.readouterr().out
    assert run([name, "--help"]) == 0
    assert capfd.readouterr().out == usual
    places = [every.index(f"\n{panel}:\n") for panel in PANELS if f"\n{panel}:\n" in every]
    assert len(places) >= 5 and places == sorted(places)
    for option in group().commands[name].params:
        assert f"\n  {option.opts[0]} " in every, "it is in no panel"


@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_help_says_the_defaults_and_trls_names(name: str) -> None:
    """`[8; TRL: num_generations]` at the end of an option's help is its key's default, and TRL's name of the key."""
    entry = ALGORITHMS[name]
    keys = {key: trl for trl, key in aliases(entry).items()}
    num_defaults = 0
    for option in group().commands[name].params:
        noted = re.search(r"\[([^\]]*?)(?:(?:; )?TRL: (\w+))?\]", option.help)
        default, trl = noted.groups() if noted else ("", None)
        assert trl == keys.get(option.name), option.name
        key = entry.config.model_fields.get(option.name)
        if default and key and isinstance(key.default, int | float | str):
            assert default.startswith(f"{key.default}"), option.name
            num_defaults += 1
    assert num_defaults >= 3


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_usual_fields_of_trl_say_ycores_default(name: str) -> None:
    """The default in a command's help is TRL's, unless the algorithm's row has another."""
    entry = ALGORITHMS[name]
    helps = {option.name: option.help for option in group().commands[name].params}
    fields = fields_of(entry.trl_config)
    typed = [field for field in TRL_FIELDS if field in fields]
    assert len(typed) >= 6 and set(typed) <= helps.keys()
    for field in set(typed) - {"learning_rate"}:
        default = entry.settings.get("trl", {}).get(field, fields[field].default)
        assert f"[{default}]" in helps[field]
    assert f"{entry.lora_learning_rate:g}" in helps["learning_rate"]


def test_an_error_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def pulse() -> Iterator[None]:
        try:
            yield
        finally:
            print("the pulse has ended", file=sys.stderr)

    assert run(["report", "no-such-run"], pulse=pulse()) == 2
    ended, error = capsys.readouterr().err.splitlines()
    assert ended == "the pulse has ended" and error.startswith("error: ") and ";" in error


def test_version_and_bare_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == f"ycore {__version__}\n"
    assert run([]) == 0
    assert "Usage: ycore" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "grpo --help", "--version"])
def test_help_imports_none_of_the_stack(arguments: str) -> None:
    code = (
        "import sys; from ycore_cli.main import run; run(sys.argv[1:]); "
        "heavy = ('torch', 'trl', 'vllm', 'transformers', 'datasets', 'numpy', 'yaml'); "
        "heavy += ('ycore.config.schema', 'ycore.config.resolve'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "module", ["typer", "typer.core", "ycore.config.algorithms", "ycore.config.schema"]
)
def test_ctrl_c_while_the_command_is_imported_is_one_line(module: str, tmp_path: Path) -> None:
    """A Ctrl-C comes at the import of the first module, of two in between, and of one that it needs when it runs."""
    begun = tmp_path / "begun"
    code = (
        _STOPS_IN.format(module=module, begun=str(begun))
        + "from ycore_cli import start; start()"
    )
    words = [sys.executable, "-c", code, "grpo", "--recipe", "quickstart", "--dry-run"]
    process = subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not begun.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130 and begun.exists()


_STOPS_IN = """
import pathlib, sys, time

class Slow:
    def find_spec(self, name, *others):
        if name == {module!r}:
            pathlib.Path({begun!r}).touch()
            try:
                time.sleep(10)
            except KeyboardInterrupt:
                raise ImportError("broken by an interrupt") from None

sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("gpro", "no such command 'gpro'; did you mean 'grpo'?"),
        ("zzz", "no such command 'zzz'; see `ycore --help`"),
        ("watch", "no such command 'watch'; see `ycore report --live`"),
        ("status", "no such command 'status'; see `ycore report --live`"),
        ("docs --jsn", "no option --jsn; see `ycore docs --help`"),
        ("chat --promt x", "no option --promt; did you mean '--prompt'?"),
        ("--verson", "no option --verson; did you mean '--version'?"),
    ],
)
def test_a_mistyped_word_is_one_sentence(
    words: str, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(words.split()) == 2
    assert capfd.readouterr().err == f"error: {answer}\n"


@pytest.mark.parametrize("words", ["--help", "grpo --help"])
def test_help_takes_half_a_second_of_a_processor(words: str) -> None:
    command = [*START, *words.split()]
    assert min(_seconds(command) for _ in range(3)) < 0.5


START = [sys.executable, "-c", "from ycore_cli.main import main; main()"]


def _seconds(command: list[str]) -> float:
    """Return the processor time of a command, which does not depend on what else runs here."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


def test_a_reader_who_leaves_costs_nothing() -> None:
    words = [sys.executable, "-c", "from ycore_cli import start; start()", "grpo", "--help"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


def test_output_that_is_not_whole_is_said() -> None:
    words = [sys.executable, "-c", "from ycore_cli import start; start()", "grpo", "--help"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, timeout=60, text=True
        )
    assert ended.returncode == 1 and "No space left on device" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_extensions_of_torch_print_nothing_when_a_command_ends() -> None:
    """nanobind counted what `gc.freeze` had kept from being freed, in 30 lines."""
    pytest.importorskip("xgrammar")
    script = "import torch, xgrammar; from ycore_cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0 and ended.stderr == ""
