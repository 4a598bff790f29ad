"""Secrets: tokens, keys and passwords become `***` in what a run writes, and reach only the process that trains.

They cross in one environment variable of that process, which it removes when it has read it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any

from ycore.errors import ConfigError
from ycore.run.files import read_json
from ycore.run.paths import RunFolder
from ycore.run.secret_shapes import HIDDEN, has_hidden_part, is_secret, redact_text

VARIABLE = "YCORE_SECRETS"
"""JSON: `[[path, value], ...]`, a path being the keys and list indices that lead to the value."""

Path = tuple[str | int, ...]


def redact(value: Any) -> Any:
    """`value` with every secret in it replaced, whatever it is nested in."""
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if _hides(key, item) else redact(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [redact(item) for item in value]
    return value


def _hides(key: Any, item: Any) -> bool:
    return item is not None and not isinstance(item, bool) and is_secret(str(key), item)


def redact_command(command: Sequence[str]) -> list[str]:
    """A command line with its secrets replaced: `--hub-token X`, `--hub-token=X`, `--set trl.hub_token=X`."""
    shown: list[str] = []
    option = ""  # that the next word belongs to
    for word in command:
        name, equals, value = word.partition("=")
        if option and is_secret(option, word):
            shown.append(HIDDEN)
        elif equals and is_secret(name, value):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(redact_text(word))
        option = word if word.startswith("-") and not equals else ""
    return shown


def secrets_environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The variable that gives a worker what run.json hides of these settings (JSON values), if anything."""
    shown_and_real = ((path, shown, _at(config, path)) for path, shown in _leaves(redact(config)))
    hidden = [(path, real) for path, shown, real in shown_and_real if real != shown]
    return {VARIABLE: json.dumps(hidden)} if hidden else {}


def load_config(folder: RunFolder) -> dict[str, Any]:
    """The settings in run.json with their secrets put back, where the launcher passed them to this process."""
    config: dict[str, Any] = read_json(folder.config)["config"]
    for path, value in json.loads(os.environ.pop(VARIABLE, "[]")):
        _at(config, path[:-1])[path[-1]] = value
    return config


def without_hub_token(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run.json without their hidden `hub_token`, if the variable HF_TOKEN holds one: the hub reads it."""
    trl = dict(config.get("trl") or {})
    if trl.get("hub_token") == HIDDEN and os.environ.get("HF_TOKEN"):
        del trl["hub_token"]
    return {**config, "trl": trl}


def check_secrets(config: Mapping[str, Any]) -> None:
    """Raise ConfigError, with the option to give again, where settings of a run.json have `***` for a secret."""
    for path, value in _leaves(config):
        if isinstance(value, str) and has_hidden_part(value):
            name, named = ".".join(map(str, path)), path[1:] if path[0] == "trl" else path
            option = f"--{str(named[0]).replace('_', '-')}" if len(named) == 1 else f"--set {name}=..."
            raise ConfigError(
                f"run.json does not keep {name}, a secret; give {option} again"
                + (", or set the environment variable HF_TOKEN" if name == "trl.hub_token" else "")
            )


def _at(config: Any, path: Path) -> Any:
    return reduce(getitem, path, config)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
