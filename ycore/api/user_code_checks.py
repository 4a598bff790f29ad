"""Check the code that users bring before a run starts: rewards, tools, environments and agents."""

from pathlib import Path

from ycore.config.schema import RunConfig
from ycore.errors import RewardError
from ycore.models.names import ModelPlan, require_chat_template
from ycore.rewards.builtin import is_environment, is_reference
from ycore.sandbox.level import choose_level
from ycore.scoring.scorers import is_rule, runs_unknown_code


def check_turns(config: RunConfig, model: ModelPlan) -> None:
    """Raise UserError where the tools or environment cannot work, or the chat template cannot use them."""
    acts = bool(config.env) or config.agent is not None
    if any(is_environment(reward) for reward in config.rewards) and not acts:
        raise RewardError(
            "the reward 'environment' is what an environment pays, and the run has none; say --env"
        )
    if not config.has_turns:
        return
    if any(is_reference(reward) for reward in config.rewards):
        raise RewardError(
            "reference_probability reads one turn; take another reward, or leave out --tools, --env and --agent"
        )
    if config.agent is not None:
        from ycore.rollout.agent_pool import check_agent

        check_agent(config)
        require_chat_template(model)
        return
    _check_environments(config, model)


def _check_environments(config: RunConfig, model: ModelPlan) -> None:
    from ycore.rollout.tool_pool import describe_tools  # loads transformers and TRL

    described = describe_tools(config, run_folder=Path(config.output))
    from_environment = [is_environment(reward) for reward in config.rewards]
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
    if model.folder is not None and (model.folder / "tokenizer_config.json").is_file():
        from ycore.rollout.dialogue import Dialogue
        from ycore.round.assemble import load_tokenizer

        tokenizer = load_tokenizer(model.folder, trust_remote_code=config.trust_remote_code)
        for environment in described.values():
            Dialogue(tokenizer, environment, actions=config.turns.actions)


def sandbox_lines(config: RunConfig) -> list[str]:
    """Describe what confines the user's rewards and a model's programs; [] where the run has neither."""
    of_user = [reward for reward in config.rewards if is_rule(reward) and ":" in reward.reward]
    if not runs_unknown_code(config) and not config.has_turns:
        return []
    lines = [choose_level(config.sandbox.level).line]
    for reward in of_user:
        opened = ["network"] * reward.sandbox.network + ["GPU"] * reward.sandbox.gpu
        opened += [f"reads {path}" for path in reward.sandbox.read]
        if opened:
            lines.append(f"{reward.reward}: {', '.join(opened)}")
    return lines
