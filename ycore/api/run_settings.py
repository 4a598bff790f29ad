"""Make the config of a run from the arguments of ycore's Python functions, or of a run that exists; complete it here."""

import asyncio
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar, cast

from ycore.config.presets import find_preset
from ycore.config.recipe_files import load_benchmark
from ycore.config.resolve import resolve
from ycore.config.schema import AnyConfig, BaseConfig, MixturePart, RunConfig, ScoredConfig
from ycore.config.trl_fields import OWN_DEFAULTS
from ycore.data.cells import without_nulls
from ycore.errors import ConfigError
from ycore.judge.declaration import with_declarations
from ycore.launch import layout
from ycore.launch.device_memory import fit_devices
from ycore.run.claim import flat, stored_config
from ycore.run.files import RunFolder, named_by_content, write_bytes_atomic
from ycore.run.secrets import redact
from ycore.sandbox.pickled_code import code_references
from ycore.types import JsonObject, Record

_Config = TypeVar("_Config", bound=BaseConfig)

Reward = str | Callable[..., Sequence[float | None]] | Record
"""A name as `--reward` takes it, a function in TRL's shape, or a mapping such as `{"reward": f, "weight": 0.5}`."""

Rewards = Reward | Sequence[Reward]

Rows = str | Iterable[Record]
"""A dataset's name as `--dataset` takes it, or rows: a list of mappings, a `datasets.Dataset` or a frame of pandas."""

MAIN_FIELDS = ("loss_type", "beta", "temperature", "num_iterations")
"""Fields of TRL's that a plan always shows, beside the learning rate."""

_FUNCTIONS = {
    "rewards": "reward",
    "eval_rewards": "reward",
    "tools": "tool",
    "env": "environment",
}
"""Keys that take functions or classes, and what messages call these."""


def rollout_settings(
    model: str, dataset: Rows, reward: Rewards, settings: Record
) -> JsonObject:
    """Collect the settings of a run with rollouts; an empty `dataset` or `reward` was not given."""
    collected: JsonObject = {"model": model}
    if not isinstance(dataset, str) or dataset:
        collected["dataset"] = dataset
    if rewards := _listed(reward):
        collected["rewards"] = rewards
    return {**collected, **settings}


def _listed(value: Any) -> list[Any]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list else [value]


def settings_config(algorithm: str, settings: Record, *, resume: bool = False) -> AnyConfig:
    """Validate the settings over those of the run that goes on, or of an evaluation's benchmark.

    Rows and functions are written beside the run's folder, and stand in it by their files.
    """
    keys = _with_files(algorithm, settings)
    base = stored_settings(keys["output"]) if resume else {}
    if algorithm == "eval" and "benchmark" in keys:
        base = load_benchmark(keys.pop("benchmark"), dataset=keys.get("dataset"))["run"]
    return complete_config(resolve(recipe=base, options=keys))


def _with_files(algorithm: str, settings: Record) -> JsonObject:
    """Choose a folder, write rows and functions into files beside it, and return the keys of the config."""
    output = Path(settings.get("output") or unused_folder(f"runs/{algorithm}")).expanduser()
    settings = {**settings, "output": str(output)}
    for key in ("dataset", "eval_dataset"):
        rows = settings.get(key)
        if isinstance(rows, list) and all(map(_names_dataset, rows)):
            continue  # several datasets
        if not isinstance(rows, str | None):
            file = output.with_name(f"{output.name}.{key}.jsonl")
            settings[key] = str(_write_rows(settings[key], file))
    for key, kind in _FUNCTIONS.items():
        if key in settings:
            file = output.with_name(f"{output.name}.{key}.py").absolute()
            settings[key] = _with_names(settings[key], kind, file)
    return keys_of(algorithm, settings)


def _names_dataset(item: Any) -> bool:
    """Tell whether an item of a list is a dataset's name, or one of several with its settings, and no row."""
    is_part = isinstance(item, Mapping) and item.keys() <= MixturePart.model_fields.keys()
    return isinstance(item, str) or (is_part and isinstance(item.get("dataset"), str))


def keys_of(algorithm: str, settings: Record) -> JsonObject:
    """Return the settings as keys of a config."""
    keys = {"algorithm": algorithm, **settings}
    for key, inner_key in (("engine", "kind"), ("sandbox", "level")):
        if isinstance(keys.get(key), str):
            keys[key] = {inner_key: keys[key]}
    return keys


_IN_OTHER_ROWS = """
    algorithm model dataset mixture output rewards tools env agent max_turns preset
    prompts_per_step group_size batch_size max_tokens num_samples pairs
    steps epochs seed dtype processes lora lora.r engine.kind
    eval_dataset eval_every eval_rewards held_out
"""
"""Settings that a plan shows in rows of their own."""


def changed_settings(config: AnyConfig, *, trains: bool) -> dict[str, list[Any]]:
    """Return the settings that are not at their default and in no other row of a plan, each with its default.

    What an algorithm sets by itself is its default; a preset's settings have rows of their own. Of TRL's fields a
    measurement reads those of sampling alone.
    """
    defaults = _by_name(type(config).model_construct().model_dump(mode="json"))
    defaults |= {**config.algorithm_row.trl_defaults, **OWN_DEFAULTS}
    settings = redact(config.model_dump(mode="json"))
    in_other_rows = _IN_OTHER_ROWS.split()
    if trains:
        in_other_rows += [*MAIN_FIELDS, "learning_rate"]
    else:
        settings["trl"] = config.changed_sampling if isinstance(config, RunConfig) else {}
    if (preset := settings.get("preset")) is not None:
        defaults |= _by_name(find_preset(preset).layer)
    return {
        name: [value, defaults.get(name)]
        for name, value in _by_name(settings).items()
        if name not in in_other_rows and value != defaults.get(name)
    }


def _by_name(settings: Record) -> JsonObject:
    """Return all settings by their dotted names, TRL's fields by TRL's."""
    return {**flat({**settings, "trl": {}}), **settings["trl"]}


def main_settings(config: AnyConfig) -> JsonObject:
    """Return the loss and TRL's main fields of the run, also where they are at their defaults."""
    values = config.algorithm_row.trl_defaults | config.trl
    loss_from = getattr(config, "loss_from", "grpo")
    if loss_from != "grpo":
        values["loss_type"] = loss_from
    return {name: values[name] for name in MAIN_FIELDS if name in values}


def tell_warnings(plan: Record, *, depth: int) -> None:
    """Give a plan's warnings as Python's, for the line of the caller that is `depth` calls away."""
    for line in plan["warnings"]:
        warnings.warn(line, stacklevel=depth)


def outside_event_loop(call: Callable[[], JsonObject]) -> JsonObject:
    """Call in another thread where this one runs an event loop, as a notebook does: a thread can have only one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _with_names(functions: Any, kind: str, file: Path) -> list[Any]:
    """Write functions or classes into a file, and name them as the config does; a mapping's keys name environments."""
    if isinstance(functions, Mapping):
        named = code_references(list(functions.values()), file, kind=kind)
        return [f"{name}={reference}" for name, reference in zip(functions, named, strict=True)]
    return code_references(_listed(functions), file, kind=kind)


def _write_rows(rows: Any, file: Path) -> Path:
    """Write the rows as JSONL into a file that is named by its content too; ConfigError for a row that is not JSON."""
    if hasattr(rows, "iterrows"):  # a frame of pandas is a mapping of columns
        rows = rows.to_dict("records")
    is_arrow = hasattr(rows, "features")  # of the datasets library
    lines = []
    for number, row in enumerate(rows):
        try:
            if is_arrow:
                row = {name: without_nulls(value) for name, value in row.items()}
            lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as problem:
            raise ConfigError(
                f"row {number} of the dataset is no mapping of plain values: {problem}"
            ) from None
    file.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(lines).encode()
    file = named_by_content(file, content)
    write_bytes_atomic(file, content)
    return file


def complete_config(config: _Config) -> _Config:
    """Read the files of judges into the config, and settle what `auto` and what is left open mean on this machine."""
    if isinstance(config, ScoredConfig):
        config = with_declarations(config)
    machine = layout.this_machine()
    config = layout.on_machine(config, machine)
    return (
        cast(_Config, fit_devices(config, machine)) if isinstance(config, RunConfig) else config
    )


def stored_settings(run: str) -> JsonObject:
    """Read the settings of a run's folder; {} where it holds none. Its secrets are `***`, and must be given again."""
    folder = RunFolder(Path(run).expanduser())
    return stored_config(folder) if folder.config.is_file() else {}


def unused_folder(output: str) -> str:
    """Return `output`, or the first unused of `output-2`, `-3`, ..., so that a command can be repeated."""
    names = itertools.chain([output], (f"{output}-{count}" for count in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())
