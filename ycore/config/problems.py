"""Put what pydantic finds wrong into one line that a person can act on: the key, the rule, the value, the way out."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ycore.config.algorithms import Algorithm, AlgorithmEntry, commands_with
from ycore.config.trl_fields import familiar_options, fields_of
from ycore.errors import ConfigError, must_be, nearest

Path = tuple[str | int, ...]

_WAYS_OUT: Mapping[str, str] = {
    "lora": "write lora: {} for the defaults, or lora: null (--full) to train every weight",
    "rewards": "name one, e.g. --reward exact_answer",
}


def config_error(
    problem: ValidationError, data: Mapping[str, Any], entry: AlgorithmEntry
) -> ConfigError:
    """Name the first thing that is wrong: unknown keys before missing ones before bad values."""
    details = problem.errors(include_url=False)
    for detail in details:
        if detail["type"] == "extra_forbidden":
            return unknown_key(_existing(detail["loc"], data), entry)
    missing = [detail["loc"] for detail in details if detail["type"] == "missing"]
    if missing:
        return _missing(missing, entry)
    path = _existing(details[0]["loc"], data)
    same = [detail for detail in details if _existing(detail["loc"], data) == path]
    rule = must_be(_dotted(path), same)
    way_out = _WAYS_OUT.get(str(path[-1])) if path else None
    return ConfigError(f"{rule}; {way_out}" if way_out else rule)


def unknown_key(path: Path, entry: AlgorithmEntry) -> ConfigError:
    """Name an unknown key with the commands that have it, or the nearest keys: in its mapping, elsewhere, and of TRL."""
    *parents, key = path
    name = _dotted(path)
    text = str(key)
    trl_names = fields_of(entry.trl_config) if entry.trl_config else {}
    if parents == ["trl"]:
        return ConfigError(f"TRL has no field {text}{nearest(text, trl_names)}")
    commands = [] if parents else commands_with(text)
    if commands:
        has_it = " and ".join(f"ycore {command}" for command in commands[:2])
        return ConfigError(
            f"{name} is of {has_it}, and this is ycore {entry.name}; leave it out, or take ycore {commands[0]}; "
            f"--set {name}=null leaves a recipe's out"
        )
    model: type[BaseModel] | None = entry.config
    for part in parents:
        if isinstance(part, str):  # and not the number of a list's element
            field = model.model_fields.get(part) if model else None
            model = _model_in(field.annotation) if field else None
    known = list(model.model_fields) if model else []
    elsewhere = [
        other for other in _dotted_names(entry.config, "") if other.split(".")[-1] == text
    ]
    hint = nearest(elsewhere[0], elsewhere) if elsewhere else nearest(text, known)
    if not parents and not elsewhere:
        words = familiar_words("--" + text.replace("_", "-"), "VALUE", entry)
        hint = (
            f"; as an option it is {words}"
            if words
            else hint or nearest(text, trl_names, limit=1)
        )
        hint = hint or "; `ycore docs options` lists them"
    return ConfigError(f"no key {name}{hint or '; known here: ' + ', '.join(known)}")


def familiar_words(option: str, value: str, entry: AlgorithmEntry) -> str | None:
    """Find the words for an option that another trainer calls so."""
    familiar = familiar_options()
    kind = entry.learns_from if isinstance(entry, Algorithm) else "rollouts"
    words: str | None = (familiar["any"] | familiar[kind] | familiar.get(entry.name, {})).get(
        option
    )
    return words and words.replace("{}", shlex.quote(value))


def declared_error(
    problem: ValidationError, data: Mapping[str, Any], *, what: str, model: type[BaseModel]
) -> ConfigError:
    """The first thing that is wrong with an object outside of a run's config, such as a judge.

    Args:
        what: names the object at the start of the message.
        model: the class that refused `data`.
    """
    details = problem.errors(include_url=False)
    detail = next(
        (detail for detail in details if detail["type"] == "extra_forbidden"), details[0]
    )
    path = _existing(detail["loc"], data)
    kind = detail["type"]
    name = _dotted(path)
    if kind == "extra_forbidden":
        known = [key for key in model.model_fields if key not in data] if len(path) == 1 else []
        hint = nearest(str(path[-1]), known) or (
            f"; known are {', '.join(model.model_fields)}" if known else ""
        )
        return ConfigError(f"{what}: no key {name}{hint}")
    if kind == "value_error":
        return ConfigError(f"{what}: {detail['msg'].removeprefix('Value error, ')}")
    if kind == "missing":
        return ConfigError(f"{what}: {_dotted(detail['loc'])} is missing")
    if kind.startswith("union_tag"):
        kinds = detail.get("ctx", {}).get("expected_tags")
        return ConfigError(
            f"{what}: {name} must say its kind" + (f": {kinds}" if kinds else "")
        )
    return ConfigError(f"{what}: {must_be(name, [detail])}")


def _missing(places: Sequence[Path], entry: AlgorithmEntry) -> ConfigError:
    options = {
        "model": f"--model {entry.model}",
        "dataset": f"--dataset {entry.dataset}",
        "rewards": f"--reward {entry.reward}",
    }
    top = [str(place[0]) for place in places if len(place) == 1 and place[0] in options]
    if not top:
        return ConfigError(
            f"{_dotted(places[0])} is missing; write it, e.g. {{{places[0][-1]}: ...}}"
        )
    example = " ".join(options[name] for name in top)
    return ConfigError(
        f"no {' and no '.join(top)} given; say e.g. {example}, or --recipe (`ycore recipes` lists them)"
    )


def _existing(place: Path, data: Any) -> Path:
    """An error's path in the data, without the names that pydantic adds for a union's branches."""
    path: list[str | int] = []
    for part in place:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
            path.append(part)
    return tuple(path)


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path) or "a key"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        model = _model_in(part)
        if model is not None:
            return model
    return None


def _dotted_names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None and name != "rewards":
            yield from _dotted_names(inner, f"{prefix}{name}.")
        else:
            yield prefix + name
