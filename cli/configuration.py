"""From what was typed to a RunConfig: the recipe, `--set`, the declared options and TRL's fields, in this order.

Not here: the merge itself (`ycore.config.resolve`) and every check that needs a disk (`plan`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from ycore_cli.options import config_keys, trl_options

from ycore.config.schema import Method, RunConfig, TuneConfig


def resolve_config(context: typer.Context, *, algorithm: str, resume: bool = False) -> RunConfig:
    """The validated RunConfig of a command, from its parsed options and the arguments that it does not declare."""
    from ycore.config.recipe_files import load_recipe, recipe_name
    from ycore.config.resolve import resolve
    from ycore.judge.sources import with_declarations

    params = context.params
    options = config_keys(params) | {"algorithm": algorithm}
    trl = trl_options(context.args, declared=declared_options(context))
    if trl:
        options["trl"] = {**options.get("trl", {}), **trl}
    recipe = params.get("recipe")
    base = load_recipe(recipe, command=algorithm) if recipe else _stored(options, resume=resume)
    if algorithm == "eval":
        base.pop("output", None)  # a recipe's own folder is its training run's
    run_name = recipe_name(recipe) if recipe else None
    config = resolve(recipe=base, sets=params.get("set_") or (), options=options, run_name=run_name)
    return with_declarations(config)


def resolve_tuning(context: typer.Context, *, method: Method, resume: bool = False) -> TuneConfig:
    """The same for a command that trains on given examples."""
    from ycore.config.algorithms import tune_kind
    from ycore.config.recipe_files import load_recipe, recipe_name
    from ycore.config.resolve import resolve_as

    params, kind = context.params, tune_kind(method)
    options = config_keys(params) | {"algorithm": method}
    trl = trl_options(context.args, declared=declared_options(context), trl_class=kind.trl_class)
    if trl:
        options["trl"] = {**options.get("trl", {}), **trl}
    recipe = params.get("recipe")
    base = load_recipe(recipe, command=method) if recipe else _stored(options, resume=resume)
    run_name = recipe_name(recipe) if recipe else None
    return resolve_as(kind, recipe=base, sets=params.get("set_") or (), options=options, run_name=run_name)


def declared_options(context: typer.Context) -> list[str]:
    """Every `--option` that the command declares."""
    parameters = context.command.params
    return [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]


def unused_folder(output: str) -> str:
    """`output`, or `output-2`, `-3`, ...: measuring again by the same command does not collide with the last time."""
    candidate, count = output, 1
    while Path(candidate).exists():
        count += 1
        candidate = f"{output}-{count}"
    return candidate


def stored_config(run: str) -> dict[str, Any]:
    """The settings of a run's folder; {} where it holds none. Its secrets are `***`, and must be given again."""
    from ycore.run.claim import held_config
    from ycore.run.paths import RunFolder
    from ycore.run.secrets import without_hub_token

    folder = RunFolder(Path(run).expanduser())
    if not folder.config.is_file():
        return {}
    return without_hub_token(held_config(folder))


def _stored(options: Mapping[str, Any], *, resume: bool) -> dict[str, Any]:
    """The settings of the run that is to go on, or to be replayed, so that its folder is enough."""
    if resume and options.get("output"):
        return stored_config(options["output"])
    if options.get("replay"):
        run = options["replay"].rstrip("/")
        return stored_config(run) | {"output": f"{run}-replay", "keep_journal": False}
    return {}
