"""Check everything that can be checked before a run starts, without loading torch; plan it, and train in the foreground."""

import re
from dataclasses import asdict
from pathlib import Path

from ycore.api.planning import run_length
from ycore.api.rollout_checks import check_rollouts
from ycore.api.run_settings import changed_settings, main_settings
from ycore.api.shown_rows import reading_warnings, rows_read
from ycore.config.algorithms import FAMILIES, find_entry, load_reference
from ycore.config.resolve import check_needs, require_rollouts
from ycore.config.schema import (
    TEACHER_MODEL,
    AnyConfig,
    BaseConfig,
    ExperimentalConfig,
    RewardConfig,
    RunConfig,
    TuneConfig,
    a_fifth,
)
from ycore.config.trl_arguments import derive_tune_batch, trl_arguments
from ycore.data.examples import load_examples
from ycore.errors import ConfigError
from ycore.launch.layout import Site, site_of
from ycore.models.names import (
    ModelPlan,
    reads_text_only,
    require_chat_template,
    require_sight,
    resolve_model,
)
from ycore.rewards.worker_client import check_reward
from ycore.run.claim import Resume, check_claim, contents_of, is_finished, stored_config
from ycore.run.files import RunFolder
from ycore.run.resuming import (
    check_began_with,
    check_checkpoint,
    check_num_kept,
    check_replay,
    check_world,
    settle,
)
from ycore.run.secrets import redact
from ycore.types import JsonObject, Record


def checked_plan(
    config: AnyConfig, *, resume: Resume | None = None, trains: bool = True, show_rows: int = 1
) -> JsonObject:
    """Plan the run as JSON values; UserError where it cannot work.

    Args:
        resume: how to go on with this run, which its folder must hold; None where it holds none.
        trains: False for a preflight and an evaluation.
        show_rows: how many of the dataset's rows the plan shows.
    """
    model = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    site = site_of(config, trains=trains)
    if isinstance(config, RunConfig):
        details = check_rollouts(config, model, site, show_rows)
    else:
        details = _check_examples(config, model, site, show_rows)
    batch = details.pop("batch")
    rows = details.pop("contents")
    check_needs(config)
    check_claim(site.folder, config, resume=resume)
    contents = None
    if model.ready_folder is not None and (resume is not None or site.layout.num_machines > 1):
        contents = contents_of(rows.identity, model.ready_folder, config.code_files)
    if resume is not None and not resume.accept_changes:
        check_began_with(site.folder, contents)
    if isinstance(config, RunConfig) and config.own_functions:
        from ycore.trl.own_functions import check_own_functions

        check_own_functions(config, rows.prompts[0])
    plan = {
        "config": redact(config.model_dump(mode="json")),
        **_places(config, model, site),
        **details,
        "contents": contents,
        "batch": asdict(batch) | {"in_words": str(batch)},
        "main": main_settings(config),
        "changed": changed_settings(config, trains=trains),
        "length": run_length(config, site, batch, details) if trains else None,
        "trl": redact(trl_arguments(config, batch, site.folder)),
        "output": str(site.folder.root.absolute()),
    }
    of_sampling = config.sampling_warnings() if trains and isinstance(config, RunConfig) else []
    return plan | {"warnings": _warnings(plan) + of_sampling}


def _places(config: AnyConfig, model: ModelPlan, site: Site) -> JsonObject:
    """Describe the model and the machine as JSON values."""
    machine = site.machine
    layout = site.layout
    return {
        "model": {
            "kind": model.kind,
            "folder": None if model.folder is None else str(model.folder),
            "ready": model.ready,
            "note": model.note,
            "context_length": model.context_length,
            "chat": model.has_chat_template is True,
            "sees": model.config is not None and not reads_text_only(model),
        },
        "devices": {"gpus": len(machine.devices), "cores": len(machine.cores)},
        "ranks": {
            "world": layout.world,
            "here": layout.local,
            "machines": layout.num_machines,
            "machine": layout.machine_rank,
            "meet": layout.accelerate.get("main_process_ip"),
        },
    }


def _warnings(plan: Record) -> list[str]:
    """Name what makes the run worth less than it seems, a line each."""
    config = plan["config"]
    dataset = plan["dataset"]
    evaluation = plan.get("evaluation")
    has_tools = bool(config.get("tools") or config.get("env") or config.get("agent"))
    lines = reading_warnings(dataset["reading"], has_tools=has_tools)
    overlap = (evaluation or dataset).get("overlap")
    if overlap:
        num_held_out = evaluation["rows"] if evaluation else dataset["held_out"]
        rows = "prompts" if evaluation or "prompt" in dataset["columns"] else "rows"
        lines.append(
            f"{overlap} of the {num_held_out} held-out {rows} are also trained on: they do not show what the model "
            "does on others"
        )
    if path := config["trl"].get("chat_template_path"):
        lines.append(
            f"chat_template_path is {path}: TRL trains with it, and rows are shown with the model's own template"
        )
    if config.get("quantize") and not config["merge"]:
        lines.append(
            "adapters alone are another policy on the model's own weights; --merge saves this one"
        )
    return lines


def _check_examples(
    config: TuneConfig, model: ModelPlan, site: Site, show_rows: int
) -> JsonObject:
    examples = load_examples(config, as_chat=model.has_chat_template is True)
    if examples.is_chat:
        require_chat_template(model)
    if examples.shows:
        require_sight(model, 0)
    _check_fields(config, is_chat=examples.is_chat)
    if isinstance(config, ExperimentalConfig):
        _check_experimental(config)
    if config.measures_between:
        from ycore.evaluation.held_out import check_measuring

        check_measuring(config, len(examples.held_out))
    if config.algorithm_row.trains_reward_model and site.layout.shards_weights:
        raise ConfigError(
            f"a reward model is saved whole, and --accelerate {config.accelerate} splits it; take zero2 or ddp"
        )
    if config.algorithm == "kto" and site.layout.uses_fsdp and config.value_bytes == 2:
        raise ConfigError(
            "ycore kto fails under FSDP in bfloat16; take --accelerate zero2 or zero3"
        )
    batch = derive_tune_batch(
        config,
        num_rows=len(examples.train),
        world_size=site.layout.world,
        on_cpu=not site.machine.devices,
        context_length=model.context_length,
    )
    measures = examples.held_out and config.measures_between
    is_apart = config.eval_dataset is not None or config.eval_split is not None
    dataset = {
        "rows": len(examples.train),
        "held_out": len(examples.held_out),
        "overlap": examples.overlap if is_apart else 0,
        "eval_every": (config.eval_every or a_fifth(batch.steps)) if measures else None,
        "columns": list(examples.train[0]),
        "chat": examples.is_chat,
        "left_out": examples.left_out_note,
        "reading": rows_read(examples, model, None, num_rows=show_rows),
    }
    return {"contents": examples, "dataset": dataset, "batch": batch}


def _check_fields(config: TuneConfig, *, is_chat: bool) -> None:
    """ConfigError for fields that TRL refuses once the model is loaded, or that would change nothing."""
    fields = config.trl
    if fields.get("sync_ref_model") and fields.get("precompute_ref_log_probs"):
        raise ConfigError(
            "sync_ref_model moves the reference, and precompute_ref_log_probs asks it once; leave one of them out"
        )
    is_alone = fields.get("padding_free") and not fields.get("packing")
    if config.algorithm == "sft" and is_alone and fields.get("max_length", 1) is not None:
        raise ConfigError(
            "padding_free cuts no row to max_length; say --packing too, or --max-length none, or leave it out"
        )
    if (path := fields.get("chat_template_path")) and not is_chat:
        raise ConfigError(
            f"chat_template_path is {path}, and the rows are texts, as {config.model} has no chat template or they are no "
            "turns; put the template into the model's folder as chat_template.jinja, or leave it out"
        )


def _check_experimental(config: ExperimentalConfig) -> None:
    """UserError where the reward or the teacher of an experimental trainer is none."""
    if config.reward is not None:
        spec = RewardConfig(reward=config.reward)
        check_reward(spec, ["answer"], run_folder=Path(config.output))
    if teacher := config.trl.get(TEACHER_MODEL):
        resolve_model(teacher)


def training_plan(
    config: BaseConfig, *, resume: Resume | None, show_rows: int = 1
) -> JsonObject:
    """Plan a training run as `checked_plan` does; UserError also where a checkpoint or journal cannot be used."""
    plan: JsonObject
    if family := FAMILIES.get(config.algorithm):
        plan = load_reference(family.plan)(config, resume=resume)
    else:
        assert isinstance(config, RunConfig | TuneConfig)
        plan = checked_plan(config, resume=resume, show_rows=show_rows)
    folder = RunFolder(Path(config.output))
    if resume is not None:
        if resume.step is not None:
            check_checkpoint(folder, resume.step)
        check_world(folder, resume, world=plan["ranks"]["world"])
    if isinstance(config, RunConfig):
        check_num_kept(config.trl.get("save_total_limit"))
        if config.replay is not None:
            replayed = RunFolder(Path(config.replay).expanduser())
            check_replay(replayed.root, replayed.journal)
            stored = stored_config(replayed)
            before = find_entry(stored["algorithm"]).config.model_validate(stored)
            check_replayed(config, require_rollouts(before))
    return plan


def check_replayed(config: RunConfig, before: RunConfig) -> None:
    """ConfigError where the rounds that the settings `before` wrote have not what this run learns from.

    Args:
        before: with secrets hidden.
    """
    keys = {"reward", "args", "strip_thinking", "range"}
    # `ycore.grpo` writes a function into a file that is named by the run and by the source, which alone counts here.
    given, kept = (
        [
            redact(reward.model_dump(include=keys))
            | {"reward": re.sub(r".*\.rewards-(?=\w+\.py:)", "", reward.reward)}
            for reward in run.rewards
        ]
        for run in (config, before)
    )
    if given != kept:
        names = ", ".join(reward.reward for reward in before.rewards)
        raise ConfigError(
            f"--replay calls no reward again, and {config.replay} has the scores of {names} with its own arguments; leave "
            "--reward, --constraint, --teacher and --preset dapo out"
        )
    lacks = {
        "--advantage remax": config.needs_greedy_baseline and not before.needs_greedy_baseline,
        "--advantage turn": config.pays_turns and not before.pays_turns,
        "constraints.by=lagrangian": _learns_weights(config) and not _learns_weights(before),
        "distill.divergence=sampled": before.teaches_exactly and not config.teaches_exactly,
    }
    for option, is_lacking in lacks.items():
        if is_lacking:
            raise ConfigError(
                f"{option} learns from what is written with the rounds, and {config.replay} was without it; leave it out"
            )
    temperature = config.changed_sampling.get("temperature", 1.0)
    temperature_before = before.changed_sampling.get("temperature", 1.0)
    if temperature != temperature_before:
        raise ConfigError(
            f"--replay learns from tokens that {config.replay} sampled at temperature {temperature_before:g}, and here it "
            f"is {temperature:g}; say --temperature {temperature_before:g}"
        )


def _learns_weights(config: RunConfig) -> bool:
    return config.has_constraints and config.constraints.by == "lagrangian"


def can_go_on(folder: RunFolder, *, for_longer: bool) -> bool:
    """Whether the folder holds a training run that can go on; a finished one can where it is to go on for longer."""
    from ycore.launch.launcher import PREFLIGHT

    measures = stored_config(folder).get("algorithm") == "eval"
    is_preflight = folder.log(PREFLIGHT.name).is_file()
    return not (measures or is_preflight) and (for_longer or not is_finished(folder))


def run_training(config: BaseConfig, plan: Record, *, resume: Resume | None) -> JsonObject:
    """Train as the `training_plan` says, and return the run's summary."""
    from ycore.launch.launcher import TRAINER, run_worker  # a dry run needs none of it

    if resume is not None:
        world = plan["ranks"]["world"]
        settle(RunFolder(Path(config.output)), config, resume, world=world, say=print)
    return run_worker(
        TRAINER,
        config,
        resume=resume is not None,
        num_steps=plan["trl"]["max_steps"],
        contents=plan.get("contents"),
    )
