"""Check a run with rollouts before it starts: prompts, rewards, tools, memory, time."""

from typing import Any

from ycore.api.user_code_checks import check_turns, sandbox_lines
from ycore.config.batch import derive_batch
from ycore.config.schema import RunConfig, a_fifth
from ycore.data.examples import num_overlapping
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine.kinds import REPLAY, EngineKind, choose_kind
from ycore.errors import ConfigError
from ycore.judge.agreement import check_agreement, judge_questions, trains_a_judge
from ycore.launch.layout import Site
from ycore.launch.machine_checks import check_run
from ycore.models.names import ModelPlan, require_chat_template, require_sight, sighted_family
from ycore.scoring.scorers import check_images, check_models, check_rows


def check_rollouts(
    config: RunConfig, model: ModelPlan, site: Site, *, step: int | None
) -> dict[str, Any]:
    """Plan the parts that only a run with rollouts has; UserError where they cannot work.

    Args:
        step: the checkpoint that the run goes on from; None is the newest.
    """
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
        check_images(config)
    check_rows(config, prompts)
    if isinstance(config.sampling.curriculum, str):
        from ycore.round.curriculum import guesses_from

        guesses_from(prompts.prompts, config.sampling.curriculum, config.group_size)
    check_turns(config, model)
    sharing = check_run(config, site)
    columns = list(prompts.columns)
    return {
        "dataset": {
            "rows": len(prompts.prompts),
            "columns": columns,
            "chat": prompts.is_chat,
            "fingerprint": prompts.fingerprint,
        },
        "evaluation": _check_evaluation(config, prompts),
        "engine": engine.name,
        "memory": None if sharing is None else sharing.line,
        "scorers": check_models(config, engine=engine),
        "sandbox": sandbox_lines(config),
        "batch": derive_batch(
            config, world_size=site.layout.world, on_cpu=not site.machine.devices
        ),
    }


def _load_prompts(config: RunConfig, *, as_chat: bool) -> PromptSet:
    if not trains_a_judge(config):
        return load_prompts(config, as_chat=as_chat)
    check_agreement(config)
    return judge_questions(config, load_prompts(config, as_chat=as_chat))


def _check_evaluation(config: RunConfig, prompts: PromptSet) -> dict[str, Any] | None:
    """Describe the held-out rows and when they are measured; None for a run without any."""
    is_configured = any(
        (
            config.eval_dataset,
            config.eval_every,
            config.eval_while_training,
            config.eval_rewards,
            config.keep_best,
            config.stop_when,
        )
    )
    if not is_configured:
        return None
    from ycore.evaluation.held_out import check_evaluation

    check_evaluation(config)
    held_out = config.for_evaluation()
    if held_out is None:
        return None
    rows = _load_prompts(held_out, as_chat=prompts.is_chat)
    check_rows(held_out, rows)
    return {
        "dataset": held_out.dataset,
        "rows": len(rows.prompts),
        "rewards": [reward.reward for reward in held_out.rewards],
        "every": config.eval_every or a_fifth(config.steps),
        "while_training": config.eval_while_training,
        "overlap": num_overlapping(_inputs(rows), _inputs(prompts)),
    }


def _inputs(prompts: PromptSet) -> list[list[Any]]:
    return [[prompt.content, prompt.images] for prompt in prompts.prompts]
