"""Everything that can be checked before a run, in order, and the plan that comes of it.

Not here: starting anything. No model is loaded and torch is not imported.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ycore.config.run import RunConfig
from ycore.errors import ConfigError
from ycore.run_folder.prepare import AS_IT_WAS, Resume

if TYPE_CHECKING:
    from ycore.models.plan import ModelPlan


def checked_plan(config: RunConfig, *, resume: bool = False, how: Resume = AS_IT_WAS) -> dict[str, Any]:
    """What the run will do, as JSON values; a UserError where it cannot work."""
    from ycore.config.batch import derive_batch
    from ycore.config.needs import check_needs
    from ycore.config.trl_arguments import trl_arguments
    from ycore.launch.engines import choose_kind, is_vllm_installed
    from ycore.launch.site import site_of
    from ycore.run_folder.prepare import check_claim
    from ycore.run_folder.secrets import redact

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
    from ycore.models.plan import resolve_model

    plan = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    if plan.context_length is not None and config.max_tokens >= plan.context_length:
        raise ConfigError(
            f"max_tokens must leave room for a prompt in the model's context of {plan.context_length} tokens; "
            f"it is {config.max_tokens}; e.g. --max-tokens {max(1, plan.context_length // 2)}"
        )
    return plan


def _checked_dataset(config: RunConfig, model: "ModelPlan") -> dict[str, Any]:
    from ycore.data.prompts import check_dataset
    from ycore.models.plan import require_chat_template

    prompts = check_dataset(config, as_chat=model.has_chat_template is True)
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
    from ycore.judging.loading import is_rule
    from ycore.launch.placing import check_run_placement
    from ycore.launch.scorers import check_scorers
    from ycore.rewards.loading import check_reward

    for reward in config.rewards:
        if is_rule(reward):
            check_reward(reward, columns)
    check_run_placement(config)
    return check_scorers(config, columns, engine=engine)
