"""The config classes of the algorithms that train on rollouts: the keys that only some of them have, and which of these
fit together."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from ycore.advantages import ADVANTAGES, TOKEN_ADVANTAGE, TURN_ADVANTAGE
from ycore.config.presets import Advantage, Divergence, TrustRegion
from ycore.config.schema import (
    SHARDS_WEIGHTS,
    TEACHER,
    OwnFunctionName,
    Positive,
    RewardConfig,
    RunConfig,
    Share,
    Strict,
    Whole,
)
from ycore.errors import ConfigError

UNGROUPED_ADVANTAGES = (TOKEN_ADVANTAGE, "remax")
"""Advantages that do not compare a completion with the rest of its group."""

CRPG = "crpg"
"""CGPO's advantage, which needs constraints."""

_COMPARING_ADVANTAGES = tuple(
    name for name in ADVANTAGES if name not in (*UNGROUPED_ADVANTAGES, TURN_ADVANTAGE, CRPG)
)
"""Advantages that compare the completions of a group or of a step, whose datasets may differ in them."""

_CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
_PROMPT_AVERAGED_LOSSES = ("dapo", "cispo")
_COMPLETION_LOSSES = ("gmpo", "vespo", "luspo")
_CLIPS = ("clip", "clip-completion")
_ENTROPY_TERMS = ("entropy_coef", "use_adaptive_entropy")


class PolicyGradientConfig(RunConfig):
    """A run that trains on rollouts with one of TRL's policy-gradient losses."""

    # The name of a paper's settings (`presets`); values that are given explicitly win over it.
    preset: str | None = None
    # The distance to the reference that TRL's `beta` weighs; all but reverse-kl need a `beta` above 0.
    divergence: Divergence = "reverse-kl"
    # What bounds a step: the loss's clip, or a mask by the distance to the policy that wrote the tokens.
    trust_region: TrustRegion = "clip"
    # For the losses `dapo` and `cispo`: the mean over all tokens, or over each prompt's tokens and then over the prompts.
    loss_average: Literal["tokens", "prompts"] = "tokens"
    # A function of your own: the weight of each scored completion, of which 0 leaves it out.
    keep: OwnFunctionName | None = None
    loss: OwnFunctionName | None = None  # another, in place of TRL's loss

    @property
    def learns_from_equal_rewards(self) -> str | None:
        if self.loss is not None:
            return f"--loss {self.loss}"
        return super().learns_from_equal_rewards

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether the KL of `beta` is taken from the rewards, and no term of the loss."""
        return getattr(self, "kl_in", "loss") == "reward"

    @property
    def own_functions(self) -> dict[str, str]:
        advantage = getattr(self, "advantage", None)  # of those that have an estimator
        names = {"advantage": advantage, "keep": self.keep, "loss": self.loss}
        return {kind: name for kind, name in names.items() if name and ":" in name}

    @property
    def loss_name(self) -> str:
        """The name of the loss, TRL's or one's own."""
        return self.loss or str(self.trl.get("loss_type", "dapo"))

    def check(self) -> None:
        super().check()
        penalty = self.changed_sampling.get("repetition_penalty")
        if penalty and self.trl.get("vllm_importance_sampling_correction", True):
            raise ConfigError(
                f"repetition_penalty {penalty:g} makes a token's probability in the engine depend on all tokens before "
                "it, and the trainer has the policy's own: most importance weights would be near 0, and nothing would "
                "be learned; leave it out, or learn without these weights: --no-vllm-importance-sampling-correction"
            )
        if self.divergence != "reverse-kl" and not self.trl.get("beta"):
            raise ConfigError(
                f"--divergence {self.divergence} needs beta above 0, its weight; it is 0; say --beta 0.04"
            )
        if self.divergence != "reverse-kl" and self.trust_region != "clip":
            raise ConfigError(
                f"--trust-region {self.trust_region} needs --divergence reverse-kl, and it is {self.divergence}; leave "
                "one of them out"
            )
        if self.divergence != "reverse-kl" and self.has_kl_in_reward:
            raise ConfigError(
                f"--divergence {self.divergence} is a term of the loss, and kl_in=reward puts the reverse KL into the "
                "reward; leave --divergence out, or say --set kl_in=loss"
            )
        if self.divergence != "reverse-kl" and self.loss is not None:
            raise ConfigError(
                f"--divergence {self.divergence} is a term of TRL's losses, in whose place is --loss {self.loss}, which "
                "gets ref_logprobs; leave one of them out"
            )
        if (
            self.trust_region not in _CLIPS
            and self.trl.get("importance_sampling_level", "token") != "token"
        ):
            raise ConfigError(
                f"--trust-region {self.trust_region} leaves out tokens, and importance_sampling_level="
                f"{self.trl['importance_sampling_level']} gives a completion's tokens one weight; leave one of them out"
            )
        if self.trust_region != "clip" and self.loss_name not in _CLIPPED_LOSSES:
            raise ConfigError(
                f"--trust-region {self.trust_region} takes the place of the clip in the losses "
                f"{', '.join(_CLIPPED_LOSSES)}, and this is {self.loss_name}; leave it out"
            )
        if self.loss_average == "prompts" and self.loss_name not in _PROMPT_AVERAGED_LOSSES:
            raise ConfigError(
                f"loss_average=prompts weighs the tokens of the losses dapo and cispo, and this is {self.loss_name}; "
                "take --loss-type dapo, or leave loss_average out"
            )

    def check_token_advantages(self, name: str) -> None:
        """Refuse losses and bounds that take one advantage a completion; `name` is what has one a token."""
        if self.loss_name in _COMPLETION_LOSSES:
            raise ConfigError(
                f"the loss {self.loss_name} takes one advantage a completion, and {name} has one a token; take dapo"
            )
        if (
            self.trl.get("importance_sampling_level", "token") != "token"
            or self.trl.get("off_policy_mask_threshold") is not None
        ):
            raise ConfigError(
                f"{name} has an advantage for each token; leave importance_sampling_level at token, and "
                "off_policy_mask_threshold out"
            )
        if self.trust_region == "clip-completion":
            raise ConfigError(
                f"{name} has an advantage for each token; leave --trust-region clip-completion out"
            )


class AdvantageConfig(PolicyGradientConfig):
    """A run whose advantages come from an estimator."""

    # `group` leaves it to TRL's `scale_rewards`; `file.py:function` is your own.
    advantage: Advantage | OwnFunctionName = "group"

    @property
    def learns_from_equal_rewards(self) -> str | None:
        if self.advantage in (TOKEN_ADVANTAGE, TURN_ADVANTAGE):
            return f"--advantage {self.advantage}"
        return super().learns_from_equal_rewards

    @property
    def uses_trl_advantages(self) -> bool:
        return self.advantage == "group"

    @property
    def pays_turns(self) -> bool:
        return self.advantage == TURN_ADVANTAGE

    @property
    def needs_greedy_baseline(self) -> bool:
        return self.advantage == "remax"

    def check(self) -> None:
        super().check()
        if self.needs_greedy_baseline and (self.streams or self.sampling.oversample > 1):
            raise ConfigError(
                "with --oversample or --max-staleness above 1 a completion may be of several versions, and remax "
                "compares with a greedy one of the same weights; leave it out"
            )


class GroupConfig(AdvantageConfig):
    """A run of `ycore grpo`."""

    # Where `beta` puts the KL: a term of the loss, or a part of each token's reward.
    kl_in: Literal["loss", "reward"] = "loss"
    # Which of TRL's trainers computes the loss.
    loss_from: Literal["grpo", "gmpo"] = "grpo"

    @property
    def uses_trl_advantages(self) -> bool:
        return super().uses_trl_advantages and not self.dataset_advantages

    @property
    def loss_name(self) -> str:
        return super().loss_name if self.loss_from == "grpo" or self.loss else self.loss_from

    @property
    def dataset_advantages(self) -> dict[str, str]:
        """The estimators of datasets that have another than the run's, by the dataset's name."""
        return {part.name: part.advantage for part in self.mixture if part.advantage}

    def check(self) -> None:
        super().check()
        refuse_teachers(self)
        for name, advantage in self.dataset_advantages.items():
            if not {advantage, self.advantage} <= {*_COMPARING_ADVANTAGES}:
                raise ConfigError(
                    f"the dataset {name} has advantage {advantage}, and the run {self.advantage}; where datasets differ "
                    f"both are one of {', '.join(_COMPARING_ADVANTAGES)}"
                )
        if self.group_size == 1 and not (
            self.advantage in UNGROUPED_ADVANTAGES or ":" in self.advantage
        ):
            raise ConfigError(
                f"group_size must be 2 or more with advantage {self.advantage}, which compares a completion with the "
                "others of its group; it is 1; e.g. --group-size 8, or --advantage reinforce++, or ycore ppo"
            )
        self._check_constraints()
        self._check_gmpo()
        if self.kl_in == "reward" and self.advantage != TOKEN_ADVANTAGE:
            raise ConfigError(
                f"kl_in=reward needs advantages by token, and advantage {self.advantage} has one a completion; "
                "take ycore ppo, --advantage reinforce++, or --set kl_in=loss"
            )
        if self.pays_turns and not self.env:
            raise ConfigError(
                f"--advantage {TURN_ADVANTAGE} learns from rewards of turns, which only an environment gives; say "
                "--env, or take another advantage"
            )
        if self.advantage in (TOKEN_ADVANTAGE, TURN_ADVANTAGE):
            self.check_token_advantages(f"--advantage {self.advantage}")

    def _check_gmpo(self) -> None:
        """Refuse what TRL's trainer of this loss does not read."""
        if self.loss_name != "gmpo":
            return
        sampling = self.sampling
        stale = {
            "--max-staleness": sampling.max_staleness,
            "--oversample": sampling.oversample if sampling.oversample > 1 else 0,
            "sampling.reuse": sampling.reuse,
        }
        for name, value in stale.items():
            if value:
                raise ConfigError(
                    f"{name} {value:g} trains on tokens of older versions, for which the loss gmpo does not correct; "
                    "leave it out, or take another loss, e.g. --preset gspo"
                )
        refuse_unread(self, "gmpo", *_ENTROPY_TERMS, "delta", "off_policy_mask_threshold")

    def _check_constraints(self) -> None:
        constraints = check_constraints(self)
        if self.advantage != CRPG and not constraints:
            return
        if not constraints:
            raise ConfigError(
                f"--advantage {CRPG} is CGPO's, and there is no constraint; say --constraint NAME"
            )
        if self.needs_greedy_baseline:
            raise ConfigError(
                f"--advantage remax takes no constraints, and {constraints[0].reward} is one; leave --constraint out"
            )
        if self.constraints.by == "lagrangian" and self.advantage == CRPG:
            raise ConfigError(
                f"--advantage {CRPG} gates the reward; leave constraints.by out, or take another advantage"
            )


class CriticSettings(Strict):
    """The critic of `ycore ppo`, and how its values become advantages."""

    # The folder of a run of `ycore reward` on the same model, to begin with; None is the policy with a head of zeros.
    init: str | None = None
    lr_ratio: PositiveFloat = 10.0  # the critic's learning rate over the policy's
    max_grad_norm: PositiveFloat = 1.0  # the bound of the critic's gradient
    # First steps in which only the critic learns. The schedule of the learning rate runs on.
    warmup_steps: Whole = 10
    lam: Share = 1.0  # GAE's lambda of the advantages
    # Above 0, lambda follows the length l of a completion: 1 - 1 / (alpha * l), at least 0.
    alpha: PositiveFloat | None = None
    target_lam: Share = 1.0  # of the value targets; 1 is Monte Carlo
    # How far a value may move from the round's.
    value_clip: PositiveFloat | None = None
    # Subtract the advantages' mean and divide by their deviation, among the tokens of all ranks.
    whiten: bool = True
    macro_tokens: Positive = 1  # tokens that share one advantage (MA-RLHF)
    # Bounds of a value, those of the reward; None is unbounded.
    range: tuple[float, float] | None = None


class PPOConfig(PolicyGradientConfig):
    """A run of `ycore ppo`."""

    critic: CriticSettings = CriticSettings()
    kl_in: Literal["loss", "reward"] = "reward"  # where `beta` puts the KL

    has_critic: ClassVar = True

    @property
    def learns_from_equal_rewards(self) -> str | None:
        return f"ycore {self.algorithm}"

    @property
    def teaches_alone(self) -> bool:
        return True

    def check(self) -> None:
        super().check()
        refuse_dataset_advantages(self)
        refuse_teachers(self)
        if self.quantize is not None:
            raise ConfigError(
                "ycore ppo shares the policy's base with its critic, which is not tried in 4 bits; leave --quantize out"
            )
        low, high = self.critic.range or (0.0, 1.0)
        if low >= high:
            raise ConfigError(
                f"critic.range is the lowest and the highest value; it is {low:g}, {high:g}; e.g. [0, 1]"
            )
        if self.critic.range is not None and self.critic.init is not None:
            raise ConfigError(
                "critic.init brings a head without bounds, and critic.range sets some; give one of the two"
            )
        check_constraints(self)
        self.check_token_advantages("ycore ppo")


class DistillSettings(Strict):
    """The divergence that `ycore distill` makes small."""

    # `sampled`: the reverse KL, by the tokens written, as their advantages; the teacher has engines. The rest are
    # exact, over the whole vocabulary, as the loss; every rank of the trainer then holds the teacher.
    divergence: Literal["sampled"] | Divergence = "sampled"
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5  # `js`: the teacher's share of the mixture


class DistillConfig(AdvantageConfig):
    """A run of `ycore distill`."""

    distill: DistillSettings = DistillSettings()

    @property
    def uses_trl_advantages(self) -> bool:
        return False

    @property
    def learns_from_equal_rewards(self) -> str | None:
        return f"ycore {self.algorithm}"

    @property
    def teaches_alone(self) -> bool:
        return True

    @property
    def teacher_divergence(self) -> str:
        return self.distill.divergence

    def check(self) -> None:
        super().check()
        refuse_dataset_advantages(self)
        if self.own_functions:
            named = ", ".join(f"--{kind} {name}" for kind, name in self.own_functions.items())
            raise ConfigError(
                f"ycore distill calls no functions of your own; leave {named} out, or take ycore grpo"
            )
        teachers = [reward for reward in self.rewards if reward.kind == TEACHER]
        if not teachers:
            raise ConfigError(
                "ycore distill needs a teacher; say --teacher MODEL, a folder, a hub id or a run's folder"
            )
        self._check_rewards()
        for name, value in self.changed_sampling.items():
            raise ConfigError(
                f"a teacher's probabilities are those at temperature 1, and {name} is {value}; leave {name} out"
            )
        if self.trl.get("scale_rewards", "none") not in ("none", False):
            raise ConfigError(
                "ycore distill computes advantages itself; leave scale_rewards out, and say --advantage"
            )
        self._check_divergence()
        self.check_token_advantages("ycore distill")

    def _check_rewards(self) -> None:
        if self.advantage in (TOKEN_ADVANTAGE, TURN_ADVANTAGE, CRPG):
            raise ConfigError(
                f"ycore distill compares rewards within groups, which --advantage {self.advantage} does not"
            )
        compared = [
            reward.reward for reward in self.rewards if reward.kind != TEACHER and reward.weight
        ]
        if self.group_size == 1 and compared and self.advantage not in UNGROUPED_ADVANTAGES:
            raise ConfigError(
                f"group_size must be 2 or more with {compared[0]}, which is compared within its group; it is 1; "
                "e.g. --group-size 4, or leave --reward out"
            )
        constraints = [reward.reward for reward in self.rewards if reward.constraint]
        if constraints:
            raise ConfigError(
                f"ycore distill takes no constraints, and {constraints[0]} is one; leave --constraint out"
            )

    def _check_divergence(self) -> None:
        name = self.distill.divergence
        if name != "js" and self.distill.beta != DistillSettings().beta:
            raise ConfigError(
                f"distill.beta is of the divergence js, and it is {name}; leave distill.beta out"
            )
        if self.teaches_exactly and self.accelerate in SHARDS_WEIGHTS:
            raise ConfigError(
                f"distill.divergence={name} reads a whole output layer, which {self.accelerate} shards; "
                "take --accelerate zero2 or ddp, or leave it out"
            )
        if self.teaches_exactly:
            refuse_unread(self, f"of distill.divergence={name}", *_ENTROPY_TERMS)
        if self.teaches_exactly and self.loss_average == "prompts":
            raise ConfigError(
                f"distill.divergence={name} is a mean over tokens; leave loss_average=prompts out"
            )


class OnlineDPOConfig(RunConfig):
    """A run of `ycore online-dpo`."""

    # The loss, which compares the best and the worst completion of a group, or all of them (rrhf).
    loss_from: Literal["dpo", "ipo", "rrhf"] = "dpo"

    pairs_completions: ClassVar = True

    def check(self) -> None:
        super().check()
        refuse_dataset_advantages(self)
        refuse_teachers(self)
        if self.group_size == 1:
            raise ConfigError(
                "group_size must be 2 or more for ycore online-dpo, which compares the completions of a group; it is "
                "1; e.g. --group-size 8"
            )
        beta = self.trl.get("beta", 0)
        if self.loss_from == "rrhf" and beta > 0:
            raise ConfigError("the loss rrhf compares with no reference; say --beta 0")
        if self.loss_from != "rrhf" and not beta > 0:
            raise ConfigError(f"the loss {self.loss_from} needs beta above 0; say --beta 0.1")
        check_constraints(self)
        refuse_unread(self, self.loss_from, *_ENTROPY_TERMS)


def refuse_unread(config: RunConfig, loss: str, *names: str) -> None:
    """Refuse TRL's fields of these names, which the loss does not read."""
    for name in names:
        if config.trl.get(name):
            raise ConfigError(
                f"{name} is {config.trl[name]}, and the loss {loss} does not read it; leave it out, or take another loss"
            )


def refuse_dataset_advantages(config: RunConfig) -> None:
    for part in config.mixture:
        if part.advantage is not None:
            raise ConfigError(
                f"the dataset {part.name} has advantage {part.advantage}, which is for ycore grpo, and this is "
                f"{config.algorithm}; leave it out"
            )


def refuse_teachers(config: RunConfig) -> None:
    if any(reward.kind == TEACHER for reward in config.rewards):
        raise ConfigError(
            f"a teacher is of ycore distill, and this is {config.algorithm}; take ycore distill"
        )


def check_constraints(config: RunConfig) -> list[RewardConfig]:
    """Return the rewards that are constraints; ConfigError where they cannot be kept."""
    constraints = [reward for reward in config.rewards if reward.constraint]
    if not constraints:
        return []
    first = constraints[0].reward
    if len(constraints) == len(config.rewards):
        raise ConfigError(
            f"{first} is a constraint, and there is no reward to raise beside it; say --reward NAME"
        )
    for reward in constraints:
        if reward.weight:
            raise ConfigError(
                f"the constraint {reward.reward} is kept, not added up, and its weight is {reward.weight:g}; "
                "leave weight out, or constraint"
            )
        for part in config.mixture:
            if part.rewards is not None and reward.reward not in part.rewards:
                raise ConfigError(
                    f"a completion whose constraint is not scored teaches nothing, and the rewards of {part.name} are "
                    f"{', '.join(part.rewards)}; add {reward.reward} to them"
                )
    if config.constraints.by == "gate" and config.group_size == 1:
        raise ConfigError(
            f"the constraint {first} gates rewards that are compared with their group's mean, and group_size is 1; "
            "say --group-size 4, or --set constraints.by=lagrangian"
        )
    return constraints
