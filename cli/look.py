"""Commands about runs that exist, and recipes: `report`, `recipes`."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from textwrap import fill, indent
from typing import TYPE_CHECKING, Any

from ycore_cli import options as o
from ycore_cli.output import newest_run, print_json, print_line, print_table, stdout_for_json

from ycore.errors import ConfigError, Interrupted, RunFolderError
from ycore.run.files import RunFolder, read_json, tracker_group

if TYPE_CHECKING:
    from ycore.config.recipe_files import Sweep


def report(
    runs: o.ReportedRuns = None,
    output: o.Page = None,
    live: o.Live = False,
    once: o.Once = False,
    json: o.Json = False,
) -> None:
    """Look at a run: one page of curves and completions, or live.

    The page needs no network. With --json its numbers are printed too.

    \b
    ycore report runs/quickstart
    ycore report runs/dapo runs/grpo --output dapo-and-grpo.html
    ycore report runs/quickstart --live
    """

    if not runs:
        newest = newest_run(
            "report",
            lambda run: (
                live or once or (run.metrics.is_file() and run.metrics.stat().st_size > 0)
            ),
            need="with a step",
        )
        runs = [newest]
    if live or once:
        _follow(runs, once=once)
        return
    from ycore.view.report import make_report, read_run, report_json, write_report

    page = output or runs[0] / "report.html"
    if page.suffix != ".html":
        raise RunFolderError(
            f"--output {page} is the page's file, which ends in .html; e.g. {page.with_suffix('.html')}"
        )
    made = make_report([read_run(root) for root in runs])
    write_report(made, page)
    if json:
        print_json(report_json(made))
    else:
        problems = [("damaged", problem) for run in made for problem in run.problems]
        print_table([("page", str(page)), *problems])


def _follow(runs: Sequence[Path], *, once: bool) -> None:
    from ycore.view.progress import follow_run

    if len(runs) > 1:
        raise ConfigError(
            f"--live and --once show one run, and there are {len(runs)}; name one"
        )
    try:
        follow_run(runs[0], once=once)
    except KeyboardInterrupt:
        print("left; the run goes on")


def recipes(
    recipe: o.Recipe = None,
    seeds: o.Seeds = 3,
    output: o.SeedRuns = None,
    band: o.Band = None,
    set_: o.Set = None,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> int:
    """List the recipes, or run one with several seeds and compare.

    The comparison is with the recipe's band: where one more run falls with 95 %, from at least three
    seeds. Runs that are finished in --output are not run again. Exit status 1 where a run is outside.
    A file with `recipe` and `grid` runs each combination, and compares their means; with `halving` the
    best go on for longer.

    \b
    ycore recipes
    ycore recipes quickstart --seeds 3
    """
    if recipe is None:
        _list_recipes(json=json)
        return 0
    from ycore.api.reproduce import compare_seeds, stored_band
    from ycore.config.recipe_files import read_sweep

    name = Path(recipe).stem
    known = stored_band(recipe) if band is None else _read_band(band)
    root = output or Path("runs") / f"reproduce-{name}"
    sweep = read_sweep(recipe)
    with stdout_for_json(json), tracker_group(root.resolve().name):
        compared = _run_rungs(sweep, root, seeds, set_ or (), dry_run=dry_run)
    if dry_run:
        if json:
            print_json({"recipe": recipe, "output": str(root), "seeds": list(range(seeds))})
        else:
            print(f"{len(sweep.settings(o.KEYS)) * seeds} runs of {sweep.recipe} in {root}.")
            print("Nothing was started; leave out --dry-run to run them.")
        return 0
    result, lines = compared or compare_seeds(root, seeds, known, sets=set_ or ())
    if json:
        print_json(result)
    else:
        print_table(lines)
    return int(any(not verdict["is_inside"] for verdict in result.get("verdicts", ())))


def _read_band(file: Path) -> dict[str, Any]:
    """Read a band as docs/benchmarks/band.py writes it; ConfigError for another file."""
    band = read_json(file)
    stages = band.get("stages", {"": band})
    if not {"machine", "sets"} <= band.keys() or not all(
        {"steps", "final"} <= stage.keys() for stage in stages.values()
    ):
        raise ConfigError(
            f"--band {file} is no band; docs/benchmarks/band.py writes one, or leave --band out"
        )
    return band


def _run_rungs(
    sweep: "Sweep", root: Path, seeds: int, sets: Sequence[str], *, dry_run: bool
) -> tuple[dict[str, Any], list[tuple[str, str]]] | None:
    """Run every combination with every seed, rung by rung; return the last comparison, None of a recipe alone."""
    from ycore.api.reproduce import compare_settings

    settings = going_on = sweep.settings(o.KEYS)
    ended: list[Any] = []
    compared = None
    for steps in sweep.halving.steps:
        for (place, chosen), seed in product(going_on.items(), range(seeds)):
            folder = root / place / f"seed-{seed}"
            try:
                _run_seed(
                    sweep.recipe,
                    seed,
                    folder,
                    sets=[*sets, *chosen],
                    steps=steps,
                    dry_run=dry_run,
                )
            except Interrupted:
                raise Interrupted(
                    f"stopped with seed {seed}; the same command goes on"
                ) from None
        if dry_run or not sweep.grid:
            return None
        compared = compare_settings(root, going_on, seeds, steps=steps, ended=ended)
        rows = compared[0]["settings"]
        num_kept = math.ceil(len(going_on) / sweep.halving.factor)
        ended = rows[num_kept:]
        kept = [row["setting"] for row in rows[:num_kept]]
        going_on = {name: settings[name] for name in settings if name in kept}
    return compared


def _list_recipes(*, json: bool) -> None:
    from ycore.api.reproduce import stored_band
    from ycore.config.recipe_files import list_recipes

    entries = [(entry, stored_band(entry.name)) for entry in list_recipes()]
    if json:
        print_json({"recipes": [asdict(entry) | {"band": band} for entry, band in entries]})
        return
    for entry, band in entries:
        mark = f" [never run here: {entry.never_run}]" if entry.never_run else ""
        if band is not None:
            mark = " [band]"
        print(entry.line)
        print(indent(fill(entry.description + mark, 76), "    "))
    print("Run one with `ycore` before its line; a path to your own YAML file works too.")
    print("[band]: several seeds are on record; `ycore recipes NAME` compares with them.")


def _run_seed(
    recipe: str, seed: int, root: Path, *, sets: Sequence[str], steps: int | None, dry_run: bool
) -> None:
    """Run the recipe with this seed, or the rest of it, unless it is finished; RunFolderError for another run there.

    Args:
        steps: where a sweep compares; a run that went on from there is left as it is.
    """
    from ycore_cli.train import train

    from ycore.api.pipelines import parse_pipeline, run_pipeline
    from ycore.api.run_settings import complete_config, stored_settings
    from ycore.config.recipe_files import load_recipe
    from ycore.config.resolve import resolve_any
    from ycore.run.claim import changes, is_finished

    folder = RunFolder(root)
    num_steps = stored_settings(str(root)).get("steps")
    if steps is not None:
        if (num_steps or 0) > steps:
            return
        sets = [*sets, f"steps={steps}"]
    base = load_recipe(recipe)
    options = {"seed": seed, "output": str(root)}
    if "stages" in base:
        pipeline = parse_pipeline(base, name=root.name, sets=sets, options=options)
        resume = (root / "pipeline.json").is_file()
        run_pipeline(pipeline, resume=resume, dry_run=dry_run, say=print_line)
        return
    config = complete_config(resolve_any(recipe=base, sets=sets, options=options))
    if num_steps != config.steps or not is_finished(folder) or changes(folder, config):
        train(config, resume=folder.config.is_file(), dry_run=dry_run)
