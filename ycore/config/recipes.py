"""Recipes: whole runs by name, in YAML; the shipped ones are the package `ycore_recipes`.

Not here: what a recipe's keys mean (`run`) and how options change them (`overrides`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ycore.config.kinds import is_tuning
from ycore.errors import ConfigError, nearest

PIPELINE = "pipeline"

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """A shipped recipe as a list shows it."""

    name: str
    description: str
    command: str = "grpo"
    """The command that it is for."""

    @property
    def line(self) -> str:
        """What is typed after `ycore` to run it."""
        return _line(self.command, self.name)


def list_recipes() -> list[RecipeEntry]:
    """The shipped recipes, by name."""
    entries = ((name, _parsed(text, name)) for name, text in _shipped())
    return [
        RecipeEntry(name, str(recipe.get("description", "")), _command(recipe) or "grpo")
        for name, recipe in sorted(entries)
    ]


def load_recipe(name_or_file: str, *, command: str | None = None) -> dict[str, Any]:
    """The keys of a shipped recipe or of a YAML file, without its description; ConfigError if not for `command`."""
    shipped = dict(_shipped())
    if name_or_file in shipped:
        text = shipped[name_or_file]
    elif _means_a_file(name_or_file):
        text = _read(Path(name_or_file).expanduser())
    else:
        known = ", ".join(sorted(shipped))
        raise ConfigError(f"no recipe {name_or_file!r}{nearest(name_or_file, shipped) or f'; there are {known}'}")
    recipe = _parsed(text, name_or_file)
    recipe.pop("description", None)
    _check_command(recipe, name_or_file, command)
    return recipe


def _command(recipe: Mapping[str, Any]) -> str | None:
    """The command of a recipe, where it says so: by `algorithm`, or by having stages or rewards."""
    if "stages" in recipe:
        return PIPELINE
    named = recipe.get("algorithm")
    return str(named) if named is not None else "grpo" if "rewards" in recipe else None


def _check_command(recipe: Mapping[str, Any], name: str, command: str | None) -> None:
    """A recipe of rollouts serves every command that asks an engine; the others serve their own."""
    wanted = _command(recipe)
    if wanted is None or command is None or wanted == command:
        return
    if not any(is_tuning(one) or one == PIPELINE for one in (wanted, command)):
        return
    raise ConfigError(f"the recipe {name} is for `ycore {wanted}`, not {command}; say ycore {_line(wanted, name)}")


def _line(command: str, name: str) -> str:
    return f"{command} {name}" if command == PIPELINE else f"{command} --recipe {name}"


def recipe_name(name_or_file: str) -> str:
    """What a run of this recipe is called: the recipe's name, or its file's without the suffix."""
    return Path(name_or_file).stem if _means_a_file(name_or_file) else name_or_file


def _shipped() -> Iterator[tuple[str, str]]:
    for entry in files("ycore_recipes").iterdir():
        if entry.name.endswith(".yaml"):
            yield entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8")


def _means_a_file(name: str) -> bool:
    return name.endswith(_SUFFIXES) or "/" in name or Path(name).is_file()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [path.name for path in file.parent.glob("*") if path.suffix in _SUFFIXES]
        raise ConfigError(f"no such recipe file: {file}{nearest(file.name, siblings, limit=1)}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the recipe {file} cannot be read as text: {problem}") from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    import yaml

    try:
        recipe = yaml.safe_load(text)
    except yaml.MarkedYAMLError as problem:
        line = f", line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise ConfigError(f"the recipe {name}{line}: not YAML: {problem.problem or problem.context}") from None
    except yaml.YAMLError as problem:
        raise ConfigError(f"the recipe {name} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(recipe, dict) or not all(isinstance(key, str) for key in recipe):
        kind = "empty" if recipe is None else f"a {type(recipe).__name__}"
        raise ConfigError(f"the recipe {name} must be a mapping of keys such as `model: ...`; it is {kind}")
    return recipe
