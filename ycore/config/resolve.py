"""Where a run's values come from: a recipe, then `--set key.path=value`, then options; the later wins.

What a run's settings need from the machine: packages and files. Checked before anything is loaded.

How many GPUs a run would see, counted without torch: for the dry run, which must be quick.

Not here: what a value may be (`run`, `trl_fields`) and how a refusal is worded (`problems`).

    resolve(recipe={"model": "m", ...}, sets=["engine.count=2"], options={"steps": 3, "trl": {"beta": "0.1"}})
"""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ycore.config.algorithms import RUN, AnyConfig, C, Kind
from ycore.config.schema import RunConfig
from ycore.errors import ConfigError


def resolve(
    *,
    recipe: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    run_name: str | None = None,
) -> RunConfig:
    """One validated RunConfig; `run_name` names the output folder where none was given."""
    return resolve_as(RUN, recipe=recipe, sets=sets, options=options, run_name=run_name)


def resolve_as(
    kind: Kind[C],
    *,
    recipe: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    run_name: str | None = None,
) -> C:
    """The same for any kind of run."""
    merged: dict[str, Any] = {}
    plain, indexed = _parse_sets(sets)
    layers = (recipe or {}, plain, options or {})
    for layer in (_preset_layer(layers), *layers):
        merged = merge(merged, _normalised(layer, kind))
    _add_preset_rewards(merged)
    for path, value in indexed:
        _set_in_list(merged, path, value)
    if "output" not in merged:
        merged |= _default_output(merged, run_name)
    return _validated(merged, kind)


def _preset_layer(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the preset that the topmost layer names; they lie below everything else."""
    from ycore.config.presets import find_preset, preset_layer

    names = [layer["preset"] for layer in layers if layer.get("preset") is not None]
    return preset_layer(find_preset(str(names[-1]))) if names else {}


def _add_preset_rewards(merged: dict[str, Any]) -> None:
    from ycore.config.presets import find_preset, preset_rewards

    rewards, max_tokens = merged.get("rewards"), merged.get("max_tokens", RunConfig.model_fields["max_tokens"].default)
    trains = merged.get("preset") is not None and merged.get("algorithm") != "eval"
    if trains and isinstance(rewards, list) and isinstance(max_tokens, int):
        merged["rewards"] = preset_rewards(find_preset(str(merged["preset"])), rewards, max_tokens=max_tokens)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on `base`: mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(before, value) if both and isinstance(before, Mapping) else value
    return merged


def _parse_sets(sets: Sequence[str]) -> tuple[dict[str, Any], list[tuple[list[str], Any]]]:
    """Plain paths as one layer, and paths into a list (`rewards.0.weight`), which come last: they change an element."""
    plain: dict[str, Any] = {}
    indexed = []
    for item in sets:
        path, value = parse_set(item)
        if any(part.isdigit() for part in path):
            indexed.append((path, value))
        else:
            plain = merge(plain, _nested(path, value))
    return plain, indexed


def parse_set(item: str) -> tuple[list[str], Any]:
    """`engine.count=2` as its path and its value, which is YAML."""
    import yaml

    key, equals, text = item.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set takes key.path=value, not {item!r}; e.g. --set engine.count=2")
    try:
        return path, yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: {text!r} is not a YAML value; quote it, e.g. --set {key}='\"text\"'") from None


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    return {path[0]: _nested(path[1:], value) if len(path) > 1 else value}


def _set_in_list(merged: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Sets one key of one element of a list that a recipe or an option gave."""
    name = ".".join(path)
    place: Any = merged
    for part in path[:-1]:
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        elif isinstance(place, dict) and not part.isdigit():
            place = place.setdefault(part, {})
        else:
            raise _no_element(name, part, place)
    if not isinstance(place, dict) or path[-1].isdigit():
        raise _no_element(name, path[-1], place)
    place[path[-1]] = value


def _no_element(name: str, part: str, place: Any) -> ConfigError:
    count = len(place) if isinstance(place, list) else 0
    return ConfigError(f"--set {name}: there is no element {part!r}; the list has {count}, counted from 0")


def _normalised(layer: Mapping[str, Any], kind: Kind[C]) -> dict[str, Any]:
    """One layer in ycore's own spelling, checked for two spellings of one thing."""
    from ycore.config.trl_fields import coerce, fields_of

    aliases = kind.aliases
    own = {key: value for key, value in layer.items() if key not in aliases or aliases[key] == key}
    given = layer.get("trl") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"trl must be a mapping of TRL's fields; it is {given!r}; e.g. trl: {{learning_rate: 1.0e-5}}"
        )
    spelled = {**{key: layer[key] for key in layer if key in aliases and aliases[key] != key}, **given}
    for alias in [name for name in spelled if name in aliases]:
        key = aliases[alias]
        value = kind.own_value(alias, coerce(fields_of(kind.trl_class)[alias], spelled.pop(alias)))
        if key in own and own[key] != value:
            raise ConfigError(f"{alias} is TRL's name of {key}, and they differ: {value!r} and {own[key]!r}; give one")
        own[key] = value
    if "trl" in layer:
        own["trl"] = spelled
    if isinstance(own.get("rewards"), list):
        own["rewards"] = [{"reward": item} if isinstance(item, str) else _copied(item) for item in own["rewards"]]
    return own


def _copied(item: Any) -> Any:
    return dict(item) if isinstance(item, Mapping) else item


def _validated(merged: dict[str, Any], kind: Kind[C]) -> C:
    from pydantic import ValidationError

    from ycore.config.presets import check_divergence
    from ycore.config.problems import config_error

    try:
        config = kind.config.model_validate(merged)
    except ValidationError as problem:
        raise config_error(problem, merged, kind) from None
    trl = _checked_trl(merged.get("trl") or {}, kind)
    if isinstance(config, RunConfig):
        check_divergence(config.divergence, beta=trl.get("beta") or 0.0)
    return config.model_copy(update={"trl": trl})


def _checked_trl(given: Mapping[str, Any], kind: Kind[C]) -> dict[str, Any]:
    from ycore.config.problems import unknown_key
    from ycore.config.trl_fields import coerce, fields_of

    if not given:
        return {}
    fields = fields_of(kind.trl_class)
    for name in given:
        if name not in fields:
            raise unknown_key(("trl", name), kind)
        reason = kind.refusal(name)
        if reason is not None:
            raise ConfigError(f"{name} is not taken from TRL's fields: {reason}")
    return {name: coerce(fields[name], value) for name, value in given.items()}


def _default_output(merged: Mapping[str, Any], run_name: str | None) -> dict[str, str]:
    if run_name is None and "model" in merged and "dataset" in merged:
        run_name = f"{_short(str(merged['dataset']))}-{_short(str(merged['model']))}"
    if run_name is None:
        return {}
    return {"output": f"runs/{'eval-' if merged.get('algorithm') == 'eval' else ''}{run_name}"}


def _short(name: str) -> str:
    """`openai/gsm8k:main` -> `gsm8k-main`; `data/train.jsonl` -> `train`."""
    last = re.sub(r"^(task|gym):", "", Path(name).name)
    last = re.sub(r"\.(jsonl|json|csv|parquet|gguf)$", "", last)
    return re.sub(r"[^a-z0-9.]+", "-", last.lower()).strip("-.") or "run"


_REPORTERS = {"wandb": "'ycore[wandb]'", "trackio": "'ycore[trackio]'", "tensorboard": "tensorboard"}


def check_needs(config: AnyConfig) -> None:
    """Refuses trackers that are not installed and configuration files that do not exist."""
    for name in _as_list(config.trl.get("report_to")):
        if name in _REPORTERS and find_spec(name) is None:
            raise ConfigError(f"--report-to {name}: {name} is not installed; pip install {_REPORTERS[name]}")
    for name in ("deepspeed", "fsdp_config", "accelerator_config"):
        file = config.trl.get(name)
        if isinstance(file, str) and not os.path.isfile(os.path.expanduser(file)):
            raise ConfigError(f"{name} is a JSON file or JSON text; there is no file {file!r}")
    if config.trl.get("deepspeed") is not None and find_spec("deepspeed") is None:
        raise ConfigError("--deepspeed: DeepSpeed is not installed; pip install 'ycore[deepspeed]'")


def _as_list(value: object) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]


def num_gpus(environment: Mapping[str, str] | None = None, *, device_files: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use and `CUDA_VISIBLE_DEVICES` lets through; 0 on a machine without."""
    present = sum(1 for file in device_files.glob("nvidia*") if re.fullmatch(r"nvidia\d+", file.name))
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    return min(present, len(chosen[: chosen.index("-1")] if "-1" in chosen else chosen))
