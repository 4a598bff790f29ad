"""Check a run with rollouts before it starts: prompts, rewards, tools, memory, time."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ycore.api.shown_rows import rows_read
from ycore.config.schema import RunConfig, a_fifth
from ycore.config.trl_arguments import derive_batch
from ycore.data.examples import num_overlapping
from ycore.data.prompts import PromptSet, load_prompts
from ycore.engine.kinds import REPLAY, choose_kind
from ycore.errors import ConfigError, RewardError
from ycore.launch.layout import Site
from ycore.launch.machine_checks import check_run
from ycore.models.model_facts import sighted_family
from ycore.models.names import (
    ChatTemplate,
    ModelPlan,
    require_chat_template,
    require_sight,
    require_unquantized,
)
from ycore.rewards.builtin import ENVIRONMENT, REFERENCE
from ycore.sandbox.level import choose_level
from ycore.scoring.scorers import (
    check_images,
    check_models,
    check_rows,
    is_rule,
    runs_unknown_code,
)


def check_rollouts(
    config: RunConfig, model: ModelPlan, site: Site, show_rows: int
) -> dict[str, Any]:
    """Plan the parts that only a run with rollouts has; UserError where they cannot work.

    Args:
        show_rows: how many of the dataset's rows the plan shows.
    """
    engine = REPLAY
    if config.replay is None:
        engine, _ = choose_kind(config.engine.kind, family=sighted_family(config.model))
    if engine.has_servers and config.algorithm != "eval":
        require_unquantized(model)
    limits = {
        "the model's context": model.context_length,
        "engine.max_model_len": config.engine.max_model_len,
    }
    for name, limit in limits.items():
        if limit is not None and config.max_tokens >= limit:
            raise ConfigError(
                f"max_tokens must leave room for a prompt in {name} of {limit} tokens; it is {config.max_tokens}; "
                f"e.g. --max-tokens {max(1, limit // 2)}"
            )
    prompts = _load_prompts(config, as_chat=model.has_chat_template is True)
    if prompts.is_chat:
        require_chat_template(model)
    if prompts.shows is not None:
        require_sight(model, prompts.shows)
        check_images(config)
    check_rows(config, prompts)
    if isinstance(config.sampling.curriculum, str):
        from ycore.round.sampling import guesses_from

        guesses_from(prompts.prompts, config.sampling.curriculum, config.group_size)
    calls_in_text = _check_turns(config, model)
    sharing = check_run(config, site)
    template_arguments = config.trl.get("chat_template_kwargs")
    return {
        "contents": prompts,
        "dataset": {
            "rows": len(prompts.prompts),
            "parts": [
                (part.name, part.share, len(prompts.parts[part.name].prompts))
                for part in config.mixture
            ],
            "columns": list(prompts.columns),
            "chat": prompts.is_chat,
            "reading": rows_read(prompts, model, template_arguments, num_rows=show_rows),
        },
        "evaluation": _check_evaluation(config, prompts, model),
        "calls_in_text": calls_in_text,
        "engine": engine.name,
        "memory": None if sharing is None else sharing.line,
        "scorers": check_models(config, engine=engine),
        "sandbox": _sandbox_lines(config),
        "batch": derive_batch(
            config, world_size=site.layout.world, on_cpu=not site.machine.devices
        ),
    }


def _load_prompts(config: RunConfig, *, as_chat: bool) -> PromptSet:
    if not config.trains_a_judge:
        return load_prompts(config, as_chat=as_chat)
    from ycore.scoring.judge_scorer import judge_questions

    return judge_questions(config, load_prompts(config, as_chat=as_chat))


def _check_evaluation(
    config: RunConfig, prompts: PromptSet, model: ModelPlan
) -> dict[str, Any] | None:
    """Describe the held-out rows and when they are measured; None for a run without any, and for `ycore eval`."""
    from ycore.evaluation.held_out import check_evaluation

    if config.algorithm == "eval":
        return None  # a training recipe gives it an `eval_dataset`, and it measures `dataset`
    check_evaluation(config)
    held_out = config.for_evaluation()
    if held_out is None:
        return None
    rows = _load_prompts(held_out, as_chat=prompts.is_chat)
    check_rows(held_out, rows)
    rows_read(rows, model, config.trl.get("chat_template_kwargs"), num_rows=0)
    return {
        "dataset": held_out.dataset,
        "split": rows.reading.get("split"),
        "rows": len(rows.prompts),
        "rewards": [reward.reward for reward in held_out.rewards],
        "every": config.eval_every or a_fifth(config.steps),
        "overlap": num_overlapping(_inputs(rows), _inputs(prompts)),
    }


def _inputs(prompts: PromptSet) -> list[list[Any]]:
    return [[prompt.content, prompt.images] for prompt in prompts.prompts]


def _check_turns(config: RunConfig, model: ModelPlan) -> bool:
    """Raise UserError where the tools or environment cannot work, or the chat template cannot use them.

    Return whether tools are called in the policy's text; for an agent, whose tools are not known yet, False.
    """
    acts = config.env or config.agent is not None
    if any(reward.kind == ENVIRONMENT for reward in config.rewards) and not acts:
        raise RewardError(
            "the reward 'environment' is what an environment pays, and the run has none; say --env"
        )
    if not config.has_turns:
        return False
    if any(reward.kind == REFERENCE for reward in config.rewards):
        raise RewardError(
            "reference_probability reads one turn; take another reward, or leave out --tools, --env and --agent"
        )
    if config.agent is not None:
        from ycore.rollout.agents import check_agent

        check_agent(config)
        require_chat_template(model)
        return False
    return _check_environments(config, model)


def _check_environments(config: RunConfig, model: ModelPlan) -> bool:
    from ycore.rollout.tool_pool import describe_tools

    described = describe_tools(config, run_folder=Path(config.output))
    from_environment = [reward.kind == ENVIRONMENT for reward in config.rewards]
    some_pay = any(environment.pays for environment in described.values())
    for name, environment in described.items():
        # Where some environments pay, another reward may score the completions of the rest, as in TRL.
        needs_pay = all(from_environment) or (any(from_environment) and not some_pay)
        if needs_pay and not environment.pays:
            raise RewardError(
                f"environment {name!r} has no get_reward, and gives no reward; name one with --reward"
            )
        if config.pays_turns and not environment.pays_turns:
            raise RewardError(
                f"environment {name!r} pays for no single turn: its class has no attribute turn_reward; "
                f"give it one, or leave out --advantage turn"
            )
    if model.folder is None or not (model.folder / "tokenizer_config.json").is_file():
        return config.turns.actions == "calls"
    arguments = config.trl.get("chat_template_kwargs") or {}
    template = ChatTemplate(model.folder)
    if config.turns.actions == "calls" and _keeps_earlier_turns(template, arguments):
        return True
    from ycore.rollout.dialogue import Dialogue  # with TRL, which takes seconds
    from ycore.round.assemble import load_tokenizer

    tokenizer = load_tokenizer(model.folder, trust_remote_code=config.trust_remote_code)
    dialogues = [
        Dialogue(
            tokenizer,
            environment,
            actions=config.turns.actions,
            template_arguments=arguments,
        )
        for environment in described.values()
    ]
    return any(dialogue.calls_in_text for dialogue in dialogues)


def _keeps_earlier_turns(template: ChatTemplate, arguments: dict[str, Any]) -> bool:
    """Whether an answer only adds to what was rendered up to the end token, so that `Dialogue` accepts the template."""
    talk = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": ""}]
    with suppress(ValueError):
        before = template.render(talk, add_generation_prompt=False, **arguments)
        whole = template.render([*talk, talk[0]], add_generation_prompt=True, **arguments)
        end = before.rfind(template.eos_token) if template.eos_token else -1
        return end >= 0 and whole.startswith(before[: end + len(template.eos_token)])
    return False


def _sandbox_lines(config: RunConfig) -> list[str]:
    """Describe what confines the user's code and a model's programs, and all that a recipe opens to code or engines."""
    runs_code = runs_unknown_code(config) or config.has_turns
    lines = [choose_level(config.sandbox.level).line] if runs_code else []
    openings = {
        reward.reward: reward.sandbox
        for reward in (*config.rewards, *config.eval_rewards)
        if is_rule(reward) and ":" in reward.reward
    }
    if config.has_turns:
        openings["tools, environment or agent"] = config.turns.sandbox
    for name, sandbox in openings.items():
        opened = ["network"] * sandbox.network + ["GPU"] * sandbox.gpu
        opened += [f"reads {path}" for path in sandbox.read]
        if opened:
            lines.append(f"{name}: {', '.join(opened)}")
    if config.env_python is not None:
        from ycore.rollout.tool_pool import python_files

        lines.append(f"env_python: runs and reads {', '.join(python_files(config.env_python))}")
    if config.engine.environment:
        lines.append(f"engines get the variables {', '.join(config.engine.environment)}")
    return lines
