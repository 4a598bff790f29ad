"""Convert a planned strategy into a RunConfig, and into the command line that starts it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ycore.config.batch import derive_batch
from ycore.config.schema import LoraSettings, RewardConfig, RunConfig
from ycore.errors import ConfigError
from ycore.judge.sources import is_judge
from ycore.plan.devices import Fleet
from ycore.plan.step_forecast import StepForecast
from ycore.plan.workload import Strategy, Workload

_OPTIONS = (
    "model", "dataset", "system_prompt", "preset", "quantize", "prompts_per_step", "group_size", "max_tokens", "steps",
    "seed", "processes", "accelerate", "placement",
)  # fmt: skip
"""Keys of a config whose option has their name, in the order of a command."""


def config_of(
    config: RunConfig, work: Workload, forecast: StepForecast, fleet: Fleet
) -> RunConfig:
    """Return the config that runs the workload with a forecast's strategy.

    The workload may differ from the config in the model, LoRA and the length.

    Raises:
        ConfigError: the config fixes a tensor-parallel size other than the strategy's.
    """
    strategy, on_cpu = forecast.strategy, fleet.device.on_cpu
    changes: dict[str, Any] = {
        "model": work.policy.name,
        "max_tokens": work.max_tokens,
        "lora": None,
        "quantize": "4bit" if work.quantized else None,
        "processes": strategy.ranks,
        "accelerate": strategy.sharding
        if strategy.ranks > 1 and strategy.sharding != "ddp"
        else None,
        "engine": _engine_settings(config, strategy, on_cpu),
        "rewards": config.rewards,
        "trl": dict(config.trl),
    }
    if work.lora_rank is not None:
        lora = config.lora or LoraSettings()
        changes["lora"] = lora.model_copy(update={"r": work.lora_rank})
    if max(strategy.tensor_parallel, strategy.judge_tensor_parallel) > 1:
        width = strategy.judge_tensor_parallel
        changes["rewards"] = [_set_judge_width(spec, width) for spec in config.rewards]
    if work.judge is not None:
        changes["placement"] = placement_of(strategy)
    if strategy.checkpointing != config.trl.get("gradient_checkpointing", not on_cpu):
        changes["trl"]["gradient_checkpointing"] = strategy.checkpointing
    planned = config.model_copy(update=changes)
    batch = derive_batch(planned, world_size=strategy.ranks, on_cpu=on_cpu)
    if batch.per_device_train_batch_size != strategy.micro_batch:
        planned.trl["per_device_train_batch_size"] = strategy.micro_batch
    return planned


def _engine_settings(config: RunConfig, strategy: Strategy, on_cpu: bool) -> Any:
    engine = config.engine
    if engine.tensor_parallel not in ("auto", strategy.tensor_parallel):
        raise ConfigError(f"engine.tensor_parallel is {engine.tensor_parallel}")
    changes: dict[str, Any] = {}
    if engine.count != "auto":
        changes["count"] = strategy.slots
    if max(strategy.tensor_parallel, strategy.judge_tensor_parallel) > 1:
        changes["tensor_parallel"] = strategy.tensor_parallel
    if not on_cpu:
        changes["sleep"] = strategy.sleeps
        changes["offload"] = strategy.offload
    return engine.model_copy(update=changes)


def _set_judge_width(spec: RewardConfig, width: int) -> RewardConfig:
    """Let a judge's engines span so many devices; other rewards stay as they are."""
    if not is_judge(spec):
        return spec
    declared = spec.args.get("tensor_parallel", "auto")
    if declared not in ("auto", width):
        raise ConfigError(f"tensor_parallel of {spec.reward} is {declared}")
    return spec.model_copy(update={"args": {**spec.args, "tensor_parallel": width}})


def placement_of(strategy: Strategy) -> str:
    if strategy.kind != "split":
        return strategy.kind
    return f"split:{strategy.slots - strategy.judge_slots}:{strategy.judge_slots}"


def command_line(config: RunConfig, base: RunConfig, *, recipe: str | None) -> str:
    """Return the command that starts the run of `config`, with the options in which it differs from `base`.

    Args:
        base: the run that `ycore grpo --recipe RECIPE` starts; without a recipe, what is required is always said.
    """
    words = ["ycore", config.algorithm, *([] if recipe is None else ["--recipe", recipe])]
    planned, known = config.model_dump(mode="json"), base.model_dump(mode="json")
    if recipe is None:
        known |= {"model": None, "dataset": None, "rewards": []}
    rewards, known_rewards = planned.pop("rewards"), known.pop("rewards")
    extra: list[str] = []
    if [spec["reward"] for spec in rewards] != [spec["reward"] for spec in known_rewards]:
        for spec in rewards:
            extra += ["--reward", spec["reward"]]
        known_rewards = [
            RewardConfig(reward=spec["reward"]).model_dump(mode="json") for spec in rewards
        ]
    if (planned["lora"] is None) != (known["lora"] is None):
        extra.append("--full" if planned["lora"] is None else "--lora")
        known["lora"] = LoraSettings().model_dump(mode="json")
    changed = dict(_changed_keys(planned, known))
    for number, (spec, known_spec) in enumerate(zip(rewards, known_rewards, strict=True)):
        changed |= _changed_keys(spec, known_spec, f"rewards.{number}.")
    for key in _OPTIONS:
        if key in changed:
            words += _option_words(key, changed.pop(key))
    words += extra
    for key, value in changed.items():
        if key not in ("output", "lora"):
            words += _option_words(key, value)
    return shlex.join(words)


def _changed_keys(
    planned: Mapping[str, Any], known: Any, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of `planned` that differ from `known`."""
    before = known if isinstance(known, Mapping) else {}
    for key, value in planned.items():
        if isinstance(value, Mapping) and (value or not before.get(key)):
            yield from _changed_keys(value, before.get(key), f"{prefix}{key}.")
        elif key not in before or before[key] != value:
            yield prefix + key, value


def _option_words(key: str, value: Any) -> list[str]:
    if key in _OPTIONS:
        return [f"--{key.replace('_', '-')}", str(value)]
    text = (
        value
        if isinstance(value, str) and yaml.safe_load(value) == value
        else json.dumps(value)
    )
    if key.startswith("trl.") and isinstance(value, str | int | float):
        return [f"--{key.removeprefix('trl.').replace('_', '-')}", text]
    return ["--set", f"{key}={text}"]
