"""Presets: a paper's settings of the group algorithms, as data. The user's own values win over a preset's.

A preset sets every field that its algorithm consists of, even where TRL's default is the same today: what is printed
is the whole algorithm, and no default of TRL can change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ycore.errors import ConfigError, nearest

Advantage = Literal["group", "dr-grpo", "rloo", "lite-ppo", "reinforce++", "reinforce++-baseline", "remax", "maxrl"]
"""The names for `--advantage`: the keys of `ycore.trl.advantages.ESTIMATORS`. `group` leaves the advantage to TRL."""

ADVANTAGES: tuple[str, ...] = get_args(Advantage)

Divergence = Literal["reverse-kl", "forward-kl", "js"]
"""The names for `--divergence`: the keys of `ycore.trl.divergence.DIVERGENCES`."""


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm's settings."""

    name: str
    title: str
    source: str
    trl: Mapping[str, Any]
    """Fields of TRL's config."""

    run: Mapping[str, Any] = field(default_factory=dict)
    """Keys of RunConfig: `advantage`, `sampling`, `loss_from`."""

    notes: tuple[str, ...] = ()
    """Differences from the paper, a line each."""

    overlong_share: float | None = None
    """Share of `max_tokens` over which the reward `overlong` falls from 0 to -1; None is without that reward."""


_ONE_STEP = (
    "clipping acts only where a round serves more than one optimizer step: "
    "say `--num-iterations 2`, or `--steps-per-generation` above the gradient accumulation"
)


def _trl(loss_type: str | None, **fields: Any) -> dict[str, Any]:
    """Fields of TRL's config: what is given, on what most papers share; None leaves out one that the loss ignores."""
    shared = {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
    }
    return {name: value for name, value in (shared | fields).items() if value is not None}


_PRESETS = (
    Preset(
        name="grpo",
        title="GRPO, as in DeepSeekMath",
        source="arXiv 2402.03300, sections 4.1 and 4.2",
        trl=_trl("grpo", beta=0.04, use_bias_correction_kl=False, num_iterations=1),
        notes=(
            "the paper gives no epsilon; 0.2 is PPO's and TRL's",
            "beta above 0 keeps a reference model; say `--beta 0` to do without",
            "the paper's KL term has no importance ratio; `--use-bias-correction-kl true` makes its gradient unbiased",
        ),
    ),
    Preset(
        name="dr-grpo",
        title="Dr. GRPO: no division by deviation or length",
        source="arXiv 2503.20783, section 3.2",
        trl=_trl("dr_grpo", scale_rewards="none"),
        notes=("the loss is divided by max_tokens, a constant; another max_tokens is another step size",),
    ),
    Preset(
        name="dapo",
        title="DAPO: clip-higher, dynamic sampling, token loss, overlong shaping and filtering",
        source="arXiv 2503.14476, sections 3 and 4.1",
        trl=_trl("dapo", epsilon_high=0.28, mask_truncated_completions=True),
        run={"sampling": {"dynamic": True}},
        notes=(_ONE_STEP,),
        overlong_share=0.2,  # 4096 of 20480 tokens
    ),
    Preset(
        name="gspo",
        title="GSPO: one importance ratio per completion",
        source="arXiv 2507.18071, section 5.1",
        trl=_trl("grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        notes=("the paper takes 4 optimizer steps a round; with one, GSPO is GRPO", _ONE_STEP),
    ),
    Preset(
        name="cispo",
        title="CISPO: the importance weight is capped, no token is dropped",
        source="arXiv 2506.13585, section 3.1; the cap from arXiv 2510.13786",
        trl=_trl("cispo", epsilon=None, epsilon_high=5.0),
        notes=(
            "in this loss epsilon_high is the cap itself; left alone, TRL would cap every weight at 0.2",
            "the weight has no lower bound, so epsilon is not used",
        ),
    ),
    Preset(
        name="lite-ppo",
        title="Lite PPO: group mean, batch deviation, token loss",
        source="arXiv 2508.08221",
        trl=_trl("dapo", scale_rewards="batch", num_iterations=1),
        notes=("the paper samples at temperature 0.99, top_p 0.99, top_k 100; sampling is left as it is",),
    ),
    Preset(
        name="gmpo",
        title="GMPO: the geometric mean of the tokens' ratios",
        source="arXiv 2507.20673, section 4",
        trl=_trl(None, epsilon=0.4, epsilon_high=0.4),
        run={"loss_from": "gmpo"},
        notes=(
            "the loss is TRL's experimental GMPOTrainer, reached by `loss_from: gmpo`; it reads no loss_type",
            "there the epsilons are in log space: ratios from exp(-0.4) to exp(0.4)",
            "it does not correct for an engine whose probabilities differ from the trainer's",
            _ONE_STEP,
        ),
    ),
    Preset(
        name="scalerl",
        title="ScaleRL: CISPO, batch normalisation, float32 head, groups without spread left out",
        source="arXiv 2510.13786",
        trl=_trl("cispo", scale_rewards="batch", epsilon=None, epsilon_high=5.0),
        run={"advantage": "reinforce++-baseline", "sampling": {"dynamic": True}},
        notes=(
            "the paper's float32 head is `--cast-lm-head-to-fp32`, for models with a head apart from their embedding",
            "advantages are divided by their own batch deviation; TRL's `scale_rewards=batch` takes the rewards'",
            "the paper averages the loss over prompts; TRL's cispo averages over tokens",
            "the paper leaves groups without spread out; dynamic sampling also draws others in their place",
            "left out: pipelined generation, forced ends of thinking, dropping prompts solved 9 times in 10",
        ),
    ),
    Preset(
        name="rloo",
        title="RLOO: REINFORCE with the other completions' mean as the baseline",
        source="arXiv 2402.14740, section 3",
        trl=_trl("dr_grpo", scale_rewards="none", num_iterations=1),
        run={"advantage": "rloo"},
        notes=(
            "with one optimizer step a round the gradient is the paper's, and that of `trl rloo`, over max_tokens",
            "with several, tokens are clipped one by one, where `trl rloo` clips the ratio of the whole completion",
            "the paper has the KL in the reward; here `--beta 0.05` puts GRPO's term into the loss",
        ),
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _PRESETS}


def find_preset(name: str) -> Preset:
    """The preset of that name; ConfigError for an unknown one names the nearest."""
    if name not in PRESETS:
        raise ConfigError(f"a preset is one of {', '.join(PRESETS)}; it is {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]


def preset_layer(preset: Preset) -> dict[str, Any]:
    """The preset as the lowest layer of a config, under recipe, `--set` and options."""
    return {"trl": dict(preset.trl), **preset.run}


def preset_rewards(preset: Preset, rewards: Sequence[Any], *, max_tokens: int) -> list[Any]:
    """The run's rewards, then the one that the preset adds, unless the run has one of that name.

    A weight of 0 switches it off: `--set rewards.1.weight=0`.
    """
    names = [reward["reward"] if isinstance(reward, Mapping) else reward for reward in rewards]
    cache_tokens = 0 if preset.overlong_share is None else int(max_tokens * preset.overlong_share)
    if not cache_tokens or "overlong" in names:
        return list(rewards)
    return [*rewards, {"reward": "overlong", "args": {"max_tokens": max_tokens, "cache_tokens": cache_tokens}}]


def preset_lines(preset: Preset, *, trl: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """What the preset sets and what the user changed of it, a line each, for the plan.

    Args:
        trl: TRL's fields as the run has them.
        run: its RunConfig as plain values.
    """
    lines = [f"{preset.title} ({preset.source})"]
    for settings, resolved in ((preset.trl, trl), (_flat(preset.run), _flat(run))):
        lines += [_line(name, value, resolved[name]) for name, value in settings.items()]
    if preset.overlong_share is not None:
        lines.append(f"reward overlong, over the last {preset.overlong_share:g} of max_tokens")
    return [*lines, *(f"note: {note}" for note in preset.notes)]


def check_divergence(divergence: str, *, beta: float) -> None:
    """ConfigError for a distance other than TRL's without a weight."""
    if divergence != "reverse-kl" and not beta:
        raise ConfigError(f"--divergence {divergence} needs beta above 0, its weight; it is 0; say --beta 0.04")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return flat


def _line(name: str, preset: Any, resolved: Any) -> str:
    if resolved != preset:
        return f"{name} {_shown(resolved)}, yours; the preset says {_shown(preset)}"
    return f"{name} {_shown(preset)}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
