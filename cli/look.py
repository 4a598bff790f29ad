"""`ycore report`: one page about a run, or about several side by side.

`ycore watch`: look at a run from another terminal, or at one that has ended.

`ycore env`: versions, devices, what is missing and the command that mends it.

`ycore doctor`: what works here, tried out, and the command that mends what does not.

`ycore recipes`: the shipped runs by name. Not here: how a recipe is read (`ycore.config.recipe_files`).

Not here: what stands on it (`ycore.view`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from ycore_cli import options as o


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, going on or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Show what there is and return.")] = False,
) -> None:
    """Watch a run: its reward, its groups, where the time goes. Ctrl-C leaves; the run goes on.

    \b
    ycore watch runs/quickstart
    ycore watch runs/quickstart --once
    """
    from ycore.view.progress import watch as follow

    try:
        follow(run, once=once)
    except KeyboardInterrupt:
        print("left; the run is not touched")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN2 ...]", help="Folders of runs, finished or not.")],
    output: Annotated[
        Path | None, typer.Option(help="The page to write; report.html in the first run's folder.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Make one page of a run: curves, where every second went, completions, the command to do it again.

    The page needs no network; a JSON and a PNG of the same are written beside it.

    \b
    ycore report runs/quickstart
    ycore report runs/dapo runs/grpo --output dapo-and-grpo.html
    """
    from ycore_cli.output import print_json, print_table

    from ycore.errors import RunFolderError
    from ycore.view.page import as_json, make_report, write_report
    from ycore.view.record import read_run

    page = runs[0] / "report.html" if output is None else output
    if page.suffix != ".html":
        raise RunFolderError(
            f"--output {page} is the page's file, which ends in .html; e.g. {page.with_suffix('.html')}"
        )
    made = make_report([read_run(root) for root in runs])
    written = write_report(made, page)
    if json:
        print_json(as_json(made))
    else:
        print_table([("page", str(written[0])), *(("", str(path)) for path in written[1:])])
        print_table([("damaged", problem) for run in made.runs for problem in run.problems])


def env(context: typer.Context, json: o.Json = False) -> None:
    """Show what is here, what is missing, and the cure.

    \b
    ycore env
    ycore env --json
    """
    from ycore_cli.output import print_json, print_table, stdout_for_json

    from ycore.tools.doctor import environment_report

    with stdout_for_json(json):
        report = environment_report()
    if json:
        print_json(report)
    else:
        print_table(row(check) for check in report["checks"])


def row(check: Mapping[str, Any]) -> tuple[str, str]:
    """A check as a line of the table: its name, and what was found with what mends it."""
    mend = f"  -> {check['mend']}" if check["mend"] else ""
    return check["name"], f"{'ok ' if check['ok'] else '-- '} {check['value']}{mend}"


Engines = Annotated[bool, typer.Option("--engines", help="Start a real engine too, which takes half a minute.")]


def doctor(context: typer.Context, engines: Engines = False, json: o.Json = False) -> None:
    """Try out what a run needs, and say what mends it.

    \b
    Versions, devices, memory, disk, sockets, locks, and every role in a process of its own.
    Exit status 1 where something is broken.

    \b
    ycore doctor
    ycore doctor --engines
    """
    from ycore_cli.output import print_json, print_table, stdout_for_json

    from ycore.tools.doctor import doctor_report

    with stdout_for_json(json):
        report = doctor_report(engines=engines)
    if json:
        print_json(report)
    else:
        print_table(row(check) for check in report["checks"])
        broken = sum(not check["ok"] for check in report["checks"])
        print("everything works" if report["ok"] else f"{broken} to mend; each line says how")
    if not report["ok"]:
        raise typer.Exit(1)


def recipes(context: typer.Context, json: o.Json = False) -> None:
    """List the recipes that come with ycore.

    \b
    ycore recipes
    ycore grpo --recipe quickstart --dry-run
    """
    from ycore_cli.output import print_json, print_table

    from ycore.config.recipe_files import list_recipes

    entries = list_recipes()
    if json:
        print_json({"recipes": [{"name": entry.name, "description": entry.description} for entry in entries]})
        return
    print_table((entry.line, entry.description) for entry in entries)
    print("Run one with `ycore` before its line; a path to your own YAML file works too.")
