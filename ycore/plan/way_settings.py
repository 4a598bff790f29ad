"""From a way to run a job to the settings of a run that goes so, and to the command line that starts it."""

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
from ycore.plan.job import Job, Way
from ycore.plan.step_forecast import Forecast

_OPTIONS = (
    "model", "dataset", "system_prompt", "preset", "quantize", "prompts_per_step", "group_size", "max_tokens", "steps",
    "seed", "processes", "accelerate", "placement",
)  # fmt: skip
"""Keys of a config whose option has their name, in the order of a command."""


def config_of(config: RunConfig, job: Job, one: Forecast, fleet: Fleet) -> RunConfig:
    """The config of the job run in this way; ConfigError where the config says something else.

    The job may differ from the config in the model, LoRA and the length.
    """
    way, on_cpu = one.way, fleet.device.on_cpu
    engine: dict[str, Any] = {} if config.engine.count == "auto" else {"count": way.slots}
    rewards = config.rewards
    if config.engine.tensor_parallel not in ("auto", way.tensor_parallel):
        raise ConfigError(f"engine.tensor_parallel is {config.engine.tensor_parallel}")
    if max(way.tensor_parallel, way.judge_tensor_parallel) > 1:
        engine["tensor_parallel"] = way.tensor_parallel
        rewards = [_with_width(spec, way.judge_tensor_parallel) for spec in rewards]
    if not on_cpu:
        engine |= {"sleep": way.sleeps, "offload": way.offload}
    lora = (
        None
        if job.lora_rank is None
        else (config.lora or LoraSettings()).model_copy(update={"r": job.lora_rank})
    )
    changes: dict[str, Any] = {
        "model": job.policy.name,
        "max_tokens": job.max_tokens,
        "lora": lora,
        "quantize": "4bit" if job.quantized else None,
        "processes": way.ranks,
        "accelerate": None if way.ranks == 1 or way.sharding == "ddp" else way.sharding,
        "engine": config.engine.model_copy(update=engine),
        "rewards": rewards,
    }
    if job.judge is not None:
        changes["placement"] = placement_of(way)
    trl = dict(config.trl)
    if way.checkpointing != trl.get("gradient_checkpointing", not on_cpu):
        trl["gradient_checkpointing"] = way.checkpointing
    made = config.model_copy(update={**changes, "trl": trl})
    size = derive_batch(made, world_size=way.ranks, on_cpu=on_cpu).per_device_train_batch_size
    if size == way.micro_batch:
        return made
    return made.model_copy(update={"trl": {**trl, "per_device_train_batch_size": way.micro_batch}})


def _with_width(spec: RewardConfig, width: int) -> RewardConfig:
    """A judge whose engines span so many devices; other rewards as they are."""
    if not is_judge(spec):
        return spec
    declared = spec.args.get("tensor_parallel", "auto")
    if declared not in ("auto", width):
        raise ConfigError(f"tensor_parallel of {spec.reward} is {declared}")
    return spec.model_copy(update={"args": {**spec.args, "tensor_parallel": width}})


def placement_of(way: Way) -> str:
    return (
        f"split:{way.slots - way.judge_slots}:{way.judge_slots}"
        if way.kind == "split"
        else way.kind
    )


def command_line(config: RunConfig, base: RunConfig, *, recipe: str | None) -> str:
    """The command that starts the run of `config`, with the options in which it differs from `base`.

    Args:
        base: the run that `ycore grpo --recipe RECIPE` starts; without a recipe, what is required is always said.
    """
    words = ["ycore", config.algorithm, *([] if recipe is None else ["--recipe", recipe])]
    now, before = config.model_dump(mode="json"), base.model_dump(mode="json")
    if recipe is None:
        before |= {"model": None, "dataset": None, "rewards": []}
    rewards, theirs = now.pop("rewards"), before.pop("rewards")
    extra: list[str] = []
    if [one["reward"] for one in rewards] != [one["reward"] for one in theirs]:
        extra = [word for one in rewards for word in ("--reward", one["reward"])]
        theirs = [RewardConfig(reward=one["reward"]).model_dump(mode="json") for one in rewards]
    if (now["lora"] is None) != (before["lora"] is None):
        extra.append("--full" if now["lora"] is None else "--lora")
        before["lora"] = LoraSettings().model_dump(mode="json")
    changed = dict(_changed(now, before))
    for number, pair in enumerate(zip(rewards, theirs, strict=True)):
        changed |= _changed(*pair, f"rewards.{number}.")
    options = [word for key in _OPTIONS if key in changed for word in _words(key, changed[key])]
    others = [key for key in changed if key not in (*_OPTIONS, "output", "lora")]
    return shlex.join(
        [*words, *options, *extra, *(word for key in others for word in _words(key, changed[key]))]
    )


def _changed(now: Mapping[str, Any], before: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of `now` that `before` does not have so."""
    known = before if isinstance(before, Mapping) else {}
    for key, value in now.items():
        if isinstance(value, Mapping) and (value or not known.get(key)):
            yield from _changed(value, known.get(key), f"{prefix}{key}.")
        elif key not in known or known[key] != value:
            yield prefix + key, value


def _words(key: str, value: Any) -> list[str]:
    text = value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)
    if key in _OPTIONS:
        return [f"--{key.replace('_', '-')}", str(value)]
    if key.startswith("trl.") and isinstance(value, str | int | float):
        return [f"--{key.removeprefix('trl.').replace('_', '-')}", text]
    return ["--set", f"{key}={text}"]
