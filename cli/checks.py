"""Everything that can be checked before a run, in order, and the plan that comes of it.

Everything that can be checked before a run without rollouts, the plan that comes of it, and its closing words.

Not here: starting anything. No model is loaded and torch is not imported.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ycore.config.schema import RunConfig, TuneConfig
from ycore.errors import ConfigError
from ycore.run.claim import AS_IT_WAS, Resume

if TYPE_CHECKING:
    from ycore.models.names import ModelPlan


def checked_plan(config: RunConfig, *, resume: bool = False, how: Resume = AS_IT_WAS) -> dict[str, Any]:
    """What the run will do, as JSON values; a UserError where it cannot work."""
    from ycore.config.batch import derive_batch
    from ycore.config.resolve import check_needs
    from ycore.config.trl_arguments import trl_arguments
    from ycore.launch.engines import choose_kind, is_vllm_installed
    from ycore.launch.layout import site_of
    from ycore.run.claim import check_claim
    from ycore.run.secrets import redact

    engine, _ = choose_kind(config.engine.kind, vllm_installed=is_vllm_installed())
    engine = engine if config.replay is None else "replay"
    model = _checked_model(config)
    dataset = _checked_dataset(config, model)
    scorers = _check_rewards(config, dataset["columns"], engine=engine)
    site = site_of(config, trains=config.algorithm != "eval")
    folder, machine = site.folder, site.machine
    batch = derive_batch(config, world_size=site.layout.world, on_cpu=not machine.devices)
    check_needs(config)
    check_claim(folder, config, resume=resume, how=how)
    return {
        "config": redact(config.model_dump(mode="json")),
        "model": model_values(model),
        "dataset": dataset,
        "devices": {"gpus": len(machine.devices), "cores": len(machine.cores)},
        "ranks": {"world": site.layout.world, "here": site.layout.local, "machines": site.layout.num_machines},
        "engine": engine,
        "scorers": scorers,
        "batch": asdict(batch) | {"in_words": str(batch)},
        "trl": redact(trl_arguments(config, batch, folder)),
        "output": str(folder.root.absolute()),
    }


def plan_rows(plan: Mapping[str, Any], *, resume: bool = False) -> list[tuple[str, str]]:
    """The plan as a person reads it."""
    config, model, dataset = plan["config"], plan["model"], plan["dataset"]
    rewards = ", ".join(f"{item['reward']} (weight {item['weight']:g})" for item in config["rewards"])
    rows = f"{dataset['rows']} row{'' if dataset['rows'] == 1 else 's'}"
    kind = "chat prompts" if dataset["chat"] else "text prompts"
    context = f", context {model['context_length']}" if model["context_length"] else ""
    weights = "every weight" if config["lora"] is None else f"LoRA r={config['lora']['r']}"
    dtype = "bfloat16" if config["dtype"] == "auto" else config["dtype"]
    trained = f"{config['steps']} steps of {weights}, {dtype}, learning rate {plan['trl']['learning_rate']:g}"
    evaluated = f"{config['num_samples']} completions of each prompt"
    return [
        ("model", f"{config['model']}: {model['note']}{context}"),
        ("dataset", f"{config['dataset']}: {rows} of {kind}, columns {', '.join(dataset['columns']) or 'none'}"),
        ("rewards", rewards),
        *(("", f"  {line}") for line in plan["scorers"]),
        *_preset_rows(config, plan["trl"]),
        *([("batch", plan["batch"]["in_words"])] if config["algorithm"] != "eval" else []),
        ("run", (evaluated if config["algorithm"] == "eval" else trained) + f", seed {config['seed']}"),
        ("engine", f"{plan['engine']}, completions of at most {config['max_tokens']} tokens"),
        ("output", config["output"] + (", going on from its last checkpoint" if resume else "")),
    ]


def _preset_rows(config: Mapping[str, Any], trl: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The preset, and under it a line for everything that it sets."""
    from ycore.config.presets import find_preset, preset_lines

    if config["preset"] is None:
        return []
    first, *others = preset_lines(find_preset(config["preset"]), trl=trl, run=config)
    return [("preset", first), *(("", f"  {line}") for line in others)]


def model_values(plan: "ModelPlan") -> dict[str, Any]:
    """A model as the plan of a run tells of it."""
    told = {"kind": plan.kind, "folder": None if plan.folder is None else str(plan.folder), "ready": plan.ready}
    return told | {"note": plan.note, "context_length": plan.context_length, "chat": plan.has_chat_template is True}


def _checked_model(config: RunConfig) -> "ModelPlan":
    from ycore.models.names import resolve_model

    plan = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    if plan.context_length is not None and config.max_tokens >= plan.context_length:
        raise ConfigError(
            f"max_tokens must leave room for a prompt in the model's context of {plan.context_length} tokens; "
            f"it is {config.max_tokens}; e.g. --max-tokens {max(1, plan.context_length // 2)}"
        )
    return plan


def _checked_dataset(config: RunConfig, model: "ModelPlan") -> dict[str, Any]:
    from ycore.data.prompts import load_prompts
    from ycore.models.names import require_chat_template

    prompts = load_prompts(config, as_chat=model.has_chat_template is True)
    if prompts.is_chat:
        require_chat_template(model)
    return {
        "rows": len(prompts.prompts),
        "columns": list(prompts.columns),
        "chat": prompts.is_chat,
        "fingerprint": prompts.fingerprint,
    }


def _check_rewards(config: RunConfig, columns: list[str], *, engine: str) -> list[str]:
    """A line for each judge and reward model."""
    from ycore.judge.sources import is_rule
    from ycore.launch.scoring_models import check_run_placement, check_scorers
    from ycore.rewards.loading import check_reward

    for reward in config.rewards:
        if is_rule(reward):
            check_reward(reward, columns)
    check_run_placement(config)
    return check_scorers(config, columns, engine=engine)


def tune_plan(config: TuneConfig, *, resume: bool = False, how: Resume = AS_IT_WAS) -> dict[str, Any]:
    """What the run will do, as JSON values; a UserError where it cannot work."""

    from ycore.config.batch import derive_tune_batch
    from ycore.config.resolve import check_needs
    from ycore.config.trl_arguments import tune_arguments
    from ycore.launch.layout import site_of
    from ycore.models.names import resolve_model
    from ycore.run.claim import check_claim
    from ycore.run.secrets import redact

    model = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    dataset = _tune_plan_checked_dataset(config, model)
    site = site_of(config)
    folder, machine = site.folder, site.machine
    _check_saving(config, shards=site.layout.shards_weights)
    batch = derive_tune_batch(
        config,
        num_rows=dataset["rows"],
        world_size=site.layout.world,
        on_cpu=not machine.devices,
        context_length=model.context_length,
    )
    check_needs(config)
    check_claim(folder, config, resume=resume, how=how)
    return {
        "config": redact(config.model_dump(mode="json")),
        "model": model_values(model),
        "dataset": dataset,
        "devices": {"gpus": len(machine.devices), "cores": len(machine.cores)},
        "ranks": {"world": site.layout.world, "here": site.layout.local, "machines": site.layout.num_machines},
        "batch": asdict(batch) | {"in_words": str(batch)},
        "trl": redact(tune_arguments(config, batch, folder)),
        "output": str(folder.root.absolute()),
    }


def tune_rows(plan: Mapping[str, Any], *, resume: bool = False) -> list[tuple[str, str]]:
    """The plan as a person reads it."""
    config, model, dataset, batch = plan["config"], plan["model"], plan["dataset"], plan["batch"]
    rows = f"{dataset['rows']} rows to train on, {dataset['held_out']} held out"
    kind = "chats" if dataset["chat"] else "text"
    left_out = f"; {dataset['left_out']}" if dataset["left_out"] else ""
    context = f", context {model['context_length']}" if model["context_length"] else ""
    weights = "every weight" if config["lora"] is None else f"LoRA r={config['lora']['r']}"
    dtype = "bfloat16" if config["dtype"] == "auto" else config["dtype"]
    epochs = f"{batch['steps']} steps, {batch['epochs']:g} epochs,"
    return [
        ("model", f"{config['model']}: {model['note']}{context}"),
        ("dataset", f"{config['dataset']}: {rows}, {kind}, columns {', '.join(dataset['columns'])}{left_out}"),
        ("batch", batch["in_words"]),
        ("run", f"{epochs} of {weights}, {dtype}, learning rate {plan['trl']['learning_rate']:g}, "
                f"seed {config['seed']}"),
        ("output", config["output"] + (", going on from its last checkpoint" if resume else "")),
    ]  # fmt: skip


def closing_rows(config: TuneConfig, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured, where things lie, what to try next."""
    from ycore.run.paths import RunFolder

    folder = RunFolder(Path(config.output))
    try_next = ["ycore", "eval", "--model", str(folder.model), "--dataset", "FILE", "--reward", "exact_answer"]
    if config.algorithm == "reward":
        try_next = ["ycore", "grpo", "--model", config.model, "--dataset", "FILE", "--reward", f"rm:{folder.model}"]
    return [
        *_held_out_rows(summary.get("held_out") or {}),
        ("model", str(folder.model)),
        ("curve", str(folder.curve)),
        ("metrics", str(folder.metrics)),
        ("try next", shlex.join(try_next)),
    ]


_SHOWN = ("loss", "accuracy", "mean_token_accuracy", "rewards/accuracies", "rewards/margins")


def _held_out_rows(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after = measured.get("before") or {}, measured.get("after") or {}
    if not after:
        return []
    parts = [f"{name} {before[name]:.3f} -> {after[name]:.3f}" for name in _SHOWN if name in after and name in before]
    if "accuracy_95" in after:
        low, high = after["accuracy_95"]
        parts.append(f"95 % interval of the accuracy {low:.3f} to {high:.3f}")
    return [("held out", f"{after['n']} rows: {', '.join(parts)}")]


def _tune_plan_checked_dataset(config: TuneConfig, model: "ModelPlan") -> dict[str, Any]:
    from ycore.data.examples import load_examples
    from ycore.models.names import require_chat_template

    examples = load_examples(config, as_chat=model.has_chat_template is True)
    if examples.is_chat:
        require_chat_template(model)
    return {
        "rows": len(examples.train),
        "held_out": len(examples.held_out),
        "columns": list(examples.columns),
        "chat": examples.is_chat,
        "left_out": examples.left_out_note,
        "fingerprint": examples.fingerprint,
    }


def _check_saving(config: TuneConfig, *, shards: bool) -> None:
    if config.algorithm == "reward" and shards:
        raise ConfigError(
            f"a reward model is saved whole, and --accelerate {config.accelerate} cuts it up; take zero2 or ddp"
        )
