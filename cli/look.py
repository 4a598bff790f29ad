"""Commands about runs, this machine and ycore itself: `watch`, `reproduce`, `doctor`, `docs` and others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import print_json, print_line, print_table, stdout_for_json

from ycore.errors import ConfigError, RunFolderError
from ycore.run.files import write_json_atomic

if TYPE_CHECKING:
    from ycore.config.recipe_files import RecipeEntry

Page = Annotated[
    Path | None, typer.Option(help="The page to write; report.html in the first run's folder.")
]
DocsPage = Annotated[
    str | None, typer.Argument(metavar="[PAGE]", help="A page's name; e.g. rewards.")
]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A shipped recipe's name, or a YAML file.")
]
Seeds = Annotated[int, typer.Option(min=1, help="Runs, with the seeds 0, 1, ...; e.g. 3.")]
Band = Annotated[
    Path | None,
    typer.Option("--band", help="The band to compare with; that of the recipe if not given."),
]
WriteBand = Annotated[
    Path | None, typer.Option("--write-band", help="Make a band of these runs; e.g. band.json.")
]
Runs = Annotated[
    Path | None,
    typer.Option("--output", help="Folder of the runs; e.g. runs/reproduce-quickstart."),
]


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, going on or ended.")],
    once: Annotated[
        bool, typer.Option("--once", help="Show the run as it is now and return.")
    ] = False,
) -> None:
    """Watch a run: reward, groups, slots. Ctrl-C only leaves it.

    \b
    ycore watch runs/quickstart
    ycore watch runs/quickstart --once
    """
    from ycore.view.progress import follow_run

    try:
        follow_run(run, once=once)
    except KeyboardInterrupt:
        print("left; the run goes on")


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN2 ...]", help="Folders of runs, finished or not."),
    ],
    output: Page = None,
    json: o.Json = False,
) -> None:
    """Make one page of a run: curves, seconds, completions.

    The page needs no network; a JSON and a PNG of the same are written beside it.

    \b
    ycore report runs/quickstart
    ycore report runs/dapo runs/grpo --output dapo-and-grpo.html
    """
    from ycore.view.page import make_report, report_json, write_report
    from ycore.view.record import read_run

    page = output or runs[0] / "report.html"
    if page.suffix != ".html":
        example = page.with_suffix(".html")
        raise RunFolderError(
            f"--output {page} is the page's file, which ends in .html; e.g. {example}"
        )
    made = make_report([read_run(root) for root in runs])
    written = write_report(made, page)
    if json:
        print_json(report_json(made))
    else:
        print_table([("page", str(written[0])), *(("", str(path)) for path in written[1:])])
        print_table([("damaged", problem) for run in made for problem in run.problems])


def recipes(json: o.Json = False) -> None:
    """List the recipes that come with ycore.

    \b
    ycore recipes
    ycore grpo --recipe quickstart --dry-run
    """
    from ycore.api.reproduce import stored_band
    from ycore.config.recipe_files import list_recipes

    entries = [(entry, stored_band(entry.name)) for entry in list_recipes()]
    if json:
        keys = ("name", "description", "never_run")
        print_json(
            {
                "recipes": [
                    {key: getattr(entry, key) for key in keys} | {"band": band}
                    for entry, band in entries
                ]
            }
        )
        return
    print_table((entry.line, entry.description + _mark(entry, band)) for entry, band in entries)
    print("Run one with `ycore` before its line; a path to your own YAML file works too.")
    print(
        "[band]: several seeds are on record, and `ycore reproduce` compares with them; the others have none."
    )


def _mark(entry: "RecipeEntry", band: Mapping[str, Any] | None) -> str:
    if band is not None:
        return " [band]"
    return f" [never run here: {entry.never_run}]" if entry.never_run else ""


def docs(page: DocsPage = None) -> None:
    """Print a page of the documentation, or list the pages.

    \b
    ycore docs
    ycore docs rewards
    """
    from importlib.resources import files

    from ycore.errors import nearest

    pages = {
        entry.name.removesuffix(".md"): entry
        for entry in files("ycore_docs").iterdir()
        if entry.name.endswith(".md")
    }
    if page is None:
        from ycore_cli.output import print_table

        print_table(
            (
                name,
                ("\n" + pages[name].read_text(encoding="utf-8"))
                .partition("\n# ")[2]
                .partition("\n")[0],
            )
            for name in sorted(pages)
        )
        print("Print one with `ycore docs PAGE`.")
    elif page in pages:
        print(pages[page].read_text(encoding="utf-8"), end="")
    else:
        raise ConfigError(
            f"no page {page!r}{nearest(page, sorted(pages)) or '; `ycore docs` lists them'}"
        )


def agents() -> None:
    """Print ycore in one page, for coding agents and for people.

    \b
    ycore agents
    ycore agents > SKILL.md
    """
    docs("skill")


def reproduce(
    recipe: Recipe,
    seeds: Seeds = 3,
    output: Runs = None,
    band: Band = None,
    write_band: WriteBand = None,
    set_: o.Set = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> int:
    """Run a recipe with several seeds; compare with its band.

    \b
    A band is where one more run falls with 95 %, from at least three seeds. Runs that are finished in
    --output are not run again. Exit status 1 where a run is outside.

    \b
    ycore reproduce quickstart --seeds 3
    ycore reproduce quickstart --seeds 3 --write-band band.json
    """

    from ycore.api.reproduce import MIN_SEEDS
    from ycore.errors import Interrupted
    from ycore.run.reports import tracker_group

    name = Path(recipe).stem
    root = output or Path("runs") / f"reproduce-{name}"
    if write_band is not None and seeds < MIN_SEEDS:
        raise ConfigError(f"a band needs {MIN_SEEDS} seeds or more; it is --seeds {seeds}")
    with stdout_for_json(json), tracker_group(root.resolve().name):
        for seed in range(seeds):
            try:
                _run_seed(recipe, seed, root / f"seed-{seed}", sets=set_ or (), dry_run=dry_run)
            except Interrupted:
                raise Interrupted(f"stopped with seed {seed}; the same command goes on") from None
    if dry_run and json:
        print_json({"recipe": recipe, "output": str(root), "seeds": list(range(seeds))})
        return 0
    if dry_run:
        print(
            f"{seeds} runs of {recipe} in {root}. Nothing was started; leave out --dry-run to run them."
        )
        return 0
    return _compare(name, root, seeds, sets=set_ or (), band=band, write_band=write_band, json=json)


def _run_seed(recipe: str, seed: int, root: Path, *, sets: Sequence[str], dry_run: bool) -> None:
    """Run the recipe with this seed, or the rest of it, unless it is finished; RunFolderError for another run there."""
    from ycore_cli.train import train

    from ycore.api.run_settings import complete_config
    from ycore.config.recipe_files import load_recipe
    from ycore.config.resolve import resolve_any
    from ycore.run.claim import changes, is_finished
    from ycore.run.paths import RunFolder

    folder, base = RunFolder(root), load_recipe(recipe)
    if "stages" in base:
        return _run_stages(base, seed, root, sets=sets, dry_run=dry_run)
    config = complete_config(
        resolve_any(recipe=base, sets=sets, options={"seed": seed, "output": str(root)})
    )
    if is_finished(folder) and not changes(folder, config):
        return
    train(config, resume=folder.config.is_file(), dry_run=dry_run)


def _run_stages(
    base: Mapping[str, Any], seed: int, root: Path, *, sets: Sequence[str], dry_run: bool
) -> None:
    from ycore.api.pipeline_run import declared_stages, run_declared
    from ycore.api.stages import parse_pipeline
    from ycore.run.files import read_json

    declared = declared_stages(base, sets, {"seed": seed, "output": str(root)})
    report = read_json(root / "pipeline.json") if (root / "pipeline.json").is_file() else {}
    if (report.get("status"), report.get("pipeline")) != ("finished", declared):
        run_declared(
            parse_pipeline(declared, name=root.name),
            declared,
            resume=bool(report),
            dry_run=dry_run,
            say=print_line,
        )


def _compare(
    name: str,
    root: Path,
    seeds: int,
    *,
    sets: Sequence[str],
    band: Path | None,
    write_band: Path | None,
    json: bool,
) -> int:
    """Write the page of all runs and the band, and say which runs are inside the band that is known."""
    from dataclasses import replace

    from ycore_cli.output import print_json, print_table

    from ycore.api import reproduce as tool
    from ycore.run.files import read_json
    from ycore.view.page import make_report, write_report
    from ycore.view.record import read_run

    known = tool.stored_band(name) if band is None else read_json(band)
    runs = {seed: tool.stages_in(root / f"seed-{seed}") for seed in range(seeds)}
    about = tool.about_runs(name, sets, root / "seed-0")
    if write_band is not None:
        write_json_atomic(write_band, tool.bands_of(runs, **about))
    verdicts = [one for seed, own in runs.items() for one in tool.judge_stages(known, seed, own)]
    folders = [tool.last_trained(root / f"seed-{seed}") for seed in runs]
    shown = [replace(read_run(folder), name=str(folder.relative_to(root))) for folder in folders]
    notes = [] if known is None else tool.notes_on(known, sets)
    bands = [] if known is None else tool.banded(known, runs, verdicts)
    page = write_report(make_report(shown), root / "report.html", bands=bands, notes=notes)[0]
    finals = {
        tool.name_of(seed, name): tool.final_of(rows)
        for seed, own in runs.items()
        for name, rows in own.items()
    }
    result = {
        **about,
        "finals": finals,
        "verdicts": [one.as_json() for one in verdicts],
        "page": str(page),
    }
    write_json_atomic(root / "reproduce.json", result)
    if json:
        print_json(result)
    else:
        print_table([(f"seed {name}", f"final {final:.3f}") for name, final in finals.items()])
        print_table(
            [("", one.in_words) for one in verdicts] or [("band", "none is stored for this recipe")]
        )
        print_table([*(("note", note) for note in notes), ("page", str(page))])
    return int(any(not one.is_inside for one in verdicts))
