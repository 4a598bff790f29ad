"""Commands about runs and this machine: `ycore watch`, `report`, `recipes`, `env`, `doctor` and `selftest`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from ycore_cli import options as o

Page = Annotated[Path | None, typer.Option(help="The page to write; report.html in the first run's folder.")]
Engines = Annotated[bool, typer.Option("--engines", help="Start a real engine too, which takes half a minute.")]
GpuParts = Annotated[bool, typer.Option("--gpu", help="Try a run's path on a GPU, with figures: ten minutes.")]
OnDevice = Annotated[
    Literal["gpu", "cpu"], typer.Option("--device", help="With --gpu: `cpu` runs the parts that a CPU can do.")
]
Quick = Annotated[bool, typer.Option("--quick", help="The only mode, and the default: about a minute.")]
Chaos = Annotated[bool, typer.Option("--chaos", hidden=True)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the runs and of the step of the kill; e.g. 0.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, start nothing.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; e.g. card.json.")
]
Output = Annotated[Path | None, typer.Option(help="Keep both runs in this folder; else they are removed at the end.")]


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, going on or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now and return.")] = False,
) -> None:
    """Watch a run: reward, groups, slots. Ctrl-C only leaves it.

    \b
    ycore watch runs/quickstart
    ycore watch runs/quickstart --once
    """
    from ycore.view.progress import watch as follow

    try:
        follow(run, once=once)
    except KeyboardInterrupt:
        print("left; the run goes on")


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN2 ...]", help="Folders of runs, finished or not.")],
    output: Page = None,
    json: o.Json = False,
) -> None:
    """Make one page of a run: curves, seconds, completions.

    The page needs no network; a JSON and a PNG of the same are written beside it.

    \b
    ycore report runs/quickstart
    ycore report runs/dapo runs/grpo --output dapo-and-grpo.html
    """
    from ycore_cli.output import print_json, print_table

    from ycore.errors import RunFolderError
    from ycore.view.page import as_json, make_report, write_report
    from ycore.view.record import read_run

    page = output or runs[0] / "report.html"
    if page.suffix != ".html":
        example = page.with_suffix(".html")
        raise RunFolderError(f"--output {page} is the page's file, which ends in .html; e.g. {example}")
    made = make_report([read_run(root) for root in runs])
    written = write_report(made, page)
    if json:
        print_json(as_json(made))
    else:
        print_table([("page", str(written[0])), *(("", str(path)) for path in written[1:])])
        print_table([("damaged", problem) for run in made for problem in run.problems])


def env(json: o.Json = False) -> None:
    """Show what is installed, what is missing, and how to fix it.

    \b
    ycore env
    ycore env --json
    """
    from ycore_cli.output import stdout_for_json

    from ycore.tools.doctor import environment_report

    with stdout_for_json(json):
        report = environment_report()
    _print_checks(report, json=json)


def doctor(
    engines: Engines = False,
    gpu: GpuParts = False,
    device: OnDevice = "gpu",
    dry_run: DryRun = False,
    json: o.Json = False,
) -> None:
    """Try out what a run needs, and say how to fix it.

    \b
    Versions, devices, memory, disk, sockets, locks, and every role in its own process.
    Exit status 1 where something is broken.

    \b
    ycore doctor
    ycore doctor --engines
    ycore doctor --gpu
    """
    from ycore_cli.output import print_line, stdout_for_json

    from ycore.errors import ConfigError
    from ycore.tools.device_check import PARTS, device_report
    from ycore.tools.doctor import doctor_report

    if (device == "cpu" or dry_run) and not gpu:
        raise ConfigError("--device and --dry-run are for doctor --gpu; add --gpu, or leave them out")
    if dry_run:
        for name, part in PARTS.items():
            on_cpu = "not run on a CPU" if not part.on_cpu else f"not run on a CPU: {part.left_out}"
            print(f"{name:<12} {part.limit_s:.0f} s at most; {on_cpu}")
        print("Nothing was started; leave out --dry-run to begin.")
        return
    with stdout_for_json(json):
        report = device_report(print_line, on=device) if gpu else doctor_report(engines=engines)
    if json or not gpu:
        _print_checks(report, json=json)
    if not json:
        broken = sum(not check["ok"] for check in report["checks"])
        way_out = "docs/gpu.md says what each part does" if gpu else "each line ends with how"
        works = "what ran has passed; no GPU was tried" if gpu and device == "cpu" else "everything works"
        print(works if report["ok"] else f"{broken} to mend; {way_out}")
    if not report["ok"]:
        raise typer.Exit(1)


def recipes(json: o.Json = False) -> None:
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


def selftest(
    quick: Quick = False,
    chaos: Chaos = False,
    seed: Seed = 0,
    json: JsonFile = None,
    output: Output = None,
    dry_run: DryRun = False,
) -> int:
    """Kill and resume a tiny run, and compare it to the bit.

    \b
    ycore selftest
    ycore selftest --seed 1 --json card.json
    """
    import signal

    from ycore_cli.output import print_line

    from ycore.errors import ConfigError
    from ycore.run.files import write_json_atomic
    from ycore.tools.selftest import selftest as run_selftest

    if chaos:
        raise ConfigError("--chaos is now a test command of the repository: python -m tests.chaos --moments 30")
    if dry_run:
        print("Two runs of a tiny model, one kill, one resume. Nothing was started; leave out --dry-run to begin.")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the run that goes on is ended first
    result = run_selftest(seed=seed, output=output and output.expanduser(), say=print_line)
    if json is not None:
        write_json_atomic(json.expanduser().absolute(), result)
    return 0 if result["passes"] else 1


def _print_checks(report: Mapping[str, Any], *, json: bool) -> None:
    from ycore_cli.output import print_json, print_table

    if json:
        print_json(report)
        return
    rows = []
    for check in report["checks"]:
        mend = f"  -> {check['mend']}" if check["mend"] else ""
        rows.append((check["name"], f"{'ok ' if check['ok'] else '-- '} {check['value']}{mend}"))
    print_table(rows)
