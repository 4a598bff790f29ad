"""Recipes: whole runs by name, in YAML. The shipped ones are the package `ycore_recipes`."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from ycore.config.algorithms import ALGORITHMS, FAMILIES
from ycore.config.schema import Positive, Strict, is_one_file
from ycore.errors import ConfigError, UserError, must_be, nearest
from ycore.run.files import check_plain, read_regular
from ycore.types import JsonObject, Record

SUFFIXES = (".yaml", ".yml")
PIPELINE = "pipeline"
_MAX_BYTES = 2**20  # PyYAML takes 10 s for so much
_MAX_VALUES = 100_000
_UNREADABLE = (
    yaml.YAMLError,
    ValueError,
    OverflowError,
    TypeError,
    AttributeError,
    RecursionError,
)


def read_yaml_file(
    file: Path, *, what: str, way_out: str, error: type[UserError] = ConfigError
) -> str:
    """The text of a YAML file; an `error` where it does not exist or is no text.

    Args:
        what: the kind of file, for messages; e.g. `recipe`.
        way_out: the end of the message where there is no such file and none with a similar name.
    """
    try:
        return str(read_regular(file, max_bytes=_MAX_BYTES), "utf-8")
    except FileNotFoundError:
        siblings = [path.name for path in file.parent.glob("*") if path.suffix in SUFFIXES]
        raise error(
            f"no such {what} file: {file}{nearest(file.name, siblings, limit=1) or f'; {way_out}'}"
        ) from None
    except (OSError, ValueError) as problem:
        raise error(f"the {what} {file} cannot be read as text: {problem}") from None


def parse_yaml(
    text: str, *, what: str, example: str, error: type[UserError] = ConfigError
) -> JsonObject:
    """The keys of a YAML text; an `error` where it is no mapping of keys.

    Args:
        what: names the text in messages; e.g. `the recipe quickstart`.
        example: a key that such a text may have, for messages.
    """
    try:
        parsed = check_plain(yaml.safe_load(text), max_values=_MAX_VALUES)
    except yaml.MarkedYAMLError as problem:
        line = f", line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise error(f"{what}{line}: not YAML: {problem.problem or problem.context}") from None
    except _UNREADABLE as problem:
        raise error(f"{what} is not YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        kind = "empty" if parsed is None else f"a {type(parsed).__name__}"
        raise error(f"{what} must be a mapping of keys such as `{example}: ...`; it is {kind}")
    return parsed


@dataclass(frozen=True)
class RecipeEntry:
    """A shipped recipe, and the command that runs it."""

    name: str
    description: str
    command: str
    never_run: str
    """Why nobody has run it to its end where its figures would come from; empty where somebody has."""

    @property
    def line(self) -> str:
        """The words after `ycore` that run it."""
        return _line(self.command, self.name)


def list_recipes() -> list[RecipeEntry]:
    """List the shipped recipes, by name."""
    entries = ((name, _parsed(text, name)) for name, text in _shipped())
    return [
        RecipeEntry(
            name,
            str(recipe.get("description", "")),
            _command(recipe) or "grpo",
            recipe.get("never_run", ""),
        )
        for name, recipe in sorted(entries)
    ]


def load_recipe(name_or_file: str, *, command: str | None = None) -> JsonObject:
    """The keys of a shipped recipe or a YAML file, less those for readers; ConfigError if it is not for `command`."""
    shipped = dict(_shipped())
    if name_or_file in shipped:
        text = shipped[name_or_file]
    elif _is_file(name_or_file):
        way_out = "`ycore recipes` lists those that come with ycore"
        text = read_yaml_file(Path(name_or_file).expanduser(), what="recipe", way_out=way_out)
    else:
        known = [entry.name for entry in list_recipes() if _serves(entry.command, command)]
        near = nearest(name_or_file, known) or f"; there are {', '.join(known)}"
        raise ConfigError(f"no recipe {name_or_file!r}{near}")
    recipe = _parsed(text, name_or_file)
    for about in ("description", "never_run"):  # for readers
        recipe.pop(about, None)
    wanted = _command(recipe)
    if not _serves(wanted, command):
        raise ConfigError(
            f"the recipe {name_or_file} is for `ycore {wanted}`, not {command}; "
            f"say ycore {_line(str(wanted), name_or_file)}"
        )
    return recipe


class Halving(Strict):
    """Successive halving: all combinations run to the first of `steps`, and the best 1 / `factor` go on to the next."""

    # None is the recipe's own.
    steps: list[Positive | None] = Field(default=[None], min_length=1)
    factor: Annotated[int, Field(ge=2)] = 2


class Sweep(Strict):
    """The keys of a sweep's file."""

    recipe: str
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    halving: Halving = Halving()

    def settings(self, keys: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the `--set` of each combination by its folder; of a recipe itself one with nothing.

        Example: `grid: {lora.r: [4, 8]}` gives `{"lora.r=4": ["lora.r=4"], "lora.r=8": ["lora.r=8"]}`.

        Args:
            keys: the key of each option that has another name.
        """
        lists = (
            [f"{keys.get(key, key)}={json.dumps(value)}" for value in values]
            for key, values in self.grid.items()
        )
        return {
            ",".join(sets).replace('"', "").replace("/", "%2F"): [*sets]
            for sets in product(*lists)
        }


def read_sweep(recipe: str) -> Sweep:
    """Read a sweep's file; of a recipe itself its one combination, without settings."""
    keys = load_recipe(recipe)
    if "grid" not in keys:
        return Sweep(recipe=recipe)
    try:
        sweep = Sweep.model_validate(keys)
    except ValidationError as problem:
        detail = problem.errors(include_url=False)[0]
        raise ConfigError(
            f"the sweep {recipe}: {must_be('.'.join(map(str, detail['loc'])), [detail])}; write e.g. recipe: quickstart, "
            "grid: {learning_rate: [1.0e-5, 1.0e-4]}, halving: {steps: [20, 40], factor: 2}"
        ) from None
    _check_sweep(recipe, sweep)
    return sweep


def _check_sweep(name: str, sweep: Sweep) -> None:
    steps = sweep.halving.steps
    numbers = [math.inf if number is None else number for number in steps]
    if numbers != sorted(set(numbers)):
        raise ConfigError(
            f"the sweep {name}: halving.steps must grow, with null as the last; they are {json.dumps(steps)}; write e.g. "
            "[20, 60, null]"
        )
    if len(steps) > 1 and steps[-1] is None and "steps" not in load_recipe(sweep.recipe):
        raise ConfigError(
            f"the sweep {name}: null in halving.steps is the recipe's steps, and {sweep.recipe} has none; write a number"
        )
    instead = {"seed": "--seeds N", "output": "--output FOLDER"}
    if len(steps) > 1:
        instead["steps"] = "halving.steps"
    for key in instead.keys() & sweep.grid.keys():
        raise ConfigError(
            f"the sweep {name}: {key} is not of the grid, it is {sweep.grid[key]}; take {instead[key]}"
        )
    try:
        json.dumps(sweep.grid)
    except TypeError as problem:
        raise ConfigError(
            f"the sweep {name}: grid: {problem}; write numbers, words, or lists of them, and a date in quotes"
        ) from None


def benchmarks() -> JsonObject:
    """Every benchmark by name."""
    text = Path(__file__).with_name("benchmarks.yaml").read_text(encoding="utf-8")
    rows: JsonObject = yaml.safe_load(text)
    return rows


def load_benchmark(name: str, *, dataset: object = None) -> JsonObject:
    """`title`, `source`, and under `run` the keys of its evaluation; `file` where it is fetched. ConfigError.

    A `dataset` that is a file takes the place of the benchmark's rows, and has no splits.
    """
    rows = benchmarks()
    key = "gym:NAME" if name.startswith("gym:") and "?" not in name else name
    if key not in rows:
        raise ConfigError(
            f"a benchmark is one of {', '.join(rows)}; it is {name!r}{nearest(name, rows)}; "
            "other data is evaluated with --dataset and --reward"
        )
    row: JsonObject = rows[key]
    row["run"]["dataset"] = row["run"]["dataset"].replace(key, name)
    if isinstance(dataset, str) and is_one_file(dataset):
        row["run"].pop("split", None)
    return row


def _command(recipe: Record) -> str | None:
    """The command that a recipe names by its `algorithm`, or shows by having stages, rewards or an environment."""
    if "stages" in recipe:
        return PIPELINE
    if recipe.get("algorithm") is not None:
        return str(recipe["algorithm"])
    return "grpo" if "rewards" in recipe or "env" in recipe else None


def _serves(wanted: str | None, command: str | None) -> bool:
    """A recipe with rollouts serves every command that has them; another recipe serves its own command."""
    if wanted is None or command is None or wanted == command:
        return True
    exclusive = {
        PIPELINE,
        *FAMILIES,
        *(name for name, row in ALGORITHMS.items() if row.learns_from == "examples"),
    }
    return wanted not in exclusive and command not in exclusive


def _line(command: str, name: str) -> str:
    return f"{command} {name}" if command == PIPELINE else f"{command} --recipe {name}"


def recipe_name(name_or_file: str) -> str:
    """The name of a run of this recipe: the recipe's name, or its file's without the suffix."""
    return Path(name_or_file).stem if _is_file(name_or_file) else name_or_file


def _shipped() -> Iterator[tuple[str, str]]:
    for entry in files("ycore_recipes").iterdir():
        if entry.name.endswith(".yaml"):
            yield entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8")


def _is_file(name: str) -> bool:
    return name.endswith(SUFFIXES) or "/" in name or Path(name).is_file()


def _parsed(text: str, name: str) -> JsonObject:
    return parse_yaml(text, what=f"the recipe {name}", example="model")
