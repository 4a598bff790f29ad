"""Which settings of a learner fit together: each rule as one line with the way out."""

from ycore.advantages import TOKEN_ADVANTAGE, TURN_ADVANTAGE
from ycore.config.schema import DistillSettings, RunConfig
from ycore.errors import ConfigError

BY_TOKEN = TOKEN_ADVANTAGE
"""The advantage that differs from token to token."""

BY_TURN = TURN_ADVANTAGE
"""The advantage that differs from turn to turn."""

ALONE = (BY_TOKEN, "remax")
"""Advantages that do not compare a completion with others of its group."""

CRPG = "crpg"
"""CGPO's advantage, of which constraints are a part."""

TEACHER = "teacher:"
"""How the name of a source begins that is a teacher."""

AGREES = "agrees:"
"""How the name of a reward begins for which the policy is a judge of pairs."""

PAIRED = ("dpo", "ipo", "rrhf")
"""Losses that compare the completions of a group with each other."""

_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo")
_SHARDED = ("zero1", "zero2", "zero3", "fsdp2")


def teaches_alone(config: RunConfig) -> bool:
    """Whether every scored completion teaches, also in a group whose rewards are all equal.

    A critic's baseline is not the group's mean, and a teacher needs no group, so dynamic sampling then has nothing to
    replace but prompts that no reward could score. The same holds for groups of one.
    """
    return config.critic is not None or config.group_size == 1 or config.algorithm == "distill"


def check_learner(config: RunConfig) -> None:
    """ConfigError for settings that contradict each other."""
    _check_given_pairs(config)
    _check_agrees(config)
    _check_carried(config)
    _check_drafts(config)
    if config.algorithm != "distill" and config.distill.divergence != "sampled":
        raise ConfigError(
            f"distill.divergence is of ycore distill, and this is {config.algorithm}; leave it out"
        )
    if config.divergence != "reverse-kl" and not config.trl.get("beta"):
        raise ConfigError(
            f"--divergence {config.divergence} needs beta above 0, its weight; it is 0; say --beta 0.04"
        )
    if config.algorithm == "ppo":
        _check_ppo(config)
    elif config.algorithm == "eval":
        return
    elif config.algorithm == "distill":
        _check_distill(config)
    elif config.critic is not None:
        raise ConfigError(
            f"critic is of ycore ppo, and this is {config.algorithm}; take ycore ppo, or leave critic out"
        )
    elif any(reward.reward.startswith(TEACHER) for reward in config.rewards):
        raise ConfigError(
            f"a teacher is of ycore distill, and this is {config.algorithm}; take ycore distill"
        )
    elif config.group_size == 1 and config.advantage not in ALONE:
        raise ConfigError(
            f"group_size must be 2 or more with advantage {config.advantage}, which compares a completion with the "
            "others of its group; it is 1; e.g. --group-size 8, or --advantage reinforce++, or ycore ppo"
        )
    if config.sampling.curriculum and teaches_alone(config):
        raise ConfigError(
            "--curriculum learns which groups teach, and here every completion does; leave it out, or take ycore grpo "
            "with --group-size 2 or more"
        )
    if config.loss_from in PAIRED or config.algorithm == "online-dpo":
        _check_pairs(config)
    if config.advantage == CRPG or any(reward.constraint for reward in config.rewards):
        _check_constraints(config)
    if config.kl_in == "reward":
        _check_kl_in_reward(config)
    if config.advantage == BY_TURN and (not config.env or config.algorithm == "distill"):
        raise ConfigError(
            f"--advantage {BY_TURN} learns from rewards of turns, which only an environment gives; say --env with "
            "ycore grpo, or take another advantage"
        )
    if (
        config.critic is not None
        or config.advantage in (BY_TOKEN, BY_TURN)
        or config.algorithm == "distill"
    ):
        _check_token_advantages(config)
    loss = config.trl.get("loss_type", "dapo") if config.loss_from == "grpo" else config.loss_from
    if config.trust_region != "clip" and (
        loss not in _CLIPPED or config.divergence != "reverse-kl"
    ):
        raise ConfigError(
            f"--trust-region {config.trust_region} takes the place of the clip in the losses {', '.join(_CLIPPED)}, "
            f"with --divergence reverse-kl; they are {loss} and {config.divergence}; leave it out"
        )
    if config.loss_average == "prompts" and loss not in ("dapo", "cispo"):
        raise ConfigError(
            f"loss_average=prompts weighs the tokens of the losses dapo and cispo, and this is {loss}; "
            "take --loss-type dapo, or leave loss_average out"
        )


def _check_carried(config: RunConfig) -> None:
    if config.sampling.oversample == 1:
        return
    rule = "with --oversample a completion may take several rounds"
    if config.tools or config.env or config.agent is not None:
        raise ConfigError(
            f"{rule}, and tools, environments and agents answer within one; leave --oversample out"
        )
    if config.advantage == "remax":
        raise ConfigError(
            f"{rule}, and remax compares with a greedy one of the same weights; leave --oversample out"
        )
    if config.deterministic:
        raise ConfigError(
            f"{rule}, and which do depends on what ends first; leave --deterministic or --oversample out"
        )


def _check_drafts(config: RunConfig) -> None:
    if not config.engine.drafts:
        return
    if config.deterministic:
        raise ConfigError(
            "drafts depend on the requests in flight, and change a seed's tokens; leave --deterministic or "
            "engine.drafts out"
        )
    if config.trl.get("min_p"):
        raise ConfigError(
            "vLLM does not apply min_p to drafted tokens; leave --min-p or engine.drafts out"
        )
    if "speculative_config" in config.engine.args:
        raise ConfigError(
            "engine.drafts and engine.args.speculative_config both say what is drafted; leave one out"
        )


def _check_given_pairs(config: RunConfig) -> None:
    if not config.pairs:
        return
    if config.algorithm != "eval":
        raise ConfigError(f"--pairs is of ycore eval, and this is {config.algorithm}; leave it out")
    if config.has_turns:
        raise ConfigError(
            "--pairs scores answers that are written; leave --tools, --env and --agent out"
        )
    for reward in config.rewards:
        if reward.reward.startswith((TEACHER, AGREES)) or reward.reward in (
            "reference_probability",
            "environment",
        ):
            raise ConfigError(
                f"--pairs has no policy that writes, and {reward.reward} is of one; "
                "give judge:FILE.yaml, rm:MODEL or a function"
            )


def _check_agrees(config: RunConfig) -> None:
    found = [reward.reward for reward in config.rewards if reward.reward.startswith(AGREES)]
    if len(found) > 1:
        raise ConfigError(
            f"the policy is asked as one judge, and the rewards are {' and '.join(found)}; leave one"
        )
    if found and (config.has_turns or config.system_prompt is not None or config.few_shot):
        raise ConfigError(
            f"{found[0]} asks the judge's own question, in one turn; leave out --tools, --env, --agent, "
            "system_prompt and few_shot"
        )


def _check_kl_in_reward(config: RunConfig) -> None:
    if config.divergence != "reverse-kl":
        raise ConfigError(
            f"kl_in=reward takes the log ratio of each token, and --divergence {config.divergence} is a term of the "
            "loss; say --set kl_in=loss, or leave --divergence out"
        )
    if config.critic is None and config.advantage not in (BY_TOKEN, CRPG, "raft"):
        raise ConfigError(
            f"kl_in=reward needs advantages by token, and advantage {config.advantage} has one a completion; "
            "take ycore ppo, --advantage reinforce++, or --set kl_in=loss"
        )
    if config.advantage == "raft" and not any(reward.constraint for reward in config.rewards):
        raise ConfigError(
            "kl_in=reward with --advantage raft is CGPO's, and there is no constraint; say --constraint"
        )


def _check_constraints(config: RunConfig) -> None:
    held = [reward.reward for reward in config.rewards if reward.constraint]
    if not held:
        raise ConfigError(
            f"--advantage {CRPG} is CGPO's, and there is no constraint; say --constraint NAME"
        )
    if len(held) == len(config.rewards):
        raise ConfigError(
            f"{held[0]} is a constraint, and there is no reward to raise beside it; say --reward NAME"
        )
    for reward in config.rewards:
        if reward.constraint and reward.weight:
            raise ConfigError(
                f"the constraint {reward.reward} is kept, not added up, and its weight is {reward.weight:g}; "
                "leave weight out, or constraint"
            )
    if config.algorithm == "distill" or config.advantage == "remax":
        name = "ycore distill" if config.algorithm == "distill" else "--advantage remax"
        raise ConfigError(
            f"{name} takes no constraints, and {held[0]} is one; leave --constraint out"
        )
    if config.constraints.by == "gate" and config.group_size == 1:
        raise ConfigError(
            f"the constraint {held[0]} gates rewards that are compared with their group's mean, and group_size is 1; "
            "say --group-size 4, or --set constraints.by=lagrangian"
        )
    if config.constraints.by == "lagrangian" and config.advantage == CRPG:
        raise ConfigError(
            f"--advantage {CRPG} gates the reward; leave constraints.by out, or take another advantage"
        )


def _check_token_advantages(config: RunConfig) -> None:
    by_command = config.algorithm in ("ppo", "distill")
    trl, name = (
        config.trl,
        f"ycore {config.algorithm}" if by_command else f"--advantage {config.advantage}",
    )
    loss = config.loss_from if config.loss_from != "grpo" else trl.get("loss_type")
    if loss in ("gmpo", "vespo", "luspo"):
        raise ConfigError(
            f"the loss {loss} takes one advantage a completion, and {name} has one a token; take dapo"
        )
    if (
        trl.get("importance_sampling_level", "token") != "token"
        or trl.get("off_policy_mask_threshold") is not None
    ):
        raise ConfigError(
            f"{name} has an advantage for each token; leave importance_sampling_level at token, and "
            "off_policy_mask_threshold out"
        )
    if config.trust_region == "clip-completion":
        raise ConfigError(
            f"{name} has an advantage for each token; leave --trust-region clip-completion out"
        )


def _check_ppo(config: RunConfig) -> None:
    trl = config.trl
    if config.critic is None:
        raise ConfigError(
            "ycore ppo needs its critic, and critic is null; leave it out, or take ycore grpo"
        )
    if config.advantage != "group":
        raise ConfigError(
            f"ycore ppo's advantages come from its critic; leave --advantage {config.advantage} out"
        )
    if config.accelerate in _SHARDED or trl.get("deepspeed") or trl.get("fsdp"):
        raise ConfigError(
            f"ycore ppo clips and warms up its critic apart, which {config.accelerate or 'deepspeed or fsdp'} cannot; "
            "take --accelerate ddp"
        )
    if config.quantize is not None:
        raise ConfigError(
            "ycore ppo shares the policy's base with its critic, which is not tried in 4 bits; leave --quantize out"
        )
    low, high = config.critic.range or (0.0, 1.0)
    if low >= high:
        raise ConfigError(
            f"critic.range is the lowest and the highest value; it is {low:g}, {high:g}; e.g. [0, 1]"
        )
    if config.critic.range is not None and config.critic.init is not None:
        raise ConfigError(
            "critic.init brings a head without bounds, and critic.range sets some; give one of the two"
        )


def _check_pairs(config: RunConfig) -> None:
    beta, loss = config.trl.get("beta", 0), config.loss_from
    if config.algorithm != "online-dpo" or loss not in PAIRED:
        raise ConfigError(
            f"the losses {', '.join(PAIRED)} are of ycore online-dpo, which has no other; this is "
            f"{config.algorithm} with loss_from {loss}; leave loss_from out, or take ycore online-dpo"
        )
    if config.advantage != "group":
        raise ConfigError(
            f"ycore online-dpo has no advantages; leave --advantage {config.advantage} out"
        )
    if (loss == "rrhf") == (beta > 0):
        needs = (
            "compares with no reference; say --beta 0"
            if beta
            else "needs beta above 0; say --beta 0.1"
        )
        raise ConfigError(f"the loss {loss} {needs}")


_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Fields of TRL's, and their values where the policy samples from its own distribution."""


def _check_distill(config: RunConfig) -> None:
    others = [
        reward
        for reward in config.rewards
        if not reward.reward.startswith(TEACHER) and reward.weight
    ]
    if not any(reward.reward.startswith(TEACHER) for reward in config.rewards):
        raise ConfigError(
            "ycore distill needs a teacher; say --teacher MODEL, a folder, a hub id or a run's folder"
        )
    if config.critic is not None:
        raise ConfigError("critic is of ycore ppo, and this is distill; leave critic out")
    if config.advantage == BY_TOKEN:
        raise ConfigError(
            f"ycore distill compares rewards within groups, which --advantage {BY_TOKEN} does not"
        )
    if config.group_size == 1 and others and config.advantage not in ALONE:
        raise ConfigError(
            f"group_size must be 2 or more with {others[0].reward}, which is compared within its group; it is 1; "
            "e.g. --group-size 4, or leave --reward out"
        )
    for name, value in _SAMPLING.items():
        given = config.trl.get(name, value)
        if given != value and not (name in ("top_k", "min_p") and not given):
            raise ConfigError(
                f"a teacher's probabilities are those at temperature 1, and {name} is {given}; leave {name} out"
            )
    if config.trl.get("scale_rewards", "none") not in ("none", False):
        raise ConfigError(
            "ycore distill computes advantages itself; leave scale_rewards out, and say --advantage"
        )
    exact, beta = config.distill.divergence, config.distill.beta
    if exact != "js" and beta != DistillSettings().beta:
        raise ConfigError(
            f"distill.beta is of the divergence js, and it is {exact}; leave distill.beta out"
        )
    if config.teaches_exactly and config.accelerate in ("zero3", "fsdp2"):
        raise ConfigError(
            f"distill.divergence={exact} reads a whole output layer, which {config.accelerate} shards; "
            "take --accelerate zero2 or ddp, or leave it out"
        )
    if config.teaches_exactly and config.loss_average == "prompts":
        raise ConfigError(
            f"distill.divergence={exact} is a mean over tokens; leave loss_average=prompts out"
        )
