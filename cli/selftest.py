"""`ycore selftest`: whether ycore keeps its promises on this machine, by breaking real runs on purpose.

Not here: how runs are broken and compared (`ycore.selftest`).
"""

from typing import Annotated

import typer

Quick = Annotated[bool, typer.Option("--quick", help="One kill and one resume, in about a minute (the default).")]
Chaos = Annotated[bool, typer.Option("--chaos", help="The whole scorecard; see docs/reliability.md.")]
Seed = Annotated[int, typer.Option(min=0, help="Draws the moments of kills and everything else that is drawn; e.g. 0.")]
Rows = Annotated[str | None, typer.Option(metavar="NAMES", help="Only these rows; e.g. kill-trainer,kill-in-save.")]
Moments = Annotated[int, typer.Option(min=1, metavar="N", help="Kills of each role; the other rows follow; e.g. 30.")]
Engine = Annotated[
    str, typer.Option(metavar="KIND", help="scripted, vllm or both: which engine the runs of the scorecard have.")
]
Parallel = Annotated[int, typer.Option(min=1, metavar="N", help="Runs at a time; e.g. 2.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; e.g. card.json.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Name the rows and the first moments, start nothing.")]
Output = Annotated[str | None, typer.Option(help="Keep every run in this folder; else they are removed at the end.")]


def selftest(
    quick: Quick = False,
    chaos: Chaos = False,
    seed: Seed = 0,
    rows: Rows = None,
    moments: Moments = 30,
    engine: Engine = "scripted",
    parallel: Parallel = 2,
    json: JsonFile = None,
    output: Output = None,
    dry_run: DryRun = False,
) -> int:
    """Kill, stop and damage real runs of a tiny model, and compare what comes of it to the bit.

    \b
    ycore selftest
    ycore selftest --chaos --seed 0 --moments 3 --rows kill-trainer,leftovers
    """
    from pathlib import Path

    from ycore.errors import ConfigError
    from ycore.run.files import write_json_atomic
    from ycore.selftest.scorecard import chaos as all_rows
    from ycore.selftest.scorecard import planned, tiers_of
    from ycore.selftest.scorecard import quick as few_rows

    if quick and chaos:
        raise ConfigError("--quick and --chaos are two tests; give one of them")
    if rows is not None and not chaos:
        raise ConfigError(f"--rows chooses among the scorecard's; say ycore selftest --chaos --rows {rows}")
    folder = None if output is None else Path(output).expanduser()
    names = [name.strip() for name in (rows or "").split(",") if name.strip()]
    if dry_run:
        for line in planned(tiers_of(engine), names=names, seed=seed) if chaos else ["quick: one kill, one resume"]:
            print(line)
        print("Nothing was started; leave out --dry-run to begin.")
        return 0
    if chaos:
        told = all_rows(
            tiers_of(engine), names=names, seed=seed, count=moments, parallel=parallel, output=folder, say=_say
        )
    else:
        told = few_rows(seed=seed, parallel=parallel, output=folder, say=_say)
    if json is not None:
        write_json_atomic(Path(json).expanduser().absolute(), told)
    return 0 if told["passes"] else 1


def _say(line: str) -> None:
    print(line, flush=True)
