"""Everything that can be checked before a run starts, and the plan that follows from it, without loading torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from ycore.config.algorithms import find_algorithm
from ycore.config.batch import derive_batch, derive_tune_batch
from ycore.config.learner_rules import BY_TURN
from ycore.config.presets import find_preset, preset_lines
from ycore.config.resolve import check_needs
from ycore.config.schema import AnyConfig, RunConfig, TuneConfig, a_fifth
from ycore.config.trl_arguments import trl_arguments
from ycore.data.examples import load_examples, num_overlapping
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine.kinds import REPLAY, EngineKind, choose_kind
from ycore.errors import ConfigError, RewardError
from ycore.judge.agreement import judge_questions, trains_a_judge
from ycore.judge.sources import check_pictures, is_rule
from ycore.launch.diagnostics import plan_steps
from ycore.launch.layout import Site, site_of
from ycore.launch.machine_checks import check_run
from ycore.launch.scoring_models import check_scorers
from ycore.models.names import (
    ModelPlan,
    require_chat_template,
    require_sight,
    resolve_model,
    sighted_family,
)
from ycore.rewards.builtin import is_code, is_environment, is_reference
from ycore.rewards.worker_client import check_reward
from ycore.round.curriculum import guesses_from
from ycore.run.checkpoints import checkpoints_in, step_of
from ycore.run.claim import AS_IT_WAS, Resume, check_claim
from ycore.run.secrets import redact
from ycore.sandbox.level import choose_level, require_sandbox
from ycore.types import Prompt


def checked_plan(
    config: AnyConfig, *, resume: bool = False, how: Resume = AS_IT_WAS, trains: bool = True
) -> dict[str, Any]:
    """What the run will do, as JSON values; UserError where it cannot work.

    Args:
        resume: the run's folder must hold this run, instead of none.
        trains: False for a preflight and an evaluation.
    """
    model = resolve_model(config.model, trust_remote_code=config.trust_remote_code)
    site = site_of(config, trains=trains)
    if isinstance(config, RunConfig):
        details = _check_rollouts(config, model, site, done=how.step)
    else:
        details = _check_examples(config, model, site)
    batch = details.pop("batch")
    check_needs(config)
    check_claim(site.folder, config, resume=resume, how=how)
    plan = {
        "config": redact(config.model_dump(mode="json")),
        "model": {
            "kind": model.kind,
            "folder": None if model.folder is None else str(model.folder),
            "ready": model.ready,
            "note": model.note,
            "context_length": model.context_length,
            "chat": model.has_chat_template is True,
            "sees": sighted_family(config.model) is not None,
        },
        "devices": {"gpus": len(site.machine.devices), "cores": len(site.machine.cores)},
        "ranks": {
            "world": site.layout.world,
            "here": site.layout.local,
            "machines": site.layout.num_machines,
        },
        **details,
        "batch": asdict(batch) | {"in_words": str(batch)},
        "trl": redact(trl_arguments(config, batch, site.folder)),
        "output": str(site.folder.root.absolute()),
    }
    return plan | {"warnings": _warnings(plan)}


def _warnings(plan: Mapping[str, Any]) -> list[str]:
    """What would make a run less worth than it seems; each is a line."""
    config, dataset, evaluation = plan["config"], plan["dataset"], plan.get("evaluation")
    num_held_out, measured = (
        (evaluation["rows"], evaluation) if evaluation else (dataset.get("held_out"), dataset)
    )
    lines = []
    if measured.get("overlap"):
        rows = "prompts" if evaluation or "prompt" in dataset["columns"] else "rows"
        overlap = f"{measured['overlap']} of the {num_held_out} held-out {rows} are also trained on"
        lines.append(f"{overlap}: they do not show what the model does on others")
    if config.get("quantize") and not config["merge"]:
        lines.append(
            "adapters alone are another policy on the model's own weights; --merge saves this one"
        )
    return lines


def _check_rollouts(
    config: RunConfig, model: ModelPlan, site: Site, *, done: int | None
) -> dict[str, Any]:
    engine: EngineKind = REPLAY
    if config.replay is None:
        engine, _ = choose_kind(config.engine.kind, family=sighted_family(config.model))
    if model.context_length is not None and config.max_tokens >= model.context_length:
        raise ConfigError(
            f"max_tokens must leave room for a prompt in the model's context of {model.context_length} tokens; "
            f"it is {config.max_tokens}; e.g. --max-tokens {max(1, model.context_length // 2)}"
        )
    prompts = _load_prompts(config, as_chat=model.has_chat_template is True)
    if prompts.is_chat:
        require_chat_template(model)
    if prompts.shows is not None:
        require_sight(model, prompts.shows)
        check_pictures(config)
    columns = list(prompts.columns)
    _check_rewards(config, prompts)
    if isinstance(config.sampling.curriculum, str):
        guesses_from(prompts.prompts, config.sampling.curriculum, config.group_size)
    _check_turns(config, model)
    sharing = check_run(config, site)
    num_rows, forecast = len(prompts.prompts), None
    if engine.has_servers and site.trains:
        saved = checkpoints_in(site.folder.checkpoints)
        done = step_of(saved[-1]) if saved and done is None else done or 0
        forecast = plan_steps(
            config, site, prompt_tokens=_prompt_tokens(prompts.prompts), done=done
        )
    return {
        "dataset": {
            "rows": num_rows,
            "columns": columns,
            "chat": prompts.is_chat,
            "fingerprint": prompts.fingerprint,
        },
        "evaluation": _check_evaluation(config, prompts),
        "engine": engine.name,
        "memory": None if sharing is None else sharing.line,
        "forecast": forecast,
        "scorers": check_scorers(config, columns, engine=engine),
        "sandbox": _sandbox_lines(config),
        "batch": derive_batch(
            config, world_size=site.layout.world, on_cpu=not site.machine.devices
        ),
    }


def _load_prompts(config: RunConfig, *, as_chat: bool) -> PromptSet:
    prompts = load_prompts(config, as_chat=as_chat)
    return judge_questions(config, prompts) if trains_a_judge(config) else prompts


def _prompt_tokens(prompts: Sequence[Prompt]) -> int:
    """Of a mean prompt, by its characters: to load a tokenizer takes longer than a plan may. A chat's marks are 20."""
    some = [prompts[row].content for row in range(0, len(prompts), max(1, len(prompts) // 64))]
    texts = [
        one if isinstance(one, str) else "".join(turn["content"] for turn in one) for one in some
    ]
    return round(fmean(map(len, texts)) / 4) + (0 if isinstance(some[0], str) else 20)


def _check_rewards(config: RunConfig, prompts: PromptSet) -> None:
    columns = [*prompts.columns, *(["environments"] if config.env else [])]
    for reward in config.rewards:
        if is_rule(reward):
            check_reward(
                reward,
                columns,
                settings=config.reward_workers,
                sandbox=config.sandbox,
                run_folder=Path(config.output),
            )
        elif is_code(reward):
            from ycore.rewards.code import check_tests  # with asyncio, which no other dry run needs

            require_sandbox(choose_level(config.sandbox.level), f"reward {reward.reward!r}")
            check_tests(reward, columns, prompts.prompts)


def _check_evaluation(config: RunConfig, prompts: PromptSet) -> dict[str, Any] | None:
    """The held-out rows and when they are measured; None for a run without any."""
    asks = (
        config.eval_every,
        config.eval_while_training,
        config.eval_rewards,
        config.keep_best,
        config.stop_when,
    )
    if not (config.eval_dataset or any(asks)):
        return None
    from ycore.evaluation.held_out import check_evaluation

    check_evaluation(config)
    held_out = config.for_evaluation()
    if held_out is None:
        return None
    rows = _load_prompts(held_out, as_chat=prompts.is_chat)
    _check_rewards(held_out, rows)
    return {
        "dataset": held_out.dataset,
        "rows": len(rows.prompts),
        "rewards": [reward.reward for reward in held_out.rewards],
        "every": config.eval_every or -(-config.steps // 5),
        "while_training": config.eval_while_training,
        "overlap": num_overlapping(
            *([[one.content, one.images] for one in of.prompts] for of in (rows, prompts))
        ),
    }


def _check_turns(config: RunConfig, model: ModelPlan) -> None:
    """UserError where the run's tools or environment cannot work, or the model's chat template cannot use them."""
    has_world = bool(config.env) or config.agent is not None
    if any(is_environment(reward) for reward in config.rewards) and not has_world:
        raise RewardError(
            "the reward 'environment' is what an environment pays, and the run has none; say --env"
        )
    if not config.tools and not has_world:
        return
    if any(is_reference(reward) for reward in config.rewards):
        raise RewardError(
            "reference_probability reads one turn; take another reward, or leave out --tools, --env and --agent"
        )
    if config.agent is not None:
        from ycore.rollout.agent_pool import check_agent

        check_agent(config)
        return require_chat_template(model)
    from ycore.rollout.tool_pool import (
        describe_tools,
    )  # these load transformers and TRL: only such runs pay it

    described = describe_tools(config, run_folder=Path(config.output))
    asked = [is_environment(reward) for reward in config.rewards]
    some_pay = any(one.pays for one in described.values())
    for name, one in described.items():
        # Where some environments pay, another reward may score the completions of the others, as in TRL.
        if not one.pays and (all(asked) or (any(asked) and not some_pay)):
            raise RewardError(
                f"environment {name!r} has no get_reward, and gives no reward; name one with --reward"
            )
        if config.advantage == BY_TURN and not one.pays_turns:
            raise RewardError(
                f"environment {name!r} pays for no single turn: its class has no attribute turn_reward; "
                f"give it one, or leave out --advantage {BY_TURN}"
            )
    if model.folder is not None and (model.folder / "tokenizer_config.json").is_file():
        from ycore.rollout.dialogue import Dialogue
        from ycore.round.assemble import load_tokenizer

        tokenizer = load_tokenizer(model.folder, trust_remote_code=config.trust_remote_code)
        for one in described.values():
            Dialogue(tokenizer, one, actions=config.turns.actions)


def _sandbox_lines(config: RunConfig) -> list[str]:
    """What confines the rewards that ycore did not bring, and what a recipe opens for each; nothing without any."""
    own = [reward for reward in config.rewards if is_rule(reward) and ":" in reward.reward]
    if not own and not config.has_turns and not any(is_code(reward) for reward in config.rewards):
        return []
    lines = [choose_level(config.sandbox.level).line]
    for reward in own:
        opened = [
            word
            for word, is_open in (("network", reward.sandbox.network), ("GPU", reward.sandbox.gpu))
            if is_open
        ]
        opened += [f"reads {path}" for path in reward.sandbox.read]
        lines += [f"{reward.reward}: {', '.join(opened)}"] if opened else []
    return lines


def _check_examples(config: TuneConfig, model: ModelPlan, site: Site) -> dict[str, Any]:
    examples = load_examples(config, as_chat=model.has_chat_template is True)
    if examples.is_chat:
        require_chat_template(model)
    if examples.shows:
        require_sight(model, 0)
    if config.measures_between:
        from ycore.evaluation.held_out import check_measuring

        check_measuring(config, len(examples.held_out))
    if find_algorithm(config.algorithm).trains_reward_model and site.layout.shards_weights:
        raise ConfigError(
            f"a reward model is saved whole, and --accelerate {config.accelerate} splits it; take zero2 or ddp"
        )
    dataset = {
        "rows": len(examples.train),
        "held_out": len(examples.held_out),
        "overlap": examples.overlap,
        "eval_every": None,
        "columns": list(examples.columns),
        "chat": examples.is_chat,
        "left_out": examples.left_out_note,
        "fingerprint": examples.fingerprint,
    }
    batch = derive_tune_batch(
        config,
        num_rows=len(examples.train),
        world_size=site.layout.world,
        on_cpu=not site.machine.devices,
        context_length=model.context_length,
    )
    if examples.held_out and config.measures_between:
        dataset["eval_every"] = config.eval_every or a_fifth(batch.steps)
    return {"dataset": dataset, "batch": batch}


def plan_rows(plan: Mapping[str, Any], *, resume: bool = False) -> list[tuple[str, str]]:
    """A `checked_plan` as a person reads it, a name and a text each."""
    config, model = plan["config"], plan["model"]
    evaluates, has_rollouts = config["algorithm"] == "eval", "rewards" in config
    context = f", context {model['context_length']}" if model["context_length"] else ""
    rows = [
        ("model", f"{config['model']}: {model['note']}{context}"),
        ("dataset", f"{config['dataset'] or 'none'}: {_dataset_in_words(plan['dataset'])}"),
    ]
    if has_rollouts:
        rows += _reward_rows(plan)
    if evaluation := plan.get("evaluation"):
        when = f"before the first step, every {evaluation['every']} steps and after the last"
        when += ", while the trainer computes the next step" if evaluation["while_training"] else ""
        rewards = ", ".join(evaluation["rewards"])
        rows.append(
            (
                "held out",
                f"{evaluation['dataset']}: {evaluation['rows']} rows, by {rewards}, {when}",
            )
        )
    rows += [("warning", line) for line in plan["warnings"]]
    if not evaluates:
        rows.append(("batch", plan["batch"]["in_words"]))
    rows.append(("run", f"{_run_in_words(plan)}, seed {config['seed']}"))
    if has_rollouts:
        tokens = f"completions of at most {config['max_tokens']} tokens"
        rows.append(("engine", f"{plan['engine']}, {tokens}"))
        rows += [("memory", plan["memory"])] if plan["memory"] else []
        rows += [("time", plan["forecast"]["in_words"])] if plan["forecast"] else []
        acts = [*config["tools"], *config["env"], *([config["agent"]] if config["agent"] else [])]
        if acts:
            rows.append(("turns", f"at most {config['max_turns']}, with {', '.join(acts)}"))
    return [
        *rows,
        ("output", config["output"] + (", going on from its last checkpoint" if resume else "")),
    ]


def _dataset_in_words(dataset: Mapping[str, Any]) -> str:
    columns = f"columns {', '.join(dataset['columns']) or 'none'}"
    if "held_out" not in dataset:
        rows = f"{dataset['rows']} row{'' if dataset['rows'] == 1 else 's'}"
        return f"{rows} of {'chat' if dataset['chat'] else 'text'} prompts, {columns}"
    rows = f"{dataset['rows']} rows to train on, {dataset['held_out']} held out"
    rows += f" (measured every {dataset['eval_every']} steps)" if dataset["eval_every"] else ""
    left_out = f"; {dataset['left_out']}" if dataset["left_out"] else ""
    return f"{rows}, {'chats' if dataset['chat'] else 'text'}, {columns}{left_out}"


def _reward_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rewards, a line for each judge, and the preset with a line for everything that it sets."""
    config = plan["config"]
    rewards = ", ".join(
        f"{item['reward']} ({'constraint' if item['constraint'] else 'weight {:g}'.format(item['weight'])})"
        for item in config["rewards"]
    )
    rows = [("rewards", rewards), *(("", f"  {line}") for line in plan["scorers"])]
    if plan["sandbox"]:
        first, *others = plan["sandbox"]
        rows += [("sandbox", first), *(("", f"  {line}") for line in others)]
    if config["preset"] is not None:
        first, *others = preset_lines(find_preset(config["preset"]), trl=plan["trl"], run=config)
        rows += [("preset", first), *(("", f"  {line}") for line in others)]
    return rows


def _run_in_words(plan: Mapping[str, Any]) -> str:
    config, batch = plan["config"], plan["batch"]
    if config["algorithm"] == "eval":
        return (
            "both answers of each row"
            if config["pairs"]
            else f"{config['num_samples']} completions of each prompt"
        )
    length = (
        f"{batch['steps']} steps, {batch['epochs']:g} epochs,"
        if "epochs" in batch
        else f"{config['steps']} steps"
    )
    weights = "every weight" if config["lora"] is None else f"LoRA r={config['lora']['r']}"
    if (
        plan["model"]["sees"]
        and config["lora"] is not None
        and config["lora"]["target_modules"] == "all-linear"
    ):
        weights += " of the language model (the vision tower and its projector stay frozen)"
    dtype = "bfloat16" if config["dtype"] == "auto" else config["dtype"]
    return f"{length} of {weights}, {dtype}, learning rate {plan['trl']['learning_rate']:g}"
