"""Offer the values of options on Tab; Typer completes the names of commands and options by itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from ycore_cli.options import KEYS

from ycore.config.algorithms import ENTRIES
from ycore.config.trl_fields import fields_of

_RUNS = {"run", "runs", "model", "replay", "teacher"}


def complete(command: Any) -> None:
    """Let every parameter offer its values."""
    for parameter in command.params:
        parameter._custom_shell_complete = _offer_values


def _offer_values(context: Any, parameter: Any, incomplete: str) -> list[str]:
    values = _values(context.command.name, parameter.name)
    return [value for value in values if value.startswith(incomplete)]


def _values(command_name: str, name: str) -> Sequence[str]:
    """Return the values of a parameter: of its key's type, or of TRL's field; the run folders for a RUN."""
    from ycore.config.presets import presets
    from ycore.config.recipe_files import benchmarks, list_recipes
    from ycore.rewards.builtin import BUILTIN, CODE

    if name in _RUNS:
        return [str(file.parent) for file in sorted(Path().glob("runs/*/run.json"))]
    if name in ("recipe", "file"):
        return [recipe.name for recipe in list_recipes()]
    if name in ("reward", "eval_reward", "constraint"):
        return [*BUILTIN, CODE]
    if name == "preset":
        return list(presets())
    if name == "benchmark":
        return list(benchmarks())
    if name in _OTHERS:
        return _OTHERS[name]
    key = KEYS.get(name, name)
    entry = ENTRIES.get(command_name, ENTRIES["grpo"])
    fields = fields_of(entry.trl_config) if entry.trl_config else {}
    if key in fields and fields[key].choices:
        return fields[key].choices
    return list(_literals(entry.config, key))


_OTHERS = {
    "form": ("merged", "gguf"),
    "placement": ("dynamic", "colocated"),
    "accelerate": ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"),
}


def _literals(annotation: Any, key: str) -> Iterator[str]:
    """Yield the words that a key of a config takes."""
    for part in filter(None, key.split(".")):
        fields = getattr(annotation, "model_fields", {})
        annotation = fields[part].annotation if part in fields else None
    for inner in get_args(annotation):
        if isinstance(inner, str):
            yield inner
        else:
            yield from _literals(inner, "")
