import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from trl import GRPOConfig
from trl.experimental.gmpo import GMPOConfig

from ycore.advantages import ESTIMATORS, TOKEN_ADVANTAGE, TURN_ADVANTAGE
from ycore.config.algorithms import ALGORITHMS
from ycore.config.presets import (
    Advantage,
    Preset,
    TrustRegion,
    find_preset,
    preset_lines,
    presets,
)
from ycore.config.resolve import resolve
from ycore.config.trl_arguments import aliases, refusal
from ycore.config.trl_fields import coerce, fields_of
from ycore.errors import ConfigError
from ycore.trl.importance import BOUNDS, LIMITS

# The papers' numbers, written here a second time: what the resolved TRL config must say.
PAPERS: dict[str, dict[str, Any]] = {
    "grpo": {  # DeepSeekMath 4.2: KL coefficient 0.04, one update a round; advantages by group deviation, mean of means
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.04,
        "num_iterations": 1,
        "use_bias_correction_kl": False,
        "mask_truncated_completions": False,
    },
    "dr-grpo": {
        "loss_type": "dr_grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "mask_truncated_completions": False,
    },
    "dapo": {  # 4.1: epsilon low 0.2, high 0.28; 2.3: no KL
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "mask_truncated_completions": True,
    },
    "gspo": {  # 5.1: 3e-4 and 4e-4
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "scale_rewards": "group",
        "epsilon": 0.0003,
        "epsilon_high": 0.0004,
        "beta": 0.0,
    },
    "cispo": {
        "loss_type": "cispo",
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon_high": 5.0,
        "beta": 0.0,
        "delta": None,
    },
    "lite-ppo": {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "batch",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "num_iterations": 1,
        "mask_truncated_completions": False,
    },
    "gmpo": {  # ratios from exp(-0.4) to exp(0.4)
        "importance_sampling_level": "token",
        "scale_rewards": "group",
        "epsilon": 0.4,
        "epsilon_high": 0.4,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
    },
    "scalerl": {
        "loss_type": "cispo",
        "importance_sampling_level": "token",
        "scale_rewards": "batch",
        "epsilon_high": 5.0,
        "beta": 0.0,
    },
    "rloo": {  # one action a completion: its tokens' terms are added up, not averaged, and no deviation divides
        "loss_type": "dr_grpo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "num_iterations": 1,
    },
    "ppo-n-plus": {  # detail 20; 4 epochs of one minibatch
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.05,
        "num_iterations": 4,
    },
    "vapo": {  # clip-higher, no KL
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
    },
    "bpco": {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
    },
    "ma-rlhf": {  # the constants of its trainer and scripts
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "scale_rewards": "none",
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.05,
    },
}
CRITICS: dict[str, dict[str, Any]] = {
    "ppo-n-plus": {
        "lr_ratio": 1.0,
        "warmup_steps": 0,
        "lam": 0.95,
        "target_lam": 0.95,
        "value_clip": 0.2,
        "whiten": True,
    },
    "vapo": {
        "lr_ratio": 2.0,
        "warmup_steps": 50,
        "lam": 1.0,
        "alpha": 0.05,
        "target_lam": 1.0,
        "whiten": True,
    },
    "bpco": {
        "lr_ratio": 10.0,
        "warmup_steps": 15,
        "lam": 1.0,
        "alpha": 0.4,
        "target_lam": 1.0,
        "whiten": False,
        "range": [0.0, 1.0],
    },
    "ma-rlhf": {
        "lr_ratio": 1.0,
        "warmup_steps": 0,
        "lam": 0.95,
        "target_lam": 0.95,
        "value_clip": 0.2,
        "whiten": False,
        "macro_tokens": 5,
    },
}
RUNS: dict[str, dict[str, Any]] = {
    "rloo": {"advantage": "rloo", "trust_region": "clip-completion"},
    "dapo": {"sampling": {"dynamic": True}},
    "gmpo": {"loss_from": "gmpo"},
    "scalerl": {
        "advantage": "reinforce++-baseline",
        "loss_average": "prompts",
        "sampling": {
            "dynamic": True,
            "curriculum": True,
            "drop_at": 0.9,
            "drop_after": 1,
            "least": 1.0,
        },
    },
    **{name: {"kl_in": "reward", "critic": critic} for name, critic in CRITICS.items()},
}
RUNS["bpco"]["trust_region"] = "dppo-tv"
# What an algorithm here is made of. The exceptions are losses that do not read the field.
CORE = {
    "loss_type",
    "importance_sampling_level",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "beta",
}
UNREAD = {"cispo": {"epsilon"}, "scalerl": {"epsilon"}, "gmpo": {"loss_type"}}


def resolved(preset: Preset, folder: Path, **user_trl: Any) -> GRPOConfig:
    config = GMPOConfig if preset.run.get("loss_from") == "gmpo" else GRPOConfig
    return config(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        **{**preset.trl, **user_trl},
    )


@pytest.mark.parametrize("name", sorted(presets()))
def test_the_resolved_trl_config_has_the_papers_numbers(name: str, tmp_path: Path) -> None:
    config = resolved(presets()[name], tmp_path)
    assert {field: vars(config)[field] for field in PAPERS[name]} == PAPERS[name]
    assert dict(presets()[name].run) == RUNS.get(name, {})


@pytest.mark.parametrize("name", sorted(presets()))
def test_the_papers_table_covers_all_that_a_preset_sets(name: str) -> None:
    preset = presets()[name]
    assert set(preset.trl) <= set(PAPERS[name])


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_leaves_no_part_of_its_algorithm_to_a_default(name: str) -> None:
    assert set(presets()[name].trl) >= CORE - UNREAD.get(name, set())


@pytest.mark.parametrize("name", sorted(presets()))
def test_fields_are_trls_and_the_users_to_set(name: str) -> None:
    fields = fields_of("GRPOConfig")
    for key, value in presets()[name].trl.items():
        assert coerce(fields[key], value) == value
        assert refusal(key, ALGORITHMS["grpo"]) is None and key not in aliases(
            ALGORITHMS["grpo"]
        )


def test_run_keys_are_those_that_presets_may_set() -> None:
    allowed = {
        "advantage",
        "sampling",
        "loss_from",
        "kl_in",
        "critic",
        "trust_region",
        "loss_average",
    }
    assert {key for preset in presets().values() for key in preset.run} <= allowed
    assert all(
        preset.run.get("advantage", "group") in ESTIMATORS for preset in presets().values()
    )


def test_names_for_the_command_line_are_those_of_the_functions() -> None:
    assert tuple(ESTIMATORS) == tuple(
        name for name in get_args(Advantage) if name not in (TOKEN_ADVANTAGE, TURN_ADVANTAGE)
    )
    assert {*LIMITS, *BOUNDS, "clip", "clip-completion"} == set(
        get_args(TrustRegion)
    ) and TOKEN_ADVANTAGE in get_args(Advantage)


def test_trl_alone_would_cap_cispo_at_a_fifth(tmp_path: Path) -> None:
    """The trap: left alone, the cap is None here and becomes epsilon = 0.2 in the trainer."""
    bare = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", loss_type="cispo"
    )
    assert bare.epsilon_high is None and bare.epsilon == 0.2
    assert resolved(presets()["cispo"], tmp_path).epsilon_high == 5.0


def test_the_users_values_win_and_the_lines_say_so() -> None:
    said = {"model": "m", "dataset": "d", "rewards": ["r"], "preset": "dapo"}
    config = resolve(
        options={**said, "trl": {"epsilon_high": "0.3"}, "sampling": {"dynamic": False}}
    )
    assert config.trl == {**presets()["dapo"].trl, "epsilon_high": 0.3}
    assert config.sampling.dynamic is False and config.preset == "dapo"
    lines = preset_lines(presets()["dapo"], trl=config.trl, run=config.model_dump())
    assert lines[:9] == [
        "DAPO: clip-higher, dynamic sampling, token loss, overlong shaping and filtering "
        "(arXiv 2503.14476, sections 3 and 4.1)",
        "loss_type dapo",
        "importance_sampling_level token",
        "scale_rewards group",
        "epsilon 0.2",
        "epsilon_high 0.3, yours; the preset says 0.28",
        "beta 0",
        "mask_truncated_completions true",
        "sampling.dynamic false, yours; the preset says true",
    ]
    assert lines[9] == "reward overlong, over the last 0.2 of max_tokens"
    assert all(line.startswith("note: ") for line in lines[10:]) and len(lines) > 10


def test_dapo_brings_its_overlong_punishment_and_the_user_can_change_it() -> None:
    """4096 of 20480 tokens in the paper, section 4.1."""
    said = {
        "model": "m",
        "dataset": "d",
        "rewards": ["r"],
        "preset": "dapo",
        "max_tokens": 20480,
    }
    brought = {"reward": "overlong", "args": {"max_tokens": 20480, "cache_tokens": 4096}}
    config = resolve(options=said)
    assert [reward.reward for reward in config.rewards] == ["r", "overlong"]
    assert config.rewards[1].model_dump(exclude_defaults=True) == brought
    assert resolve(options=said, sets=["rewards.1.weight=0"]).rewards[1].weight == 0
    overlong = {"reward": "overlong", "args": {"max_tokens": 100, "cache_tokens": 50}}
    assert len(resolve(options={**said, "rewards": [overlong]}).rewards) == 1, (
        "a run's own is not doubled"
    )
    assert resolve(recipe=config.model_dump(mode="json")) == config, (
        "a resumed run is the same run"
    )
    assert len(resolve(recipe=said, options={"algorithm": "eval"}).rewards) == 1, (
        "a measurement is not trained"
    )
    assert len(resolve(options={**said, "preset": "gspo"}).rewards) == 1


@pytest.mark.parametrize("name", ["forward-kl", "js"])
def test_another_divergence_needs_its_weight(name: str) -> None:
    said = {"model": "m", "dataset": "d", "rewards": ["r"], "divergence": name}
    with pytest.raises(
        ConfigError,
        match=f"--divergence {name} needs beta above 0, its weight; it is 0; say --beta",
    ):
        resolve(options=said)
    assert resolve(options={**said, "trl": {"beta": "0.1"}}).divergence == name
    assert resolve(options={**said, "preset": "grpo"}).trl["beta"] == 0.04


def test_a_recipe_lies_on_the_preset_it_names() -> None:
    recipe = {
        "model": "m",
        "dataset": "d",
        "rewards": ["r"],
        "preset": "scalerl",
        "trl": {"beta": 0.1},
    }
    config = resolve(recipe=recipe, sets=["advantage=rloo"])
    assert (config.trl["beta"], config.trl["loss_type"], config.advantage) == (
        0.1,
        "cispo",
        "rloo",
    )


def test_the_layer_is_a_copy() -> None:
    presets()["dapo"].layer["trl"]["beta"] = None
    assert presets()["dapo"].trl["beta"] == 0.0


def test_an_unknown_preset_names_the_nearest() -> None:
    assert find_preset("gspo") is presets()["gspo"]
    with pytest.raises(ConfigError, match="did you mean 'dr-grpo'"):
        find_preset("dr_grpo")


def test_the_command_line_can_read_presets_without_torch() -> None:
    code = "import sys, ycore.config.presets; sys.exit('torch' in sys.modules or 'trl' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=240).returncode == 0


def test_every_preset_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name in (*presets(), *get_args(Advantage)):
        assert f"`{name}`" in text or f"--preset {name}`" in text, name
