"""`ycore pipeline`: several runs as one, from a file of stages."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ycore_cli import options as o

if TYPE_CHECKING:
    from ycore.config.schema import AnyConfig

File = Annotated[str, typer.Argument(metavar="FILE|NAME", help="A YAML file of stages, or a shipped recipe's name.")]


def pipeline(
    file: File,
    model: o.Model = None,
    set_: o.StageSet = None,
    output: o.Output = None,
    resume: o.StageResume = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Run stages one after another, each one's output the next one's input.

    \b
    ycore pipeline rlhf-pipeline --dry-run
    ycore pipeline stages.yaml --output runs/mine --set sft.steps=50
    ycore pipeline stages.yaml --output runs/mine --resume
    """
    from ycore_cli.output import print_json, print_line, print_table, stdout_for_json

    from ycore.config.recipe_files import PIPELINE, load_recipe, recipe_name
    from ycore.config.resolve import parse_set
    from ycore.tools.pipeline_run import check_folder, check_pipeline, run_pipeline, table_rows
    from ycore.tools.stages import parse_pipeline, steps_of, with_sets

    with stdout_for_json(json):
        sets = {".".join(path): value for path, value in map(parse_set, set_ or ())}
        sets |= {key: value for key, value in (("model", model), ("output", output)) if value is not None}
        declared = with_sets(load_recipe(file, command=PIPELINE), sets)
        parsed = parse_pipeline(declared, name=recipe_name(file))
        steps = steps_of(parsed)
        check_folder(Path(parsed.output), declared, resume=resume)
        check_pipeline(parsed, steps, _check, show=print_line)
        report: dict[str, Any] = {"stages": [{"name": one.name, "command": one.command} for one in steps]}
        if not dry_run:
            report = run_pipeline(parsed, steps, _run, declared=declared, resume=resume, say=print_line)
    if json:
        print_json(report)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to run it.")
    else:
        print_table([*table_rows(report), ("report", str(Path(parsed.output) / "pipeline.json"))])


def _check(config: "AnyConfig", resume: bool) -> list[tuple[str, str]]:
    from ycore_cli.checks import checked_plan, plan_rows

    rows: list[tuple[str, str]] = plan_rows(checked_plan(o.with_judges(config), resume=resume), resume=resume)
    return rows


def _run(config: "AnyConfig", resume: bool) -> Mapping[str, Any]:
    from ycore_cli.checks import checked_plan
    from ycore_cli.train import run_training

    from ycore.config.schema import RunConfig
    from ycore.launch.launcher import EVALUATOR, run_worker
    from ycore.run.claim import AS_IT_WAS

    config = o.with_judges(config)
    plan = checked_plan(config, resume=resume)
    if isinstance(config, RunConfig) and config.algorithm == "eval":
        return run_worker(EVALUATOR, config)
    summary: Mapping[str, Any] = run_training(config, num_steps=plan["trl"]["max_steps"], resume=resume, how=AS_IT_WAS)
    return summary
