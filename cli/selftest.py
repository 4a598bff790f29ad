"""`ycore selftest`: whether a killed run resumes exactly on this machine."""

from typing import Annotated

import typer

Quick = Annotated[bool, typer.Option("--quick", help="The only mode, and the default: about a minute.")]
Chaos = Annotated[bool, typer.Option("--chaos", hidden=True)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the runs and of the step of the kill; e.g. 0.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run, start nothing.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; e.g. card.json.")
]
Output = Annotated[str | None, typer.Option(help="Keep both runs in this folder; else they are removed at the end.")]


def selftest(
    quick: Quick = False,
    chaos: Chaos = False,
    seed: Seed = 0,
    json: JsonFile = None,
    output: Output = None,
    dry_run: DryRun = False,
) -> int:
    """Kill the trainer of a tiny run with SIGKILL, resume it, and compare the result to the bit.

    \b
    ycore selftest
    ycore selftest --seed 1 --json card.json
    """
    from pathlib import Path

    from ycore.errors import ConfigError
    from ycore.run.files import write_json_atomic
    from ycore.tools.selftest import selftest as run_selftest

    if chaos:
        raise ConfigError("--chaos is now a test command of the repository: python -m tests.chaos --moments 30")
    if dry_run:
        print("Two runs of a tiny model, one kill, one resume. Nothing was started; leave out --dry-run to begin.")
        return 0
    folder = None if output is None else Path(output).expanduser()
    result = run_selftest(seed=seed, output=folder, say=lambda line: print(line, flush=True))
    if json is not None:
        write_json_atomic(Path(json).expanduser().absolute(), result)
    return 0 if result["passes"] else 1
