"""Where a run's values come from: a preset, then a recipe, then `--set key.path=value`, then options; the later wins.

resolve(recipe={"model": "m", ...}, sets=["engine.count=2"], options={"steps": 3, "trl": {"beta": "0.1"}})
"""

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ycore.config.algorithms import (
    Algorithm,
    AlgorithmEntry,
    commands_with,
    find_algorithm,
    find_entry,
)
from ycore.config.presets import find_preset
from ycore.config.schema import AnyConfig, BaseConfig, RunConfig, TuneConfig
from ycore.config.trl_arguments import alias_value, aliases, refusal
from ycore.config.trl_fields import coerce, familiar_options
from ycore.errors import ConfigError, RewardError, UserError, must_be, nearest
from ycore.run.files import RunFolder, check_plain
from ycore.run.secrets import load_config
from ycore.types import JsonObject, Record

_Declared = TypeVar("_Declared", bound=BaseModel)


def resolve(**layers: Any) -> AnyConfig:
    """Resolve the config of a run that TRL trains or that is measured; the layers are those of `resolve_any`."""
    config = resolve_any(**layers)
    find_algorithm(config.algorithm)
    assert isinstance(config, RunConfig | TuneConfig)
    return config


def resolve_any(
    *,
    recipe: Record | None = None,
    sets: Sequence[str] = (),
    options: Record | None = None,
    run_name: str | None = None,
) -> BaseConfig:
    """Merge the layers and validate them with the config class of their `algorithm`, GRPO's without one.

    Args:
        recipe: the keys of a recipe, or of a run.json.
        sets: `key.path=value` with a YAML value.
        options: keys; under `trl`, fields of TRL's, which may still be text.
        run_name: names the output folder where none was given.

    Raises:
        ConfigError: a key is wrong, or two contradict each other.
    """
    plain, indexed = parse_sets(sets)
    layers = [recipe or {}, plain, options or {}]
    entry = find_entry(_topmost("algorithm", layers) or "grpo")
    if entry.name == "eval":  # of a training recipe it takes the keys that it has
        recipe_keys = layers[0].items()
        layers[0] = {key: value for key, value in recipe_keys if not _is_of_others(key, entry)}
    if isinstance(entry, Algorithm):
        preset = _topmost("preset", layers)
        if preset is not None:
            layers.insert(0, _preset_layer(str(preset), entry))
        layers.insert(0, entry.settings)
    merged = {"algorithm": entry.name}
    for layer in layers:
        merged = merge(merged, _normalised(layer, entry))
    merged = {
        key: value
        for key, value in merged.items()
        if value is not None or not _is_of_others(key, entry)  # `critic=null`: without a critic
    }
    if isinstance(entry, Algorithm) and entry.learns_from == "rollouts":
        _fill_in_rollout_keys(merged)
    for path, value in indexed:
        place = "mixture" if path[0] == "dataset" else path[0]  # where the list of datasets is
        set_key(merged, [place, *path[1:]], value)
    if "output" not in merged:
        merged |= default_output(merged, run_name)
    return _validated(merged, entry)


def _preset_layer(name: str, entry: AlgorithmEntry) -> JsonObject:
    layer = find_preset(name).layer
    for key in layer:
        if key not in entry.config.model_fields:
            raise ConfigError(
                f"the preset {name} sets {key}, which ycore {entry.name} does not have; leave --preset out, or take "
                f"ycore {commands_with(key)[0]}"
            )
    return layer


def _is_of_others(key: str, entry: AlgorithmEntry) -> bool:
    """Whether other algorithms have the key, and this one has not."""
    return key not in entry.config.model_fields and bool(commands_with(key))


def _fill_in_rollout_keys(merged: JsonObject) -> None:
    """Replace the keys that are short for rewards, and add the rewards and the dataset that others imply."""
    _add_teacher(merged)
    _add_constraints(merged)
    if (merged.get("env") or merged.get("agent")) and not merged.get("rewards"):
        merged["rewards"] = [{"reward": "environment"}]
    if merged.get("env"):
        merged.setdefault("dataset", "")
    _add_preset_rewards(merged)


def read_config(folder: RunFolder) -> BaseConfig:
    """Read the config of a run in its own process, with the secrets that the launcher passed to it."""
    stored = load_config(folder)
    config: BaseConfig = find_entry(stored["algorithm"]).config.model_validate(stored)
    return config


def require_rollouts(config: BaseConfig) -> RunConfig:
    """Return the config of a run with rollouts; ConfigError for another."""
    if not isinstance(config, RunConfig):
        raise ConfigError(
            f"{config.algorithm} learns from given examples, without rollouts; take a run of `ycore grpo`"
        )
    return config


def _topmost(key: str, layers: Sequence[Record]) -> Any:
    return next((layer[key] for layer in reversed(layers) if layer.get(key) is not None), None)


def _add_teacher(merged: JsonObject) -> None:
    """Put the reward `teacher:MODEL` first, for which `teacher` is short; it replaces another teacher."""
    model = merged.pop("teacher", None)
    rewards = merged.get("rewards") or []
    if model is not None and isinstance(rewards, list):
        name = f"teacher:{model}"
        same = [reward for reward in rewards if _name_of(reward) == name]
        rest = [reward for reward in rewards if not _name_of(reward).startswith("teacher:")]
        merged["rewards"] = [*(same or [{"reward": name}]), *rest]


def _name_of(reward: Any) -> str:
    return str(reward.get("reward")) if isinstance(reward, Mapping) else ""


def _add_constraints(merged: JsonObject) -> None:
    """Mark the rewards that `constraint` names, `NAME` or `NAME:LIMIT`, as constraints; add those that are not there."""
    rewards = merged.get("rewards") or []
    for text in merged.pop("constraint", None) or []:
        name, _, limit = str(text).rpartition(":")
        marks: JsonObject = {"constraint": True}
        try:
            marks["limit"] = float(limit)
        except ValueError:
            name = str(text)
        if not isinstance(rewards, list) or not name:
            raise ConfigError(
                f"--constraint takes the name of a reward, or NAME:LIMIT; it is {text!r}; e.g. format:0.1"
            )
        same = [reward for reward in rewards if _name_of(reward) == name]
        if same:
            same[0].pop("weight", None)
            same[0].update(marks)
        else:
            rewards = [*rewards, {"reward": name} | marks]
        merged["rewards"] = rewards


def _add_preset_rewards(merged: JsonObject) -> None:
    """Add the reward of a preset, unless the run has one of that name; a weight of 0 switches it off."""
    rewards = merged.get("rewards")
    max_tokens = merged.get("max_tokens", RunConfig.model_fields["max_tokens"].default)
    if merged.get("preset") is None or merged["algorithm"] == "eval":
        return
    if isinstance(rewards, list) and isinstance(max_tokens, int):
        share = find_preset(str(merged["preset"])).overlong_share or 0.0
        cache_tokens = int(max_tokens * share)
        if cache_tokens and "overlong" not in map(_name_of, rewards):
            arguments = {"max_tokens": max_tokens, "cache_tokens": cache_tokens}
            merged["rewards"] = [*rewards, {"reward": "overlong", "args": arguments}]


def merge(base: Record, over: Record) -> JsonObject:
    """`over` on `base`: mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merge(before, value)
        merged[key] = value
    return merged


def parse_sets(sets: Sequence[str]) -> tuple[JsonObject, list[tuple[list[str], Any]]]:
    """Plain paths as one layer, and paths into a list (`rewards.0.weight`), which come last: they change an element."""
    plain: JsonObject = {}
    indexed = []
    for item in sets:
        path, value = parse_set(item)
        if any(part.isdigit() for part in path):
            indexed.append((path, value))
        else:
            for part in reversed(path):
                value = {part: value}
            plain = merge(plain, value)
    return plain, indexed


def parse_set(item: str) -> tuple[list[str], Any]:
    """`engine.count=2` as its path and its value, which is YAML; ConfigError where it is neither."""
    key, equals, text = item.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            f"--set takes key.path=value, not {item!r}; e.g. --set engine.count=2"
        )
    try:
        return path, check_plain(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(
            f"--set {key}: {text!r} is not a YAML value; quote it, e.g. --set {key}='\"text\"'"
        ) from None


def set_key(keys: Any, path: Sequence[str], value: Any) -> None:
    """Set the value at a path in nested keys, in place; a number is an element of a list, and the last part a key."""
    place = keys
    for part in path[:-1]:
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict) and not part.isdigit():
            place = place.setdefault(part, {})
        else:
            raise _no_element(path, part, place)
    if not isinstance(place, dict) or path[-1].isdigit():
        raise _no_element(path, path[-1], place)
    place[path[-1]] = value


def _no_element(path: Sequence[str], part: str, place: Any) -> ConfigError:
    count = len(place) if isinstance(place, list) else 0
    return ConfigError(
        f"--set {'.'.join(path)}: there is no element {part!r}; the list has {count}, counted from 0"
    )


def _normalised(layer: Record, entry: AlgorithmEntry) -> JsonObject:
    """Put TRL's fields under `trl`, and its names of ycore's keys in those; ConfigError where two of one key differ."""
    layer = dict(layer)
    for key in ("rewards", "eval_rewards"):
        if isinstance(layer.get(key), list):
            layer[key] = [_as_reward(item) for item in layer[key]]
    if isinstance(layer.get("dataset"), list):
        layer["mixture"] = _parts_of(layer["dataset"])
        layer["dataset"] = " + ".join(str(part.get("dataset")) for part in layer["mixture"])
    elif "dataset" in layer and "mixture" in entry.config.model_fields:
        layer = {"mixture": []} | layer  # one dataset replaces a recipe's several
    if not isinstance(entry, Algorithm):
        return layer
    fields = layer.pop("trl", None) or {}
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"trl must be a mapping of TRL's fields; it is {fields!r}; e.g. trl: {{learning_rate: 1.0e-5}}"
        )
    keys = aliases(entry)
    known = entry.trl_fields.keys() - entry.config.model_fields.keys()
    fields = dict(fields)
    for name in known.intersection(layer):
        if fields.get(name, layer[name]) != layer[name]:
            rule = f"TRL's name of {keys[name]}" if name in keys else "also under trl"
            raise ConfigError(
                f"{name} is {rule}, and they differ: {layer[name]!r} and {fields[name]!r}; give one"
            )
        fields[name] = layer.pop(name)
    for name, key in keys.items():
        if name not in fields:
            continue
        field = entry.trl_fields[name]
        value = alias_value(name, coerce(field, fields.pop(name)), entry)
        if key in layer and layer[key] != value:
            raise ConfigError(
                f"{name} is TRL's name of {key}, and they differ: {value!r} and {layer[key]!r}; give one"
            )
        layer[key] = value
    return layer | {"trl": fields} if fields else layer


def keys_in(layer: Record, entry: Algorithm) -> set[str]:
    """Return the keys and TRL's fields that a layer sets; TRL's names of keys as those keys."""
    names = aliases(entry)
    fields = layer.get("trl")
    fields = fields if isinstance(fields, Mapping) else {}
    return {names.get(key, key) for key in (*layer, *fields)}


def _parts_of(items: Sequence[Any]) -> list[JsonObject]:
    """Read datasets, each a mapping or `NAME:SHARE`; ConfigError where only some have a share."""
    parts = []
    for item in items:
        named = re.fullmatch(r"(.+):(\d*\.?\d+)", item) if isinstance(item, str) else None
        part = {"dataset": named[1], "share": float(named[2])} if named else {"dataset": item}
        parts.append(dict(item) if isinstance(item, Mapping) else part)
    without = [str(part.get("dataset")) for part in parts if "share" not in part]
    if 0 < len(without) < len(parts):
        raise ConfigError(
            f"of several datasets all have a share or none, and {without[0]} has none; say e.g. {without[0]}:0.5"
        )
    return parts


def _as_reward(item: Any) -> Any:
    """Make a mapping of a reward's name, or copy one, because `--set rewards.0.weight` may change it."""
    if isinstance(item, str):
        return {"reward": item}
    return dict(item) if isinstance(item, Mapping) else item


def _validated(merged: JsonObject, entry: AlgorithmEntry) -> BaseConfig:
    try:
        config: BaseConfig = entry.config.model_validate(merged)
    except ValidationError as problem:
        raise config_error(problem, merged, entry) from None
    if isinstance(entry, Algorithm):
        fields = entry.trl_fields
        for name in config.trl:
            if name not in fields:
                raise unknown_key(("trl", name), entry)
            reason = refusal(name, entry)
            if reason is not None:
                raise ConfigError(f"{name} is not taken from TRL's fields: {reason}")
        trl = {name: coerce(fields[name], value) for name, value in config.trl.items()}
        config = config.model_copy(update={"trl": trl})
    config.check()
    return config


def default_output(merged: Record, run_name: str | None) -> dict[str, str]:
    if run_name is None and "model" in merged and "dataset" in merged:
        run_name = f"{_short(str(merged['dataset'] or merged.get('env', '')))}-{_short(str(merged['model']))}"
    if run_name is None:
        return {}
    return {"output": f"runs/{'eval-' if merged.get('algorithm') == 'eval' else ''}{run_name}"}


def _short(name: str) -> str:
    """`openai/gsm8k:main` -> `gsm8k-main`; `data/train.jsonl` -> `train`."""
    last = re.sub(r"^(task|gym):", "", Path(name).name)
    last = re.sub(r"\.(jsonl|json|csv|parquet|gguf)$", "", last)
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.") or "run"


_PACKAGES = {
    "wandb": "'ycore[wandb]'",
    "trackio": "'ycore[trackio]'",
    "liger_kernel": "liger-kernel",
    "bitsandbytes": "'ycore[qlora]'",
}
"""How the packages are installed that some settings need."""


def check_needs(config: AnyConfig) -> None:
    """ConfigError for packages that are not installed, files that do not exist, and sharding by TRL's fields."""
    if config.quantize is not None:
        _check_quantize(config)
    report_to = config.trl.get("report_to")
    for name in report_to if isinstance(report_to, list) else [report_to]:
        if name not in (None, "none", "all"):
            package = {"azure_ml": "azureml", "flyte": "flytekit", "kubeflow": "kubernetes"}
            _require(package.get(name, name), f"--report-to {name}")
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if config.trl.get(name) and config.algorithm != "eval":
            raise ConfigError(
                f"{name} shards the model, and the plan of memory and the engines do not see it; leave it out, and take "
                "--accelerate zero2, zero3 or fsdp2, or an accelerate config"
            )
    file = config.trl.get("accelerator_config")
    if isinstance(file, str) and not os.path.isfile(os.path.expanduser(file)):
        raise ConfigError(
            f"accelerator_config is a JSON file or JSON text; there is no file {file!r}"
        )
    if config.trl.get("use_liger_kernel"):
        _require("liger_kernel", "--use-liger-kernel")


def _require(package: str, option: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{option}: {package} is not installed; pip install {_PACKAGES.get(package, package)}"
        )


def _check_quantize(config: AnyConfig) -> None:
    rule = None
    if config.lora is None:
        rule = "is for the frozen base of a LoRA run; leave --full out"
    elif config.algorithm_row.trains_reward_model:
        rule = "cannot be: a reward model is saved whole; leave --quantize out"
    if rule is not None:
        raise ConfigError(f"--quantize 4bit {rule}")
    _require("bitsandbytes", "--quantize 4bit")


KeyPath = tuple[str | int, ...]

_WAYS_OUT = {
    "lora": "write lora: {} for the defaults, or lora: null (--full) to train every weight",
    "rewards": "name one, e.g. --reward exact_answer",
}


def config_error(problem: ValidationError, data: Record, entry: AlgorithmEntry) -> ConfigError:
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


def unknown_key(path: KeyPath, entry: AlgorithmEntry) -> ConfigError:
    """Name an unknown key with the commands that have it, or the nearest keys: in its mapping, elsewhere, and of TRL."""
    *parents, key = path
    name = _dotted(path)
    text = str(key)
    trl_names = entry.trl_fields
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


def validated(
    model: type[_Declared],
    data: Record,
    *,
    what: str,
    error: type[UserError] = RewardError,
) -> _Declared:
    """Validate an object outside of a run's config, such as a judge; an `error` names the first thing that is wrong.

    Args:
        what: names the object at the start of the message.
    """
    try:
        return model.model_validate(data)
    except ValidationError as problem:
        raise error(f"{what}: {_first_problem(problem, data, model)}") from None


def _first_problem(problem: ValidationError, data: Record, model: type[BaseModel]) -> str:
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
        return f"no key {name}{hint}"
    if kind == "value_error":
        return detail["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return f"{_dotted(detail['loc'])} is missing"
    if kind.startswith("union_tag"):
        kinds = detail.get("ctx", {}).get("expected_tags")
        return f"{name} must say its kind" + (f": {kinds}" if kinds else "")
    return must_be(name, [detail])


def _missing(places: Sequence[KeyPath], entry: AlgorithmEntry) -> ConfigError:
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


def _existing(place: KeyPath, data: Any) -> KeyPath:
    """An error's path in the data, without the names that pydantic adds for a union's branches."""
    path = []
    for part in place:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
            path.append(part)
    return tuple(path)


def _dotted(path: KeyPath) -> str:
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
