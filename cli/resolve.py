"""From what was typed to a RunConfig: the recipe, `--set`, the declared options and TRL's fields, in this order.

Not here: the merge itself (`ycore.config.overrides`) and every check that needs a disk (`plan`).
"""

from pathlib import Path
from typing import Any

import typer
from ycore_cli.options import config_keys
from ycore_cli.trl_options import trl_options

from ycore.config.run import RunConfig


def resolve_config(context: typer.Context, *, algorithm: str, resume: bool = False) -> RunConfig:
    """The validated RunConfig of a command, from its parsed options and the arguments that it does not declare."""
    from ycore.config.overrides import resolve
    from ycore.config.recipes import load_recipe, recipe_name

    params = context.params
    options = config_keys(params) | {"algorithm": algorithm}
    trl = trl_options(context.args, declared=declared_options(context))
    if trl:
        options["trl"] = trl
    recipe = params.get("recipe")
    base = load_recipe(recipe) if recipe else _stored(options.get("output"), resume=resume)
    if algorithm == "eval":
        base.pop("output", None)  # a recipe's own folder is its training run's
    run_name = recipe_name(recipe) if recipe else None
    return resolve(recipe=base, sets=params.get("set_") or (), options=options, run_name=run_name)


def declared_options(context: typer.Context) -> list[str]:
    """Every `--option` that the command declares."""
    parameters = context.command.params
    return [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]


def _stored(output: str | None, *, resume: bool) -> dict[str, Any]:
    """The configuration of the run that is to go on, so that `--resume --output DIR` is enough.

    Secrets are not kept on disk, so they are left out here, to be given again.
    """
    from ycore.run_folder.files import read_json
    from ycore.run_folder.paths import RunFolder
    from ycore.run_folder.secrets import HIDDEN

    if not resume or output is None or not (file := RunFolder(Path(output)).config).is_file():
        return {}
    stored = read_json(file)
    config = stored.get("config") if isinstance(stored, dict) else None
    if not isinstance(config, dict):
        return {}
    return config | {"trl": {name: value for name, value in config.get("trl", {}).items() if value != HIDDEN}}
