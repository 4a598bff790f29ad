"""The commands that tell whether a run will run and learn, `plan`, `doctor` and `preflight`, and `ycore eval`, which
measures a model on held-out prompts with the engines and rewards that training uses."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import print_json, print_line, print_table, stdout_for_json

from ycore.api.tables import figure_rows, plan_rows

if TYPE_CHECKING:
    from ycore.config.schema import RunConfig


@o.takes(
    """
    model devices judge prompts_per_step group_size max_tokens prompt_tokens completion_tokens lora
    quantize accelerate dynamic_sampling max_staleness dataset split prompt_column answer_column show_rows
    set_ recipe json
    """,
    top=o.whole_number("Ways to show.", min=1),
)
def plan(
    context: typer.Context,
    *,
    devices: str | None,
    judge: str | None,
    prompt_tokens: int | None,
    completion_tokens: int | None,
    recipe: str | None,
    dataset: str | None,
    show_rows: int | None,
    top: int | None,
    json: bool,
    **_: Any,
) -> None:
    """Memory and time of a run, before it starts, on any devices.

    Of the model it reads config.json alone, see docs/plan.md. Fields of TRL's GRPOConfig are options too.
    With --dataset or --show-rows it also shows rows of the dataset as the model will see them.

    \b
    ycore plan --model Qwen/Qwen2.5-7B-Instruct --devices 8x80GB --max-tokens 1024
    ycore plan --recipe quickstart --devices cpu --show-rows 3
    """
    from ycore.api.planning import make_run_plan, plan_in_words, planned_config
    from ycore.api.shown_rows import shown_dataset
    from ycore.config.recipe_files import load_recipe

    with stdout_for_json(json):
        base = load_recipe(recipe) if recipe else {}
        algorithm = str(base.get("algorithm", "grpo"))
        options = o.typed_keys(context, algorithm=algorithm)
        config = planned_config(base, options, sets=context.params.get("set_") or ())
        names_dataset = "dataset" in (base | options)
        if show_rows is not None and not names_dataset:
            raise typer.BadParameter(
                f"--show-rows {show_rows} shows rows of the run's dataset; name it with --dataset"
            )
        shows = show_rows is not None or dataset is not None
        is_here = config.dataset.startswith(("task:", "gym:")) or Path(config.dataset).is_file()
        if shows or (names_dataset and is_here):
            read, rows = shown_dataset(config, num_rows=show_rows or 1)
            if prompt_tokens is None:
                prompt_tokens = read["reading"]["mean_tokens"]
        made = make_run_plan(
            config,
            devices=devices,
            judge=judge,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
        values, lines = plan_in_words(made, top=top or 5)
    if json:
        print_json(values | ({"dataset": read} if shows else {}))
    else:
        if shows:
            print_table(rows)
            print_line("")
        for line in lines:
            print_line(line)
    if not made.fitting:
        raise typer.Exit(1)


@o.takes(
    """
    model dataset reward tools env env_python agent max_turns actions prompt_column answer_column
    system_prompt trust_remote_code group_size max_tokens lora preset engine sandbox seed set_ recipe
    output dry_run json
    """,
    dataset=o.Datasets,
)
def preflight(context: typer.Context, *, dry_run: bool, json: bool, **_: Any) -> None:
    """Will this run learn? Find out before it starts.

    Takes the options of `ycore grpo`, samples completions of 16 prompts with the run's own engines,
    scores them, and lists what would keep it from learning. Exit status 1 where something would.

    \b
    ycore preflight --recipe quickstart
    ycore preflight --model smollm2-135m --dataset train.jsonl \\
                    --reward rewards.py:score
    """
    from ycore.api.evaluations import preflight_config, preflight_lines, run_preflight
    from ycore.api.running import checked_plan
    from ycore.config.recipe_files import load_recipe
    from ycore.config.resolve import require_rollouts

    with stdout_for_json(json):
        recipe = context.params["recipe"]
        base = load_recipe(recipe, command="grpo") if recipe else {}
        algorithm = str(base.get("algorithm", "grpo"))
        config = preflight_config(
            require_rollouts(o.resolve_config(context, algorithm=algorithm))
        )
        result = checked_plan(config, trains=False) if dry_run else run_preflight(config)
    if json:
        print_json(result)
    elif dry_run:
        print_table(plan_rows(result))
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        for line in preflight_lines(result):
            print_line(line)
    if not dry_run and not result["learns"]:
        raise typer.Exit(1)


def doctor(json: o.Json = False) -> None:
    """Try out what a run needs, and say how to fix it.

    Versions, devices, memory, disk, sandbox and imports.
    Exit status 1 where something is broken.

    \b
    ycore doctor
    ycore doctor --json
    """
    from ycore.launch.doctor import doctor_report

    with stdout_for_json(json):
        report = doctor_report()
    if json:
        print_json(report)
    else:
        rows = []
        for check in report["checks"]:
            mend = f"  -> {check['mend']}" if check["mend"] else ""
            mark = "ok " if check["ok"] else "-- "
            rows.append((check["name"], f"{mark} {check['value']}{mend}"))
        print_table(rows)
        num_broken = sum(not check["ok"] for check in report["checks"])
        print(
            f"{num_broken} to mend; each line ends with how"
            if num_broken
            else "everything works"
        )
    if not report["ok"]:
        raise typer.Exit(1)


@o.takes(
    """
    benchmark dataset reward constraint tools env env_python agent max_turns actions split prompt_column
    answer_column system_prompt trust_remote_code num_samples pairs limit max_tokens engine seed sandbox
    set_ recipe output dry_run json
    """,
    model=o.Models,
    temperature=o.text("Temperature of the completions [1.0].", metavar="X"),
    top_p=o.text("Share of the probability that is sampled from [1.0].", metavar="X"),
)
def evaluate_models(
    context: typer.Context, *, output: str | None, dry_run: bool, json: bool, **_: Any
) -> None:
    """Measure a model, or several on the same prompts.

    It tells the mean reward, pass@1 and pass@k, and of several models the differences with their intervals.
    pass@k is the unbiased estimate of arXiv 2107.03374.
    The other fields of TRL's GRPOConfig for sampling are options too; see docs/options.md.

    \b
    ycore eval --model smollm2-135m --dataset test.jsonl --reward exact_answer
    ycore eval --model runs/first/model --benchmark gsm8k --limit 200
    ycore eval --model smollm2-135m --model runs/quickstart/model \\
               --dataset 'task:addition?digits=1' --reward exact_answer
    ycore eval --model smollm2-135m --pairs \\
               --dataset pairs.jsonl --reward rm:runs/rm/model
    """
    from ycore.api.evaluations import compare_evaluations, evaluation_plan, run_evaluations

    has_dataset = context.params["dataset"] is not None
    with stdout_for_json(json):
        configs = _evaluation_configs(context, output)
        results = {
            config.model: evaluation_plan(
                config, benchmark=context.params["benchmark"], has_dataset=has_dataset
            )
            for config in configs
        }
        if not (json and dry_run):
            for plan in results.values():
                print_table(plan_rows(plan))
        if not dry_run:
            results = run_evaluations(configs)
    result = results
    lines = []
    if len(configs) == 1:
        (result,) = results.values()
        lines = figure_rows(result)
    elif not dry_run:
        result, lines = compare_evaluations(configs, results)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to measure.")
    else:
        print_table(lines)


def _evaluation_configs(context: typer.Context, output: str | None) -> "list[RunConfig]":
    """Resolve a config for each model; several have folders of their own in one."""
    from ycore.api.evaluations import with_folders
    from ycore.api.run_settings import unused_folder
    from ycore.config.resolve import require_rollouts

    models = context.params["model"] or [None]
    configs = []
    for model in models:
        context.params["model"] = model
        configs.append(require_rollouts(o.resolve_config(context, algorithm="eval")))
    return with_folders(configs, output or unused_folder(configs[0].output))
