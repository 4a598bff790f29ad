"""The console entry `ycore`: its commands, and the one place where an error becomes a line and an exit status.

Nothing heavy is imported until a command runs.
"""

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer
from ycore_cli.look import recipes, report
from ycore_cli.measure import doctor, evaluate_models, plan, preflight
from ycore_cli.output import print_json
from ycore_cli.pages import docs, explanation
from ycore_cli.panels import PanelCommand
from ycore_cli.train import pipeline, resume, training_command
from ycore_cli.use import chat, export, serve

from ycore import __version__
from ycore.config.algorithms import ALGORITHMS, FAMILIES, load_reference
from ycore.errors import Interrupted, YcoreError, must_be, nearest
from ycore.run.files import file_problem
from ycore.run.interrupt import keep_printing, run_command
from ycore.run.text import printable
from ycore.run.work import command_pulse

_ANY_TRL_FIELD = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    context_settings={
        "max_content_width": 100, "help_option_names": ["--help", "-h"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --group_size is --group-size
    },
    pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
for algorithm in ALGORITHMS.values():
    app.command(
        algorithm.name,
        cls=PanelCommand,
        context_settings=_ANY_TRL_FIELD,
        hidden=algorithm.experimental,
    )(training_command(algorithm))
for family in FAMILIES.values():
    app.command(family.name, cls=PanelCommand)(load_reference(family.command))
for name, command in {
    "resume": resume,
    "eval": evaluate_models,
    "plan": plan,
    "preflight": preflight,
}.items():
    app.command(name, cls=PanelCommand, context_settings=_ANY_TRL_FIELD)(command)
for command in (pipeline, recipes, doctor, report, chat, serve, export, docs):
    app.command(cls=PanelCommand)(command)


@app.callback(invoke_without_command=True)
def ycore(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Reinforcement learning for language models from one command.

    \b
    ycore grpo --recipe quickstart      a small model learns addition
    ycore eval --help                   measure a model on a reward

    More, of TRL's experimental trainers: orpo, cpo, gold, sdft, sdpo.
    """
    if version:
        print(f"ycore {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit()


def main() -> None:
    """The console script, once everything is imported that it needs to begin."""
    output_problem = keep_printing()
    status = run_command(_run_with_pulse)
    if (problem := output_problem()) and not status:
        print(f"error: what was printed is not whole ({problem.strerror})", file=sys.stderr)
        status = 1
    if "torch" not in sys.modules:  # whose extensions report what is left of them
        gc.freeze()  # else the interpreter searches all modules and rows for cycles once more before it ends
    sys.exit(status)


def _run_with_pulse() -> int:
    """Run the command, which says on standard error what it does where it is silent for long."""
    if "_YCORE_COMPLETE" in os.environ:  # a Tab
        return run(sys.argv[1:])
    words = " ".join(["ycore", *sys.argv[1:2]])
    return run(sys.argv[1:], pulse=command_pulse(sys.stderr, words))


def run(arguments: Sequence[str], *, pulse: AbstractContextManager[Any] | None = None) -> int:
    """Run `ycore ARGUMENTS` within the pulse and return the exit status. A bug keeps its traceback."""
    try:
        with pulse or nullcontext():  # an error is the last line
            status = app(args=list(arguments), prog_name="ycore", standalone_mode=False)
    except YcoreError as error:
        kind = "interrupted" if isinstance(error, Interrupted) else "error"
        return _fail(kind, str(error), error.exit_code, arguments)
    except OSError as error:
        return _fail("error", file_problem(error), 2, arguments)
    except MemoryError:
        message = "the memory is full; free some, or allow more (ulimit -v)"
        return _fail("error", message, 1, arguments)
    except typer.TyperException as error:
        return _fail("error", _refusal(error), 2, arguments)
    if status == 130:
        print("interrupted", file=sys.stderr)
    return status if isinstance(status, int) else 0


_COMMANDS_ELSEWHERE = dict.fromkeys(("watch", "status", "logs"), "report --live")
"""By a command that people look for, the one that has it."""


def _refusal(error: typer.TyperException) -> str:
    """Say in our form what typer refuses: an unknown option with the nearest one of its command."""
    from pydantic import ValidationError

    context: Any = getattr(error, "ctx", None)
    if isinstance(error.__cause__, ValidationError):
        parameter: Any = getattr(error, "param", None)
        return must_be(parameter.opts[0], error.__cause__.errors())
    message = error.format_message().strip().rstrip(".").replace(". Did", "; did")
    words = _COMMANDS_ELSEWHERE.get(message.partition("'")[2].rstrip("'"), "--help")
    way_out = f"; see `{context.command_path if context else 'ycore'} {words}`"
    if message.startswith("No such option"):
        option: str = getattr(error, "option_name", "")
        parameters = context.command.params
        known = [name for parameter in parameters for name in parameter.opts if name[0] == "-"]
        return f"no option {option}{nearest(option, known, limit=1) or way_out}"
    message = f"{message[:1].lower()}{message[1:]}"
    return message if message.endswith("?") else f"{message}{way_out}"


def _fail(kind: str, message: str, status: int, arguments: Sequence[str]) -> int:
    """Print the error as a line on standard error, and with `--json` as an object on standard output."""
    lines = (line.strip() for line in message.splitlines())
    line = printable(" ".join(filter(None, lines)))
    line += explanation(line)
    print(f"{kind}: {line}", file=sys.stderr)
    if "--json" in arguments:
        print_json({kind: line, "status": status})
    return status
