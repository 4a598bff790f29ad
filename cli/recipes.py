"""`ycore recipes`: the shipped runs by name. Not here: how a recipe is read (`ycore.config.recipes`)."""

import typer
from ycore_cli import options as o


def recipes(context: typer.Context, json: o.Json = False) -> None:
    """List the recipes that come with ycore.

    \b
    ycore recipes
    ycore grpo --recipe quickstart --dry-run
    """
    from ycore_cli.output import print_json, print_table

    from ycore.config.recipes import list_recipes

    entries = list_recipes()
    if json:
        print_json({"recipes": [{"name": entry.name, "description": entry.description} for entry in entries]})
        return
    print_table((entry.line, entry.description) for entry in entries)
    print("Run one with `ycore` before its line; a path to your own YAML file works too.")
