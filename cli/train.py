"""Commands that train: one for each row of the table of algorithms, `ycore resume`, and `ycore pipeline`."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from ycore_cli import options as o
from ycore_cli.output import (
    newest_run,
    print_closing,
    print_json,
    print_line,
    print_table,
    stdout_for_json,
)

from ycore.config.algorithms import FAMILIES, Algorithm, load_reference
from ycore.errors import ConfigError, RunFolderError
from ycore.run.files import RunFolder, read_json

if TYPE_CHECKING:
    from ycore.config.schema import BaseConfig


_ROLLOUTS = """
    dataset teacher reward constraint tools env env_python agent max_turns actions prompt_column answer_column
    system_prompt prompts_per_step group_size max_tokens engine sandbox dynamic_sampling curriculum
    max_staleness oversample placement preset advantage keep loss divergence trust_region keep_journal replay restarts
    eval_dataset eval_split eval_every eval_reward keep_best stop_when log_every
"""
_EXAMPLES = """
    prompt_column answer_column split limit eval_dataset eval_split held_out eval_every keep_best stop_when
    batch_size epochs
"""
_TRAINING = """
    steps lora quantize merge processes accelerate hosts min_hosts deterministic trust_remote_code seed set_ recipe output
    dry_run show_rows resume resume_from accept_changes json
"""


def training_command(algorithm: Algorithm) -> Callable[..., None]:
    """Make the Typer command of an algorithm."""

    def command(context: typer.Context, **_: Any) -> None:
        train_as_typed(context, algorithm.name)

    variants = o.trl_options(algorithm) | dict.fromkeys(algorithm.lacks)
    data = _ROLLOUTS
    if algorithm.learns_from == "rollouts":
        variants |= {"dataset": o.Datasets}
    else:
        variants |= {"dataset": o.Examples, "steps": o.ExampleSteps}
        data = _EXAMPLES
    examples = "\n".join(f"ycore {algorithm.name} {example}" for example in algorithm.examples)
    command.__doc__ = f"{algorithm.summary}\n\n{algorithm.help}\n\n\b\n{examples}"
    o.takes(f"model {data} {_TRAINING}", **variants)(command)
    return command


def train_as_typed(context: typer.Context, algorithm: str) -> None:
    """Train with the options of a command."""
    options = context.params
    _go_to(options.get("hosts"), options.get("min_hosts"))
    resume = options["resume"] or options["resume_from"] is not None
    train(
        o.resolve_config(context, algorithm=algorithm, resume=resume),
        resume=resume,
        resume_from=options["resume_from"],
        accept_changes=options["accept_changes"],
        dry_run=options["dry_run"],
        show_rows=options.get("show_rows") or 1,
        json=options["json"],
    )


def _go_to(hosts: str | None, min_hosts: int | None) -> None:
    """Run the command on these hosts, where there are any, and not here."""
    names = [] if hosts is None else hosts.split(",")
    if (min_hosts or 0) > len(names):
        raise ConfigError(
            f"--min-hosts is at most the number of --hosts, {len(names)} here; it is {min_hosts}; say less, or leave it out"
        )
    if not names:
        return
    from ycore_cli.hosts import run_on_hosts, without_options

    words = without_options(sys.argv[1:], "--hosts", "--min-hosts")
    sys.exit(run_on_hosts(names, words, min_hosts=min_hosts or 0))


@o.takes(
    "resume_from accept_changes steps processes hosts min_hosts set_ dry_run json",
    run=o.argument(str, "The run's folder; the newest if not given.", "RUN"),
    steps=o.whole_number("Optimizer steps in all, for a run that is to be longer; e.g. 200."),
)
def resume(
    context: typer.Context,
    *,
    run: str | None,
    resume_from: str | None,
    steps: int | None,
    hosts: str | None,
    min_hosts: int | None,
    **_: Any,
) -> None:
    """Continue a stopped run from its newest checkpoint.

    The run continues exactly, to the bit. A change that would make it another run (settings, dataset,
    model, rewards) is an error that names it; --accept-changes goes on all the same.
    Fields of TRL's config of that run are options too; see docs/reliability.md.

    \b
    ycore resume runs/first
    ycore resume runs/first --processes 1
    ycore resume runs/first --resume-from 40 --learning-rate 1e-6 --accept-changes
    """
    _go_to(hosts, min_hosts)
    from ycore.api.running import can_go_on

    if run is None:
        for_longer = steps is not None or resume_from is not None
        newest = newest_run(
            "resume",
            lambda folder: can_go_on(folder, for_longer=for_longer),
            need="that is not finished (with --steps, any)",
        )
        run = str(newest)
    context.args = [run, *context.args]
    folder_word = _folder_among(context.args)
    context.args.remove(folder_word)
    folder = Path(folder_word).expanduser().absolute()
    if resume_from is not None and not resume_from.isdigit():
        resume_from = str(Path(resume_from).expanduser().absolute())
    algorithm = _enter(folder)
    context.params |= {"output": str(folder), "resume": True, "resume_from": resume_from}
    train_as_typed(context, algorithm)


def _folder_among(words: list[str]) -> str:
    """Find the run's folder among words that may also be options of TRL's, before it or after it."""
    for word in words:
        if not word.startswith("-") and RunFolder(Path(word).expanduser()).config.is_file():
            return word
    if words[0].startswith("-"):
        raise RunFolderError(
            f"ycore resume takes the folder of a run before its options; none of {' '.join(words)} is one; "
            f"say ycore resume runs/first {words[0]} ..."
        )
    raise RunFolderError(
        f"{Path(words[0]).expanduser().absolute()} holds no run.json, so no run that could go on; "
        "see `ycore resume --help`"
    )


def _enter(folder: Path) -> str:
    """Go where a training run was started, which its paths are relative to, and return its algorithm."""
    from ycore.run.claim import stored_config

    algorithm = stored_config(RunFolder(folder))["algorithm"]
    if algorithm == "eval":
        raise RunFolderError(
            f"{folder} holds an evaluation, which does not go on; run `ycore eval` again"
        )
    began_in = read_json(RunFolder(folder).config).get("directory")
    if isinstance(began_in, str) and Path(began_in).is_dir():
        os.chdir(began_in)
    return str(algorithm)


def train(
    config: "BaseConfig",
    *,
    resume: bool,
    resume_from: str | None = None,
    accept_changes: bool = False,
    dry_run: bool,
    show_rows: int = 1,
    json: bool = False,
) -> None:
    """Check, show the plan, and unless it is a dry run train in the foreground."""
    from ycore.api.running import run_training, training_plan
    from ycore.api.tables import folded, plan_rows
    from ycore.config.schema import RunConfig, TuneConfig
    from ycore.run.claim import Resume
    from ycore.run.resuming import outlook, parse_checkpoint

    if accept_changes and not resume:
        raise ConfigError(
            "--accept-changes is about a run that goes on; say --resume too, or leave it out"
        )
    family = FAMILIES.get(config.algorithm)
    with stdout_for_json(json):
        folder = RunFolder(Path(config.output))
        options = None
        if resume:
            step = None if resume_from is None else parse_checkpoint(resume_from, folder)
            options = Resume(step=step, accept_changes=accept_changes)
        result = training_plan(config, resume=options, show_rows=show_rows)
        if options is not None and dry_run:
            result["resume"] = outlook(folder, options)
        if not (json and dry_run):
            if family is None:
                rows = plan_rows(result, resume=resume)
            else:
                rows = load_reference(family.plan_rows)(config, result, resume=resume)
            resumed = (("resume", line) for line in result.get("resume", ()))
            print_table([*folded(rows), *folded(resumed)])
        if not dry_run:
            result = run_training(config, result, resume=options)
    if json:
        print_json(result)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to train.")
    elif family is not None:
        print_table(load_reference(family.closing_rows)(config))
    elif isinstance(config, RunConfig | TuneConfig):
        print_closing(config)


def pipeline(
    file: o.PipelineFile,
    model: o.Model = None,
    set_: o.StageSet = None,
    output: o.Output = None,
    resume: o.StageResume = False,
    dry_run: o.DryRun = False,
    json: o.Json = False,
) -> None:
    """Run stages, each with the output of earlier ones.

    \b
    ycore pipeline rlhf-pipeline --dry-run
    ycore pipeline stages.yaml --output runs/mine --set sft.steps=50
    ycore pipeline stages.yaml --output runs/mine --resume
    """
    from ycore.api.pipelines import parse_pipeline, report_rows, run_pipeline
    from ycore.config.recipe_files import PIPELINE, load_recipe, recipe_name

    with stdout_for_json(json):
        recipe = load_recipe(file, command=PIPELINE)
        options = {"model": model, "output": output}
        parsed = parse_pipeline(
            recipe, name=recipe_name(file), sets=set_ or (), options=options
        )
        report = run_pipeline(parsed, resume=resume, dry_run=dry_run, say=print_line)
    if json:
        print_json(report)
    elif dry_run:
        print("Nothing was started; leave out --dry-run to run it.")
    else:
        print_table([*report_rows(report), ("report", str(parsed.folder / "pipeline.json"))])
