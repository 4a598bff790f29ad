"""`ycore report`: one page about a run, or about several side by side.

Not here: what stands on it (`ycore.reporting`).
"""

from pathlib import Path
from typing import Annotated

import typer
from ycore_cli import options as o


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
    from ycore.reporting.page import as_json, make_report, write_report
    from ycore.reporting.record import read_run

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
