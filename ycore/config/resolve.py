"""Where a run's values come from: a preset, then a recipe, then `--set key.path=value`, then options; the later wins.

resolve(recipe={"model": "m", ...}, sets=["engine.count=2"], options={"steps": 3, "trl": {"beta": "0.1"}})
"""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ycore.config.algorithms import Algorithm, families, find_algorithm, load
from ycore.config.learner_rules import check_learner
from ycore.config.presets import find_preset, preset_layer, preset_rewards
from ycore.config.problems import config_error, unknown_key
from ycore.config.schema import AnyConfig, BaseConfig, RunConfig
from ycore.config.trl_arguments import alias_value, aliases, refusal
from ycore.config.trl_fields import coerce, fields_of
from ycore.errors import ConfigError


def resolve(
    *,
    recipe: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    run_name: str | None = None,
) -> AnyConfig:
    """One validated config, of the class of its `algorithm` (GRPO's without one); ConfigError where a key is wrong.

    Args:
        recipe: the keys of a recipe, or of a run.json.
        sets: `key.path=value` with a YAML value.
        options: keys; under `trl`, fields of TRL's, which may still be text.
        run_name: names the output folder where none was given.
    """
    plain, indexed = parse_sets(sets)
    layers = [recipe or {}, plain, options or {}]
    algorithm = find_algorithm(_topmost("algorithm", layers) or "grpo")
    if algorithm.preset is not None:
        layers.append({"preset": algorithm.preset})
    preset = _topmost("preset", layers)
    if preset is not None:
        layers.insert(0, preset_layer(find_preset(str(preset))))
    layers.insert(0, algorithm.settings)
    merged: dict[str, Any] = {}
    layers = [_normalised(layer, algorithm) for layer in layers]
    for layer in layers:
        merged = merge(merged, layer)
    if algorithm.learns_from == "rollouts":
        _add_teacher(merged)
        _add_constraints(merged)
    if (merged.get("env") or merged.get("agent")) and not merged.get("rewards"):
        merged["rewards"] = [{"reward": "environment"}]
    if merged.get("env"):
        merged.setdefault("dataset", "")
    _add_preset_rewards(merged)
    for path, value in indexed:
        set_key(merged, path, value)
    if "output" not in merged:
        merged |= default_output(merged, run_name)
    return _validated(merged, algorithm)


def resolve_stored(
    stored: Mapping[str, Any], sets: Sequence[str], options: Mapping[str, Any]
) -> BaseConfig:
    """Resolve the config of a run of any algorithm, whose recipe or run.json names it."""
    family = families().get(str(stored.get("algorithm")))
    resolver = resolve if family is None else load(family.resolve)
    config: BaseConfig = resolver(recipe=stored, sets=sets, options=options)
    return config


def require_rollouts(config: AnyConfig) -> RunConfig:
    """The config of a run with rollouts; ConfigError for a run on given examples."""
    if not isinstance(config, RunConfig):
        rule = f"{config.algorithm} learns from given examples, without rollouts"
        raise ConfigError(f"{rule}; take a run of `ycore grpo`")
    return config


def _topmost(key: str, layers: Sequence[Mapping[str, Any]]) -> Any:
    return next((layer[key] for layer in reversed(layers) if layer.get(key) is not None), None)


def _add_teacher(merged: dict[str, Any]) -> None:
    """`teacher` is short for the reward `teacher:MODEL`, first of all; it replaces another teacher."""
    name, rewards = merged.pop("teacher", None), merged.get("rewards") or []
    if name is None or not isinstance(rewards, list):
        return
    named = [(one.get("reward"), one) for one in rewards if isinstance(one, Mapping)]
    same = [one for reward, one in named if reward == f"teacher:{name}"]
    others = [one for reward, one in named if not str(reward).startswith("teacher:")]
    merged["rewards"] = [*(same or [{"reward": f"teacher:{name}"}]), *others]


def _add_constraints(merged: dict[str, Any]) -> None:
    """`constraint` names rewards that are constraints, `NAME` or `NAME:LIMIT`; one that is there already is marked."""
    rewards = merged.get("rewards") or []
    for text in merged.pop("constraint", None) or []:
        name, _, last = str(text).rpartition(":")
        try:
            marks = {"constraint": True, "limit": float(last)}
        except ValueError:
            name, marks = str(text), {"constraint": True}
        if not isinstance(rewards, list) or not name:
            raise ConfigError(
                f"--constraint takes the name of a reward, or NAME:LIMIT; it is {text!r}; e.g. format:0.1"
            )
        same = [one for one in rewards if isinstance(one, dict) and one.get("reward") == name]
        if same:
            same[0].pop("weight", None)
            same[0].update(marks)
        else:
            rewards = [*rewards, {"reward": name, **marks}]
        merged["rewards"] = rewards


def _add_preset_rewards(merged: dict[str, Any]) -> None:
    rewards, max_tokens = (
        merged.get("rewards"),
        merged.get("max_tokens", RunConfig.model_fields["max_tokens"].default),
    )
    trains = merged.get("preset") is not None and merged.get("algorithm") != "eval"
    if trains and isinstance(rewards, list) and isinstance(max_tokens, int):
        merged["rewards"] = preset_rewards(
            find_preset(str(merged["preset"])), rewards, max_tokens=max_tokens
        )


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`: mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merge(before, value)
        merged[key] = value
    return merged


def parse_sets(sets: Sequence[str]) -> tuple[dict[str, Any], list[tuple[list[str], Any]]]:
    """Plain paths as one layer, and paths into a list (`rewards.0.weight`), which come last: they change an element."""
    plain: dict[str, Any] = {}
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
        raise ConfigError(f"--set takes key.path=value, not {item!r}; e.g. --set engine.count=2")
    try:
        return path, yaml.safe_load(text)
    except yaml.YAMLError:
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


def _normalised(layer: Mapping[str, Any], algorithm: Algorithm) -> dict[str, Any]:
    """One layer with TRL's names of ycore's keys replaced; ConfigError where two names of one key differ."""
    keys = aliases(algorithm)
    own = {key: value for key, value in layer.items() if keys.get(key, key) == key}
    given = layer.get("trl") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"trl must be a mapping of TRL's fields; it is {given!r}; e.g. trl: {{learning_rate: 1.0e-5}}"
        )
    fields = {**{name: layer[name] for name in layer if keys.get(name, name) != name}, **given}
    for alias in [name for name in fields if name in keys]:
        key = keys[alias]
        value = alias_value(
            alias, coerce(fields_of(algorithm.trl_config)[alias], fields.pop(alias)), algorithm
        )
        if key in own and own[key] != value:
            raise ConfigError(
                f"{alias} is TRL's name of {key}, and they differ: {value!r} and {own[key]!r}; give one"
            )
        own[key] = value
    if "trl" in layer:
        own["trl"] = fields
    for key in ("rewards", "eval_rewards"):
        if isinstance(own.get(key), list):
            own[key] = [as_reward(item) for item in own[key]]
    return own


def as_reward(item: Any) -> Any:
    """A reward by its name, or a copy of a mapping, which `--set rewards.0.weight` may change."""
    return (
        {"reward": item}
        if isinstance(item, str)
        else dict(item)
        if isinstance(item, Mapping)
        else item
    )


def _validated(merged: dict[str, Any], algorithm: Algorithm) -> AnyConfig:
    try:
        config = algorithm.config.model_validate(merged)
    except ValidationError as problem:
        raise config_error(problem, merged, algorithm) from None
    fields = fields_of(algorithm.trl_config)
    for name in config.trl:
        if name not in fields:
            raise unknown_key(("trl", name), algorithm)
        reason = refusal(name, algorithm)
        if reason is not None:
            raise ConfigError(f"{name} is not taken from TRL's fields: {reason}")
    trl = {name: coerce(fields[name], value) for name, value in config.trl.items()}
    resolved = config.model_copy(update={"trl": trl})
    if isinstance(resolved, RunConfig):
        if len(resolved.environments) < len(resolved.env):
            shown = ", ".join(resolved.env)
            raise ConfigError(
                f"two environments of {shown} have one name; give them names: --env NAME=file.py:Class"
            )
        check_learner(resolved)
    return resolved


def default_output(merged: Mapping[str, Any], run_name: str | None) -> dict[str, str]:
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


def check_needs(config: AnyConfig) -> None:
    """ConfigError for trackers that are not installed and configuration files that do not exist."""
    if config.quantize is not None:
        _check_quantize(config)
    check_trackers(config)
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        file = config.trl.get(name)
        if isinstance(file, str) and not os.path.isfile(os.path.expanduser(file)):
            raise ConfigError(f"{name} is a JSON file or JSON text; there is no file {file!r}")
    if config.trl.get("use_liger_kernel") and find_spec("liger_kernel") is None:
        raise ConfigError("--use-liger-kernel: Liger is not installed; pip install liger-kernel")
    if config.trl.get("deepspeed") is not None and find_spec("deepspeed") is None:
        raise ConfigError("--deepspeed: DeepSpeed is not installed; pip install 'ycore[deepspeed]'")


def check_trackers(config: BaseConfig) -> None:
    """ConfigError for trackers that are not installed, or that cannot get what they are to get."""
    trackers = {
        "wandb": "'ycore[wandb]'",
        "trackio": "'ycore[trackio]'",
        "tensorboard": "tensorboard",
    }
    given = config.trl.get("report_to")
    names = given if isinstance(given, list) else [given]
    if config.tracker_files and not {"wandb", "trackio", "all"} & {*names}:
        raise ConfigError(
            "tracker_files needs a tracker that keeps files; name one, e.g. --report-to wandb"
        )
    if "journal" in config.tracker_files and not getattr(config, "keep_journal", False):
        raise ConfigError(
            "tracker_files: [journal] sends every round of a run; keep them, with --keep-journal"
        )
    for name in names:
        if name in trackers and find_spec(name) is None:
            raise ConfigError(
                f"--report-to {name}: {name} is not installed; pip install {trackers[name]}"
            )


def _check_quantize(config: AnyConfig) -> None:
    if config.lora is None:
        raise ConfigError("--quantize 4bit is for the frozen base of a LoRA run; leave --full out")
    if find_algorithm(config.algorithm).trains_reward_model:
        raise ConfigError(
            "a reward model is saved whole, which a base in 4 bits cannot be; leave --quantize out"
        )
    if config.accelerate in ("zero3", "fsdp2"):
        rule = f"each rank keeps the base whole, and {config.accelerate} shards it"
        raise ConfigError(f"--quantize 4bit: {rule}; take zero2")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            "--quantize 4bit: bitsandbytes is not installed; pip install 'ycore[qlora]'"
        )
