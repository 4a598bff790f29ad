"""`ycore watch`: look at a run from another terminal, or at one that has ended.

Not here: what is shown (`ycore.reporting.watch`).
"""

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, going on or ended.")],
    once: Annotated[bool, typer.Option("--once", help="Show what there is and return.")] = False,
) -> None:
    """Watch a run: its reward, its groups, where the time goes. Ctrl-C leaves; the run goes on.

    \b
    ycore watch runs/quickstart
    ycore watch runs/quickstart --once
    """
    from ycore.reporting.watch import watch as follow

    try:
        follow(run, once=once)
    except KeyboardInterrupt:
        print("left; the run is not touched")
