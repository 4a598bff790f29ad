"""`ycore env`: versions, devices, what is missing and the command that mends it.

Not here: the checks themselves (`ycore.launch.environment`).
"""

from collections.abc import Mapping
from typing import Any

import typer
from ycore_cli import options as o


def env(context: typer.Context, json: o.Json = False) -> None:
    """Show what is here, what is missing, and the cure.

    \b
    ycore env
    ycore env --json
    """
    from ycore_cli.output import print_json, print_table, stdout_for_json

    from ycore.launch.environment import environment_report

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
