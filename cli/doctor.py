"""`ycore doctor`: what works here, tried out, and the command that mends what does not.

Not here: the checks themselves (`ycore.launch.doctor`).
"""

from typing import Annotated

import typer
from ycore_cli import options as o

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
    from ycore_cli.env import row
    from ycore_cli.output import print_json, print_table, stdout_for_json

    from ycore.launch.doctor import doctor_report

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
