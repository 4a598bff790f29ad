"""Presets: a paper's settings of the group algorithms, as data. The user's own values win over a preset's.

Not here: sizes (batch, group, lengths, learning rate), which belong to a run and not to an algorithm; the estimators
(`advantages`) and the divergences (`divergence`) that the names below stand for; what a TRL field may be
(`config.trl_fields`). No torch: the command line reads this file.

A preset says every field that its algorithm is made of, also where TRL's default is the same today, so that what is
printed is the whole algorithm and no default of TRL can change it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ycore.errors import ConfigError, nearest

ADVANTAGES = ("group", "dr-grpo", "rloo", "lite-ppo", "reinforce++", "reinforce++-baseline", "remax", "maxrl")
"""What `--advantage` takes: the keys of `advantages.ESTIMATORS`. `group` leaves the advantage to TRL."""

DIVERGENCES = ("reverse-kl", "forward-kl", "js")
"""What `--divergence` takes: the keys of `divergence.DIVERGENCES`. `reverse-kl` is TRL's own."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm's settings.

    `trl` are fields of TRL's config, `run` keys of RunConfig: `advantage`, `dynamic_sampling`, `trainer`.
    `when_untied` are TRL fields for models whose output head has its own weights.
    `notes` say what of the paper these settings do not do, one line each.
    """

    name: str
    title: str
    source: str
    trl: Mapping[str, Any]
    run: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    when_untied: Mapping[str, Any] | None = None


_ONE_STEP = (
    "clipping acts only where a round serves more than one optimizer step: "
    "say `--num-iterations 2`, or `--steps-per-generation` above the gradient accumulation"
)

_GRPO = Preset(
    name="grpo",
    title="GRPO, as in DeepSeekMath",
    source="arXiv 2402.03300, sections 4.1 and 4.2",
    trl={
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "num_iterations": 1,
    },
    run={},
    notes=(
        "the paper gives no epsilon; 0.2 is PPO's and TRL's",
        "beta above 0 keeps a reference model; say `--beta 0` to do without",
        "the paper's KL term has no importance ratio; `--use-bias-correction-kl true` gives it the unbiased gradient",
    ),
)

_DR_GRPO = Preset(
    name="dr-grpo",
    title="Dr. GRPO: no division by deviation or length",
    source="arXiv 2503.20783, section 3.2",
    trl={
        "loss_type": "dr_grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
    },
    run={},
    notes=("the loss is divided by max_tokens, a constant; another max_tokens is another step size",),
)

_DAPO = Preset(
    name="dapo",
    title="DAPO: clip-higher, dynamic sampling, token loss, overlong filtering",
    source="arXiv 2503.14476, sections 3 and 4.1",
    trl={
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "mask_truncated_completions": True,
    },
    run={"dynamic_sampling": True},
    notes=(
        "the overlong punishment is a reward of its own: add `overlong` with cache_tokens a fifth of max_tokens "
        "(4096 of 20480 in the paper)",
        _ONE_STEP,
    ),
)

_GSPO = Preset(
    name="gspo",
    title="GSPO: one importance ratio a completion",
    source="arXiv 2507.18071, section 5.1",
    trl={
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "scale_rewards": "group",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "beta": 0.0,
    },
    run={},
    notes=("the paper takes 4 optimizer steps a round; with one, GSPO is GRPO", _ONE_STEP),
)

_CISPO = Preset(
    name="cispo",
    title="CISPO: the importance weight is capped, no token is dropped",
    source="arXiv 2506.13585, section 3.1; the cap from arXiv 2510.13786",
    trl={
        "loss_type": "cispo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon_high": 5.0,
        "beta": 0.0,
    },
    run={},
    notes=(
        "in this loss epsilon_high is the cap itself; left alone, TRL would cap every weight at 0.2",
        "the weight has no lower bound, so epsilon is not used",
    ),
)

_LITE_PPO = Preset(
    name="lite-ppo",
    title="Lite PPO: group mean, batch deviation, token loss",
    source="arXiv 2508.08221",
    trl={
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "batch",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "num_iterations": 1,
    },
    run={},
    notes=("the paper samples at temperature 0.99, top_p 0.99, top_k 100; sampling is left as it is",),
)

_GMPO = Preset(
    name="gmpo",
    title="GMPO: the geometric mean of the tokens' ratios",
    source="arXiv 2507.20673, section 4",
    trl={
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.4,
        "epsilon_high": 0.4,
        "beta": 0.0,
    },
    run={"trainer": "gmpo"},
    notes=(
        "the loss is TRL's experimental GMPOTrainer, reached by `trainer: gmpo`; it reads no loss_type",
        "there the epsilons are in log space: ratios from exp(-0.4) to exp(0.4)",
        "it does not correct for an engine whose probabilities differ from the trainer's",
        _ONE_STEP,
    ),
)

_SCALERL = Preset(
    name="scalerl",
    title="ScaleRL: CISPO, batch normalisation, float32 head, groups without spread left out",
    source="arXiv 2510.13786",
    trl={
        "loss_type": "cispo",
        "importance_sampling_level": "token",
        "scale_rewards": "batch",
        "epsilon_high": 5.0,
        "beta": 0.0,
    },
    run={"advantage": "reinforce++-baseline", "dynamic_sampling": True},
    when_untied={"cast_lm_head_to_fp32": True},
    notes=(
        "advantages are divided by their own deviation in the batch; TRL's `scale_rewards=batch` takes the rewards'",
        "the paper averages the loss over prompts; TRL's cispo averages over tokens",
        "the paper leaves groups without spread out; dynamic sampling also draws others in their place",
        "not here: pipelined generation, forced ends of thinking, dropping prompts solved 9 times in 10",
    ),
)

PRESETS: Mapping[str, Preset] = {
    preset.name: preset for preset in (_GRPO, _DR_GRPO, _DAPO, _GSPO, _CISPO, _LITE_PPO, _GMPO, _SCALERL)
}


def find_preset(name: str) -> Preset:
    """The preset of that name, or a ConfigError that names the nearest."""
    if name not in PRESETS:
        raise ConfigError(f"a preset is one of {', '.join(PRESETS)}; it is {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]


def apply_preset(
    preset: Preset, *, user_trl: Mapping[str, Any], user_run: Mapping[str, Any], untied: bool = False
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """TRL fields and RunConfig keys of the preset under the user's own, and lines that say what came from where.

    Args:
        user_trl: what the user said, by TRL's names, in the fields' own types.
        user_run: what the user said, by RunConfig's keys.
        untied: whether the model's output head is known to have weights of its own.
    """
    lines = [f"preset {preset.name}: {preset.title} ({preset.source})"]
    ours = {**preset.trl, **((preset.when_untied or {}) if untied else {})}
    for settings, said in ((ours, user_trl), (preset.run, user_run)):
        lines += [_line(name, value, said) for name, value in settings.items()]
    if not untied:
        left_out = set(preset.when_untied or {}) - set(user_trl)
        lines += [f"  {name} is left out: it needs a model whose head is not tied" for name in sorted(left_out)]
    return {**ours, **user_trl}, {**preset.run, **user_run}, lines


def _line(name: str, value: Any, said: Mapping[str, Any]) -> str:
    if name in said and said[name] != value:
        return f"  {name} {_shown(said[name])}, yours; the preset says {_shown(value)}"
    return f"  {name} {_shown(value)}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
