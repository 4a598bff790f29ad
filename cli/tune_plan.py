"""Everything that can be checked before a run without rollouts, the plan that comes of it, and its closing words.

Not here: starting anything. No model is loaded and torch is not imported.
"""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ycore.config.tune import TuneConfig
from ycore.errors import ConfigError
from ycore.run_folder.prepare import AS_IT_WAS, Resume

if TYPE_CHECKING:
    from ycore.models.plan import ModelPlan


def tune_plan(config: TuneConfig, *, resume: bool = False, how: Resume = AS_IT_WAS) -> dict[str, Any]:
    """What the run will do, as JSON values; a UserError where it cannot work."""
    from ycore_cli.plan import model_values

    from ycore.config.needs import check_needs
    from ycore.config.tune_arguments import tune_arguments
    from ycore.config.tune_batch import derive_tune_batch
    from ycore.launch.site import site_of
    from ycore.models.plan import resolve_model
    from ycore.run_folder.prepare import check_claim
    from ycore.run_folder.secrets import redact

    model = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    dataset = _checked_dataset(config, model)
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
    from ycore.run_folder.paths import RunFolder

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


def _checked_dataset(config: TuneConfig, model: "ModelPlan") -> dict[str, Any]:
    from ycore.data.examples import load_examples
    from ycore.data.left_out import in_words
    from ycore.models.plan import require_chat_template

    examples = load_examples(config, as_chat=model.has_chat_template is True)
    if examples.is_chat:
        require_chat_template(model)
    return {
        "rows": len(examples.train),
        "held_out": len(examples.held_out),
        "columns": list(examples.columns),
        "chat": examples.is_chat,
        "left_out": in_words(examples.left_out),
        "fingerprint": examples.fingerprint,
    }


def _check_saving(config: TuneConfig, *, shards: bool) -> None:
    if config.algorithm == "reward" and shards:
        raise ConfigError(
            f"a reward model is saved whole, and --accelerate {config.accelerate} cuts it up; take zero2 or ddp"
        )
